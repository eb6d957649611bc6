"""How a model uses its attention: how many tokens a query takes in, and how far away they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

import torch
from torch import Tensor

from regard.core import Grid, RegardError
from regard.core.eval_mode import eval_mode
from regard.explain.layer_inputs import effective_cells
from regard.swapping.capture import capture, with_regard_softmax
from regard.swapping.layer import Port

from .user_model import UserModel

QUERIES = 256
"""Evenly spaced patch tokens at most, whose weights are looked at."""
LOCAL, GLOBAL = 0.6, 0.9
"""Of the distance under equal weights: below the first a layer is called local, above the second global."""
UNUSED = 0.01
"""A divergence of the output without a layer's attention, below which it is hardly used."""


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
    heads: dict[str, list[AttentionUse]] = {}

    def read(name: str, weights: Tensor) -> None:
        layer = swapped.get_submodule(name)
        assert isinstance(layer, Port)
        grid = layer.mixer.site.grid
        if weights.shape[-1] == weights.shape[-2] == grid.tokens:  # keys may be fewer (spatial reduction)
            heads.setdefault(name, []).extend(_uses(weights, grid))

    try:
        swapped = with_regard_softmax(model.network, images)
        with capture(swapped, reduce=read), eval_mode(swapped):
            for image in images.split(1):  # a map of many tokens is large
                swapped(image)
    except RegardError as error:
        return f"where attention looks is not known: {error}"
    uses = {name: _mean(of_layer) for name, of_layer in heads.items()}
    return uses or "where attention looks is not known: its keys are not the tokens of a grid"


def _uses(weights: Tensor, grid: Grid) -> list[AttentionUse]:
    """Of each head, for the maps (windows, H, N, N) of one image."""
    places = torch.cartesian_prod(*map(torch.arange, grid.sides)).double()
    queries = torch.linspace(0, grid.cells - 1, min(grid.cells, QUERIES)).round().long()
    distance = torch.cdist(places[queries], places)
    distance /= max(float(distance.mean()), 1e-12)
    rows = weights[:, :, grid.span][:, :, queries]
    return [_use_of_head(head, grid, distance, len(weights)) for head in rows.unbind(1)]


def _use_of_head(rows: Tensor, grid: Grid, distance: Tensor, windows: int) -> AttentionUse:
    """rows: of some patch tokens. distance: of them to all, in units of its mean."""
    inside = rows[..., grid.span].double()
    share = inside.sum(-1, keepdim=True)
    return AttentionUse(
        tokens=float(effective_cells(rows).mean()) / grid.tokens,
        distance=float((inside / share.clamp_min(1e-12) * distance).sum(-1).mean()),
        prefix=max(0.0, 1 - float(share.mean())),
        windows=windows,
    )


def _mean(uses: Sequence[AttentionUse]) -> AttentionUse:
    """The mean of several uses of one layer."""
    tokens, distance, prefix, windows = zip(*map(astuple, uses), strict=True)
    return AttentionUse(fmean(tokens), fmean(distance), fmean(prefix), windows[0])


def summary(uses: Mapping[str, AttentionUse], losses: Mapping[str, float]) -> Sequence[str]:
    """Sentences on where attention is in windows, local, global or hardly used.

    losses: divergence of the output without a layer's attention.
    """
    lines = []
    texts = {"windows": "attention in windows", "local": "local attention", "global": "global attention"}
    for word, text in texts.items():
        if names := [name for name, use in uses.items() if use.word == word]:
            lines.append(f"{text}: {', '.join(names)}")
    if unused := [name for name, loss in losses.items() if math.isfinite(loss) and loss < UNUSED]:
        lines.append(f"hardly used (the output changes by less than {UNUSED} without it): {', '.join(unused)}")
    return lines
