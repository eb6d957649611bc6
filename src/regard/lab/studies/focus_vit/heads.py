"""A question of our own: what do a classifier and segmenters on a real backbone keep when its attention is swapped?

Linear heads on the features of `focus_vit`'s backbone: learned before the swap and kept, or learned anew after it. The
backbone itself learns nothing. Pictures, sizes, mechanisms and heads were fixed before the first result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import Grid, require
from regard.core.eval_mode import eval_mode
from regard.files.records import read_record_if_present, write_record
from regard.images.imagenet import NORMAL
from regard.images.images import decode
from regard.images.normalise import normalise
from regard.lab.data import catalog
from regard.lab.engine.analysis import Analysis, Source
from regard.lab.tasks.detection import data as scenes
from regard.lab.tasks.detection import masks as rle
from regard.lab.tasks.segmentation import data as masks
from regard.measure.intervals import interval
from regard.models.segmentation import VOID
from regard.pages.sheets import Cell, Sheet
from regard.swapping.swap import swap

from .half_the_time import SEED, mean_and_bounds, progress, record_folder
from .network import PATCH, FocusViT, focus_vit
from .swaps import share

NAME = "focus_vit_heads"
Picture = tuple[np.ndarray, np.ndarray]
"""Pixels (h, w, 3), and what is told from them: a class, without axes, or a mask (height, width), `VOID` left out."""


@dataclass(frozen=True)
class Problem:
    """size: (height, width) of the network's input. read: the pictures of a split, so many of them."""

    data: str
    score: str
    size: tuple[int, int]
    mixers: tuple[str, ...]
    learned: int
    judged: int
    read: Callable[[str, int], list[Picture]]

    @property
    def grid(self) -> Grid:
        return Grid(self.size[0] // PATCH, self.size[1] // PATCH, prefix=1)


def drawn(number: int, wanted: int) -> list[int]:
    """Rows of a split, drawn by the seed."""
    return np.sort(np.random.default_rng(SEED).permutation(number)[:wanted]).tolist()


def classified(split: str, wanted: int) -> list[Picture]:
    """Of imagenette_small."""
    images = getattr(catalog.load("imagenette_small", (224, 224)), split)
    return [(np.asarray(images.pixels[row]), np.asarray(images.labels[row])) for row in drawn(len(images), wanted)]


def streets(split: str, wanted: int) -> list[Picture]:
    """Of camvid."""
    samples = masks.load("camvid", VOID, 0).splits[split]
    return [(samples[row].image, samples[row].mask) for row in drawn(len(samples), wanted)]


def nuclei(split: str, wanted: int) -> list[Picture]:
    """Of nuclei: 1 where one is."""
    found = scenes.load("nuclei", True, "stop").splits[split]
    chosen = [found[row] for row in drawn(len(found), wanted)]
    told = [np.asarray(rle.decode(one.objects.masks or (), one.size).any(0)) for one in chosen]
    return [(decode(one.source, None, 3), mask) for one, mask in zip(chosen, told, strict=True)]


PROBLEMS: tuple[Problem, ...] = (
    Problem(
        "imagenette_small", "top-1", (224, 224),
        ("MiTA(m=25, k=25)", "Agent(m=36)", "Window(size=8)", "Linear()", "TopK(k=25)", "SKA()"), 1000, 500, classified,
    ),
    Problem(
        "camvid", "accuracy of pixels", (336, 448),
        ("MiTA(m=64, k=64)", "Agent(m=100)", "Window(size=13)", "Linear()", "TopK(k=64)", "SKA()"), 150, 100, streets,
    ),
    Problem(
        "nuclei", "IoU", (448, 448),
        ("MiTA(m=100, k=100)", "Agent(m=144)", "Window(size=16)", "Linear()", "TopK(k=100)", "SKA()"), 100, 60, nuclei,
    ),
)  # fmt: skip
"""Mechanisms as in `focus_vit_swaps`: at most 0.3 of softmax attention's products, where settings allow."""
TOKENS, STRENGTH, ROUNDS = 20_000, 0.01, 1000
"""Patches that teach a head at most, its C of scikit-learn's LogisticRegression, and its iterations at most."""
OWN = "Softmax()"
HEADS: Mapping[str, str] = {"kept": "learned before the swap", "anew": "learned after it"}


class _Scores:
    """found: what its record keeps, so that an interrupted analysis goes on: for each mechanism and head the score of
    each picture."""

    def __init__(self, problem: Problem, folder: Path) -> None:
        self.problem, self.record = problem, folder / f"{problem.data}.json"
        self.found: dict[str, list[float]] = (read_record_if_present(self.record) or {}).get("found", {})

    def compute(self) -> None:
        """All that the record lacks."""
        missing = [mixer for mixer in (OWN, *self.problem.mixers) if f"{mixer} | anew" not in self.found]
        if not missing:
            return
        learned, judged = (self.problem.read(*part) for part in self._parts())
        before = self._learn(focus_vit(self.problem.size[0]), learned)
        for mixer in missing:
            progress(f"{self.problem.data}: {mixer}")
            model = focus_vit(self.problem.size[0])
            if mixer != OWN:
                swap(model, mixer, example=torch.zeros(1, 3, *self.problem.size))
            features = [self._features(model, pixels) for pixels, _ in judged]
            heads = {"kept": before, "anew": self._learn(model, learned) if mixer != OWN else before}
            for name, head in heads.items():
                pairs = zip(features, judged, strict=True)
                self.found[f"{mixer} | {name}"] = [self._score(head, x, told) for x, (_, told) in pairs]
            write_record(self.record, {"found": self.found})

    def _parts(self) -> list[tuple[str, int]]:
        return [("train", self.problem.learned), ("test", self.problem.judged)]

    @torch.no_grad()
    def _features(self, model: FocusViT, pixels: np.ndarray) -> Float[Tensor, "n C"]:
        """The class token and the mean patch token of a picture, or all its patch tokens."""
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
        if image.shape[-2:] != self.problem.size:
            image = torch.nn.functional.interpolate(image, self.problem.size, mode="bicubic", antialias=True)
        image = normalise(image.clamp(0, 255).round().to(torch.uint8), NORMAL, torch.device("cpu"))
        with eval_mode(model):
            (tokens,) = model.backbone.forward_features(image)
        return torch.cat([tokens[0], tokens[1:].mean(0)])[None] if self._is_one_class else tokens[1:]

    @property
    def _is_one_class(self) -> bool:
        return self.problem.score == "top-1"

    def _learn(self, model: FocusViT, pictures: Sequence[Picture]) -> Any:
        """A linear head: of patches, each has the class of most of its pixels."""
        require("sklearn")
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        features = torch.cat([self._features(model, pixels) for pixels, _ in pictures]).numpy()
        told = np.concatenate([np.atleast_1d(told) if self._is_one_class else self._of_patches(told)
                               for _, told in pictures])  # fmt: skip
        rows = np.flatnonzero(told != VOID)
        rows = rows[drawn(len(rows), TOKENS)]
        head = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, max_iter=ROUNDS))
        return head.fit(features[rows], told[rows])

    def _of_patches(self, mask: np.ndarray) -> np.ndarray:
        whole = torch.from_numpy(mask.astype(np.uint8))[None, None]
        fitted = torch.nn.functional.interpolate(whole, self.problem.size, mode="nearest-exact")[0, 0]
        patches = fitted.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).flatten(2)
        return patches.mode(-1).values.flatten().numpy()

    def _score(self, head: Any, features: Float[Tensor, "n C"], told: np.ndarray) -> float:
        """1 or 0 for a class; of a mask the share of right pixels, or the IoU of class 1, at the mask's size."""
        likely = head.predict_log_proba(features.numpy())
        if self._is_one_class:
            return float(head.classes_[likely.argmax()] == told)
        maps = torch.from_numpy(likely).T.unflatten(-1, self.problem.grid.sides)[None]
        found = torch.nn.functional.interpolate(maps, told.shape, mode="bilinear")[0].argmax(0).numpy()
        right, counted = head.classes_[found], told != VOID
        if self.problem.score == "IoU":
            return float((right & told).sum() / max((right | told).sum(), 1))
        return float((right == told)[counted].mean())

    def rows(self) -> list[tuple[Cell, ...]]:
        """By mechanism and head; the difference to the network before the swap, picture by picture."""
        about = self.problem.data, f"{self.problem.size[0]}x{self.problem.size[1]}", self.problem.grid.cells
        rows: list[tuple[Cell, ...]] = []
        for mixer in (OWN, *self.problem.mixers):
            for head in HEADS if mixer != OWN else ("kept",):
                scores = self.found[f"{mixer} | {head}"]
                apart = [100 * (a - b) for a, b in zip(scores, self.found[f"{OWN} | kept"], strict=True)]
                named = mixer, share(mixer, self.problem.grid), head
                percent = round(100 * float(np.mean(scores)), 2)
                rows.append((*about, self.problem.score, *named, percent, *mean_and_bounds(interval(apart))))
        return rows


def compute(source: Source) -> Sequence[Sheet]:
    """Scores by data, mechanism and head."""
    folder = record_folder(source, NAME)
    problems = [_Scores(problem, folder) for problem in PROBLEMS]
    for one in problems:
        one.compute()
    columns = ("data", "pixels", "tokens", "score", "mechanism", "products", "head", "percent")
    counts = ", ".join(f"{one.learned} and {one.judged} of {one.data}" for one in PROBLEMS)
    return [
        Sheet(
            title="What linear heads keep after a swap of all layers",
            columns=(*columns, "minus softmax", "from", "to"),
            rows=tuple(row for one in problems for row in one.rows()),
            note=f"Pictures that teach a head and that judge: {counts}, drawn by a seed. Heads: "
            f"{'; '.join(f'{name}: {meaning}' for name, meaning in HEADS.items())}. Scores in percent, the mean over "
            "pictures; the last three: the difference to softmax attention's, picture by picture, with its 95 % "
            "interval. Products: of the attention in a layer, divided by softmax's.",
        )
    ]  # fmt: skip


ANALYSIS = Analysis(
    name=NAME,
    title="What heads keep on a backbone that is there",
    source="Regard",
    question="What do a classifier and segmenters on a real backbone keep when its attention is swapped?",
    compute=compute,
    notes=(
        "The backbone is that of focus_vit: DINOv2's ViT-S/14, fine-tuned to predict saliency, in which its class "
        "token had no part: it tells classes less well than DINOv2 does.",
        "The backbone learns nothing: what distilling gives back is in focus_vit_swaps.",
        "Regularisation of the heads, numbers of pictures, sizes and mechanisms were fixed before the first result.",
    ),
)
