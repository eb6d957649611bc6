"""How a model uses its attention: how many tokens a query takes in, and how far away they are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from regard.core import Grid, RegardError
from regard.core.eval_mode import eval_mode
from regard.explain.layer_inputs import effective_cells
from regard.swapping.capture import capture, with_regard_softmax
from regard.swapping.layer import Port

from .user_model import UserModel

LOCAL, GLOBAL = 0.6, 0.9
"""Of the distance under equal weights: below the first a layer is called local, above the second global."""


@dataclass(frozen=True)
class AttentionUse:
    """Of one layer, means over images, heads and patch tokens as queries.

    tokens: share of all tokens that a query takes in (exp of the entropy of its weights, divided by their number).
    distance: of the attended patch tokens, divided by that under equal weights. prefix: share of the weights on prefix
    and suffix tokens. windows: of an image, to one of which a query is limited; tokens and distance are inside it.
    """

    tokens: float
    distance: float
    prefix: float
    windows: int = 1

    @property
    def word(self) -> str:
        """windows, local, global or mixed."""
        if self.windows > 1:
            return "windows"
        return "local" if self.distance < LOCAL else "global" if self.distance > GLOBAL else "mixed"


def attention_use(model: UserModel, images: Tensor) -> dict[str, AttentionUse] | str:
    """By layer, for prepared images; a sentence instead where the attention is no plain softmax or has no such maps."""
    of_images: list[dict[str, AttentionUse | None]] = []
    try:
        swapped = with_regard_softmax(model.network, images)

        def use_of(name: str, weights: Tensor) -> AttentionUse | None:
            layer = swapped.get_submodule(name)
            assert isinstance(layer, Port)
            grid = layer.mixer.site.grid
            square = weights.shape[-1] == weights.shape[-2] == grid.tokens  # keys may be fewer (spatial reduction)
            return _use(weights, grid) if square else None

        for image in images.split(1):  # a map of many tokens is large
            with capture(swapped, reduce=use_of) as uses, eval_mode(swapped):
                swapped(image)
            of_images.append(uses)
    except RegardError as error:
        return f"where attention looks is not known: {error}"
    means = {name: _mean(use for uses in of_images if (use := uses[name]) is not None) for name in of_images[0]}
    known = {name: use for name, use in means.items() if use is not None}
    return known or "where attention looks is not known: its keys are not the tokens of a grid"


def _use(weights: Tensor, grid: Grid) -> AttentionUse:
    """Of the maps (windows, H, N, N) of one image."""
    places = torch.cartesian_prod(torch.arange(grid.height), torch.arange(grid.width)).double()
    distance = torch.cdist(places, places)
    usual = max(float(distance.mean()), 1e-12)
    uses = [_use_of_head(head, grid, distance / usual, len(weights)) for head in weights.unbind(1)]
    return _mean(uses) or uses[0]


def _use_of_head(weights: Tensor, grid: Grid, distance: Tensor, windows: int) -> AttentionUse:
    rows = weights[:, grid.span]
    inside = rows[..., grid.span].double()
    share = inside.sum(-1, keepdim=True)
    return AttentionUse(
        tokens=float(effective_cells(rows).mean()) / grid.tokens,
        distance=float((inside / share.clamp_min(1e-12) * distance).sum(-1).mean()),
        prefix=max(0.0, 1 - float(share.mean())),
        windows=windows,
    )


def _mean(uses: Iterable[AttentionUse]) -> AttentionUse | None:
    """The mean of several uses of one layer; None for none."""
    rows = [astuple(use) for use in uses]
    if not rows:
        return None
    tokens, distance, prefix = (sum(column) / len(rows) for column in list(zip(*rows, strict=True))[:3])
    return AttentionUse(tokens, distance, prefix, rows[0][3])


def summary(uses: Mapping[str, AttentionUse], losses: Mapping[str, float], threshold: float = 0.01) -> Sequence[str]:
    """Sentences on where attention is in windows, local, global or hardly used.

    losses: divergence of the scores without a layer's attention, in nats.
    """
    lines = []
    for word, text in (
        ("windows", "attention in windows"),
        ("local", "local attention"),
        ("global", "global attention"),
    ):
        names = [name for name, use in uses.items() if use.word == word]
        if names:
            lines.append(f"{text}: {', '.join(names)}")
    unused = [name for name, loss in losses.items() if math.isfinite(loss) and loss < threshold]
    if unused:
        lines.append(f"hardly used (the scores change by less than {threshold} nats without it): {', '.join(unused)}")
    return lines
