"""The explorer's page: one offline HTML file with the weights of one model, or of two beside each other."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from markupsafe import Markup
from PIL import Image
from torch import nn

from regard.advice.judges import Judge
from regard.advice.user_model import UserModel
from regard.explain.pictures import WARNING, png
from regard.explain.strips import strip_picture
from regard.files.atomic import write_atomically
from regard.pages.rendering import render_template

from .weights import PARTS, ROLLOUT, Reading, by_reason, read_weights

SMALL, LARGE = 10_500_000, 28_000_000
"""Bytes of all weights of a page: of pictures of at most `SMALL_SIDE` pixels, and of larger ones. A file has a third
more."""
SMALL_SIDE = 256
Pixels = UInt8[np.ndarray, "height width channels"]


@dataclass(frozen=True, eq=False)
class Shown:
    """A model on the page. label: its name. trained: whether its weights are."""

    label: str
    network: nn.Module
    trained: bool = True


@dataclass(frozen=True)
class Page:
    """The page as text; a notebook shows it."""

    html: str

    def save(self, path: str | Path) -> Path:
        """Write the file. Raises: StoreError."""
        write_atomically(path, self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        frame = '<iframe style="width:100%;height:52rem;border:0" srcdoc="{}"></iframe>'
        return frame.format(html.escape(self.html, quote=True))


def make_page(
    user: UserModel, pictures: Mapping[str, Pixels], second: Shown | None = None, layers: str = "*", credit: str = ""
) -> Page:
    """The page of a model's pictures by their names, of the model's size. second: a model to compare it with, of the
    same images. layers: a glob on layer names. credit: of a picture that is not the user's own.

    Raises: UnsupportedError if a model has no weights between tokens of the picture; SwapError.
    """
    shown = [Shown(user.label, user.network, user.trained), *([second] if second is not None else [])]
    most = (SMALL if max(user.size) <= SMALL_SIDE else LARGE) // (len(shown) * len(pictures))
    entries: list[dict[str, Any]] = []
    readings: list[Reading] = []
    for name, pixels in pictures.items():
        image = user.prepare(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])[0]
        found = [read_weights(one.network, image, layers, most) for one in shown]
        readings += found
        drawn = strip_picture(pixels, image, max(weights.frames for one in found for weights in one.layers))
        entries.append(_entry(name, drawn, shown, found, _change(user, found)))
    view = {
        "title": " and ".join(one.label for one in shown),
        "source": ", ".join(pictures),
        "models": shown,
        "clip": any(weights.frames > 1 for reading in readings for weights in reading.layers),
        "warnings": [f"{one.label}: {WARNING}" for one in shown if not one.trained] + _left_out(shown, readings),
        "notes": [*_notes(readings), *([credit] if credit else [])],
        "data": Markup(json.dumps({"pictures": entries}, separators=(",", ":")).replace("<", "\\u003c")),
    }
    return Page(render_template("explore.html", ("common.js", "explore.js"), view, {}))


def _entry(
    name: str, pixels: Pixels, shown: Sequence[Shown], found: Sequence[Reading], change: str
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name, "height": pixels.shape[0], "width": pixels.shape[1], "image": _data_uri(pixels),
        "change": change,
        "models": [
            {"label": one.label, "layers": [weights.to_json() for weights in reading.layers]}
            for one, reading in zip(shown, found, strict=True)
        ],
    }  # fmt: skip


def _data_uri(pixels: Pixels) -> str:
    """As PNG where that is small, else as JPEG; other channels than grey or three colours as their mean."""
    if pixels.shape[-1] not in (1, 3):
        pixels = pixels.mean(-1, keepdims=True).round().astype(np.uint8)
    kind, encoded = "png", png(pixels)
    if len(encoded) > 400_000:
        out = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(out, "JPEG", quality=90)
        kind, encoded = "jpeg", out.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


def _change(user: UserModel, found: Sequence[Reading]) -> str:
    """How far the second model's output is from the first one's, as a sentence."""
    if len(found) < 2:
        return ""
    judge: Judge = user.judges_of(found[0].output)[0]
    distance, agrees = judge.change(*(judge.read(reading.output) for reading in found))
    said = f"Change of the output ({judge}): {float(distance[0]):.3g}{judge.unit} ({judge.distance})."
    if judge.shares or not agrees.isfinite().all():
        return said
    return f"{said} {judge.kept[:1].upper()}{judge.kept[1:]}: {100 * float(agrees[0]):.0f} %."


def _left_out(shown: Sequence[Shown], readings: Sequence[Reading]) -> list[str]:
    """A sentence for each reason why layers are not shown."""
    return [
        f"{one.label}: {', '.join(names)}: {reason}, and not shown"
        for one, reading in zip(shown, readings, strict=False)  # of the first picture; the others are alike
        for reason, names in by_reason(reading.left_out).items()
    ]


def _notes(readings: Sequence[Reading]) -> list[str]:
    """How weights are rounded and joined, and what the rollout is."""
    layers = [weights for reading in readings for weights in reading.layers]
    levels = min(weights.levels for weights in layers)
    notes = [
        "Weights have 8 bits: each is exact to half a step; a step is the largest weight of its row, divided by "
        f"{levels}."
    ]
    if (stride := max(weights.stride for weights in layers)) > 1:
        notes.append(
            f"There are too many for one page: {stride} x {stride} cells are one, of which queries are averaged and "
            "keys added. Entropy, distance and shares are of all cells."
        )
    if any(weights.points is not None for weights in layers):
        notes.append(
            f"White points are where a query samples the map between cells, exact to 1/{PARTS} of a cell; the more it "
            "takes from one, the less transparent. Weights are then the samples' shares of the cells around them."
        )
    if hidden := dict.fromkeys(name for reading in readings for name in reading.hidden_views):
        notes.append(f"Too large for this page, so left out: {'; '.join(hidden)}. Fewer layers make room: --layers.")
    if any(weights.name == ROLLOUT for weights in layers):
        notes.append(
            "Rollout over all layers: the product of the layers' weights, averaged over heads, each with the residual "
            "path beside it (Abnar and Zuidema 2020)."
        )
    return notes
