"""Segmenter: a host with a mechanism as the encoder, and a head that gives the classes of all pixels."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.core import ConfigError, Extra, MixerConfig, nearest
from regard.core.eval_mode import eval_mode
from regard.models.catalog import user_ports
from regard.models.create import build_host, further_options, parse_host
from regard.swapping.inspect import explain_inputs
from regard.swapping.swap import plan_swap, remove

from .conv_head import ConvHead
from .heads import CBT, Depict, LinearHead, MaskTransformer

VOID = 255
"""The class of pixels that do not count."""
HEADS: dict[str, Callable[..., nn.Module]] = {
    "linear": LinearHead, "pixels": LinearHead, "mask": MaskTransformer, "cbt": CBT, "depict": Depict, "conv": ConvHead,
}  # fmt: skip
"""Heads by name. pixels: a linear layer whose outputs are the scores of a token's pixels."""
AUXILIARY_WEIGHT = 0.4
SEGMENTER, SEGMENTER_OPTIONS = "regard.segmenter", ("host", "head", "num_classes", "img_size", "in_chans")
"""How a saved folder spells a segmenter: no function of a user has such a name."""


class TokenMaps(nn.Module):
    """A ViT whose forward pass returns maps (B, C, h, w) of the patch tokens of some blocks, normalised at the end.

    The grid is that of the image, which need not be square; prefix tokens are left out. Of clips (B, c, T, H, W) with
    `vit_desk_video`, (B, C, T h, w): the frames below one another.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__()
        self.model = model
        depth = len(cast(Any, model).blocks)
        self.indices = [depth - 1] if number == 1 else [max(depth * 2 // 3 - 1, 0), depth - 1]
        self.norm = getattr(model, "fc_norm", None) or nn.Identity()  # the final norm of a ViT with mean pooling

    def forward(self, x: Float[Tensor, "B c *T H W"]) -> list[Tensor]:
        if x.ndim == 5:
            model = cast(Any, self.model)
            rows = model.forward_features(x).unflatten(1, (-1, model.patch_embed.grid_size[1]))
            return [self.norm(rows).movedim(-1, 1)]
        options = {"indices": self.indices, "norm": True, "intermediates_only": True, "output_fmt": "NCHW"}
        maps = cast(Any, self.model).forward_intermediates(x, **options)
        return [self.norm(y.movedim(1, -1)).movedim(-1, 1) for y in maps]


class Pyramid(nn.Module):
    """timm's `features_only` model with maps (B, C, h, w), also for models that have channels last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        form = getattr(model, "output_fmt", None)
        self.channels_last = str(getattr(form, "value", form)) == "NHWC"

    def forward(self, x: Float[Tensor, "B c H W"]) -> list[Tensor]:
        maps = self.model(x)
        return [y.permute(0, 3, 1, 2) for y in maps] if self.channels_last else list(maps)


class Segmenter(nn.Module):
    """Scores (B, K, H, W) of images (B, c, H, W), enlarged (bilinear) to the size of the image.

    With masks: the mean cross-entropy of pixels that are not void, plus 0.4 times that of the auxiliary head if there
    is one.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    @property
    def patch_embed(self) -> nn.Module:
        """Of a ViT: names the grid of its tokens, for attention maps. Raises: AttributeError for other encoders."""
        return cast(nn.Module, cast(Any, self.encoder).model.patch_embed)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of a ViT before those of the patches."""
        return int(getattr(cast(Any, self.encoder).model, "num_prefix_tokens", 0) or 0)

    def forward(
        self, images: Float[Tensor, "B c *T H W"], masks: UInt8[Tensor, "B H W"] | None = None, smoothing: float = 0.0
    ) -> Tensor:
        maps = self.encoder(images)
        size = (images.shape[-2], images.shape[-1])
        scores = enlarge(self.head(maps[-1]), size)
        if masks is None:
            return scores
        loss = pixel_loss(scores, masks, smoothing)
        if isinstance(self.head, ConvHead):
            loss = loss + AUXILIARY_WEIGHT * pixel_loss(enlarge(self.head.auxiliary(maps[-2]), size), masks, smoothing)
        return loss


def enlarge(scores: Float[Tensor, "B K h w"], size: tuple[int, int]) -> Float[Tensor, "B K H W"]:
    """Scores of every pixel of an image of size = (height, width), bilinear."""
    if tuple(scores.shape[-2:]) == size:
        return scores
    return F.interpolate(scores, size, mode="bilinear", align_corners=False)


def pixel_loss(scores: Float[Tensor, "B K H W"], masks: UInt8[Tensor, "B H W"], smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy of the pixels that are not void; 0 if all are."""
    total = F.cross_entropy(scores.float(), masks.long(), ignore_index=VOID, label_smoothing=smoothing, reduction="sum")
    return total / (masks != VOID).sum().clamp(min=1)


def make_segmenter(
    host: str, mixer: MixerConfig | None, head: str, *, classes: int, size: tuple[int, int], channels: int = 3,
    frames: int = 1, removed: bool = False, pretrained: bool = True, extra: Extra = (),
) -> Segmenter:  # fmt: skip
    """A host, with a mechanism or its own attention (mixer=None) or without any (removed), and a head.

    host: a ViT, whose patch tokens are the map, or a model with several maps (attended ResNets, pyramids), whose last
    ones are used; "attended_resnet50(output_stride=8)" dilates. head: a name of `HEADS`, with options in brackets:
    "cbt(heads=6)", "conv(attention=True)"; that head's attention gets the mechanism too. size: (height, width) of
    images. frames: above 1, the host takes clips. pretrained: False ignores the published weights that the host's
    spelling names. `save` and `load` know a segmenter of images.
    Raises: ConfigError; the errors of `create_model` and `plan_swap`.
    """
    name, options = parse_host(head)
    if name not in HEADS:
        raise ConfigError(f"there is no head {head!r}; {nearest(name, HEADS)}")
    encoder = _encoder(host, size, channels, 2 if name == "conv" else 1, pretrained, extra)
    example = torch.zeros(
        1, channels, *((frames,) if frames > 1 else ()), *size, device=next(encoder.parameters()).device
    )
    with explain_inputs(encoder.model, example), eval_mode(encoder):
        maps = encoder(example)
    if name == "conv" and len(maps) < 2:
        raise ConfigError(f"head conv needs a host with two maps, {host} has {len(maps)}")
    if name == "pixels":
        grid = maps[-1].shape[-2:]
        options["pixels"] = size[0] // grid[0]
        if any(side != options["pixels"] * cells for side, cells in zip(size, grid, strict=True)):
            raise ConfigError(
                f"head pixels needs square patches: {host} has {grid[0]}x{grid[1]} tokens for images of "
                f'{size[0]}x{size[1]}; use another size, or head="linear"'
            )
    width: Any = [y.shape[1] for y in maps] if name == "conv" else maps[-1].shape[1]
    try:
        made = HEADS[name](width, classes, **options)
    except TypeError as error:
        raise ConfigError(f"head {head} cannot be built: {str(error).partition('__init__() ')[2] or error}") from error
    model = Segmenter(encoder, made)
    if mixer is not None:
        plan = plan_swap(model, mixer, example=example, ports=user_ports(extra))
        plan.warn()
        faithful = bool(parse_host(host)[1].get("pretrained")) and pretrained
        plan.apply(faithful=faithful)
    options = dict(zip(SEGMENTER_OPTIONS, (host, head, classes, size, channels), strict=True))
    model.regard_host = (SEGMENTER, options)  # type: ignore[assignment]
    model.regard_extra, model.img_size = tuple(extra), size  # type: ignore[assignment]
    return cast(Segmenter, remove(model, example=example, ports=user_ports(extra))) if removed else model


def _encoder(
    host: str, size: tuple[int, int], channels: int, number: int, pretrained: bool, extra: Extra
) -> TokenMaps | Pyramid:
    """A host that returns its last maps. number: of maps."""
    options, weightless = further_options(host, channels, pretrained), further_options(host, channels, False)
    if not parse_host(host)[1].keys() & {"output_stride", "features_only"}:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            probe = build_host(host, None, size, extra, **weightless, num_classes=0)
        if all(hasattr(probe, part) for part in ("blocks", "patch_embed", "forward_intermediates")):
            return TokenMaps(build_host(host, None, size, extra, **options, num_classes=0), number)
    maps = {"features_only": True, "out_indices": tuple(range(-number, 0))}
    try:
        return Pyramid(build_host(host, None, size, extra, **options, **maps))
    except TypeError as error:
        raise ConfigError(f"{host} cannot be the encoder of a segmenter: {error}") from error
