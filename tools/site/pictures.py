"""The picture of a mechanism's page: what its untrained layer reads of a photograph for two queries.

Queries, keys and values are the colours of the image's patches, so that similar patches have large products. Other
parameters are as they start, of one seed. Where there is a matrix of token weights, its row is drawn. Elsewhere it is
the influence of a patch: the norm of the derivative of the query's output by that patch.
"""

import io

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from regard.core import Grid, MixerConfig, Site
from regard.explain.pictures import CREDITS, overlay, sample_image
from regard.mixers.cswin import CSWin
from regard.mixers.shared.heads import HeadMixer

PHOTOGRAPH = "china"
CREDIT = CREDITS[PHOTOGRAPH]
GRID = Grid(14, 14)
PATCH = 16
"""Pixels of a patch's side."""
PARTS = 4
"""A patch is averaged to 4 x 4 colours: 48 features."""
QUERIES = ((8, 5), (12, 11))
"""(row, column): the tower, and the trees."""
SHARPNESS = 8.0
"""The logit of a patch with itself, after division by the root of d."""


def tokens(photograph: np.ndarray) -> Float[Tensor, "1 N C"]:
    """The features of the patches: their mean over the image is removed, and all have the same norm."""
    pixels = torch.from_numpy(photograph.copy()).permute(2, 0, 1)[None].double()
    colours = nn.functional.avg_pool2d(pixels, PATCH // PARTS)
    features = nn.functional.unfold(colours, PARTS, stride=PARTS).mT
    centred = (features - features.mean(1, keepdim=True)) / features.std(1, keepdim=True)
    return nn.functional.normalize(centred, dim=-1) * SHARPNESS**0.5 * features.shape[-1] ** 0.25


def has_weights(config: MixerConfig) -> bool:
    """Whether the picture shows a row of the attention matrix, not an influence."""
    return config.card.row_maps


def attended(config: MixerConfig, x: Float[Tensor, "1 N C"], query: tuple[int, int]) -> Float[np.ndarray, "h w"]:
    """The weights of one query on all patches, or their influence; at least 0."""
    torch.manual_seed(0)
    heads = 2 if isinstance(config, CSWin) else 1  # stripes along rows and along columns
    layer = config.build(Site(dim=x.shape[-1], heads=heads, grid=GRID)).double().eval()
    token = query[0] * GRID.width + query[1]
    if has_weights(config) and isinstance(layer, HeadMixer):
        tokens = x[:, None].expand(-1, heads, -1, -1)
        roles = {role: tokens if role in config.uses else None for role in "qkv"}
        weights = layer.operator.weights(roles["q"], roles["k"], tokens, grid=GRID)[0, :, token].mean(0)
    else:
        use_features(layer)
        derivative = torch.func.jacrev(lambda patches: layer.reference(patches, GRID)[0, token])(x)  # (C, 1, N, C)
        weights = derivative[:, 0].square().sum((0, 2)).sqrt()
    return weights.detach().abs().view(GRID.height, GRID.width).numpy()


def use_features(layer: nn.Module) -> None:
    """Square projections become the identity, so that queries, keys and values are the features themselves."""
    for name, part in layer.named_modules():
        if isinstance(part, nn.Linear) and name.split(".")[0] in ("qkv", "proj"):
            rows, columns = part.weight.shape
            if rows % columns == 0:
                with torch.no_grad():
                    part.weight.copy_(torch.eye(columns, dtype=part.weight.dtype).repeat(rows // columns, 1))


def draw(config: MixerConfig) -> bytes:
    """The photograph and, for each query, what is read, as a PNG file."""
    photograph = sample_image(GRID.height * PATCH, name=PHOTOGRAPH)
    x = tokens(photograph)
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(7.2, 2.55), layout="constrained", facecolor="none")
        panels = figure.subplots(1, 1 + len(QUERIES))
        for axes in panels:
            axes.set_axis_off()
        panels[0].imshow(photograph)
        for axes, query in zip(panels[1:], QUERIES, strict=True):
            overlay(axes, photograph, attended(config, x, query), query)
        out = io.BytesIO()
        FigureCanvasAgg(figure).print_png(out, metadata={"Software": None})
    return small(out.getvalue())


def small(png: bytes) -> bytes:
    """The picture with at most 128 colours."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGBA").quantize(128).save(out, "PNG", optimize=True)
    return out.getvalue()
