"""Distilling a whole model: swap by a plan, learn layer by layer, then, if asked, the output; save the result.

What is learned never ends farther from the original than it began, on images that nothing learns from: a step that
does is left out. The rate of the output is found by short trials.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from regard.core import ConfigError, Extra, MixerConfig, StoreError, require
from regard.files.atomic import write_atomically
from regard.images.images import Images
from regard.models.hugging_face import MODEL_FILES
from regard.models.recipe import check_recipe, stored_tensors
from regard.models.saving import save
from regard.swapping.inspect import matching_layers, plannable_layers
from regard.swapping.layer_plan import (
    PlanSource,
    is_layer_plan,
    mixers_by_layer,
    read_layer_plan,
    spell_layer_plan,
    write_layer_plan,
)

from .fidelity import AnswerChange, Fidelity
from .judges import Judge
from .judges.choose import judge_text, judged_as
from .kept import Kept
from .learning import Distillation, LayerDistillation, OutputDistillation
from .substitutes import Substitutes
from .user_model import UserModel, split_images, tensors

STATE, PLAN, WEIGHTS = "distill.state", "plan.json", "weights.safetensors"
RATES = (1.0, 0.1, 0.01)
"""Of the rate of the output, which are tried."""
TRIAL = 20
"""Steps of a trial at least, and its part of all steps; all trials together have at most half of the steps."""


@dataclass(frozen=True)
class Distilled:
    """The outcome. model: swapped, with what it learned. changes: of the output after each step, by its name, on
    `judged` images that it did not learn from; the last is that of `model`. judge: of the output."""

    model: nn.Module
    changes: dict[str, AnswerChange]
    judged: int
    judge: Judge

    def __repr__(self) -> str:
        """What changed after each step, as lines of text."""
        return "\n".join([*(change_text(*each, self.judge) for each in self.changes.items()), self.note])

    @property
    def note(self) -> str:
        """What the numbers mean."""
        return (
            f"divergence: {self.judge.distance}; agreement: {self.judge.kept}; both with the original, on "
            f"{self.judged} images that it did not learn from"
        )


def change_text(step: str, change: AnswerChange, judge: Judge) -> str:
    """What a step has changed so far."""
    share = change.agreement.mean  # a judge of the user's own knows none
    known = "" if share is None or math.isnan(share) else f", agreement {share:.1f} %"
    return f"{step}: divergence {change.divergence.mean:.4g}{judge.unit}{known}"


def plan_of(model: UserModel, source: PlanSource | MixerConfig, extra: Extra = ()) -> dict[str, MixerConfig]:
    """A plan with exact layer names of a plan, or of one mechanism for all layers. Raises: ConfigError, SwapError."""
    if isinstance(source, MixerConfig):
        return dict.fromkeys(matching_layers(model.network, ports=model.ports), source)
    matching_layers(model.network, ports=model.ports, reinitialise=True)  # refuses a model without attention
    if isinstance(source, str) and not is_layer_plan(source):
        source = f"*={source}"
    if not (plan := read_layer_plan(source, extra)):
        raise ConfigError("the plan has no layer, so there is nothing to teach: give one that changes a layer")
    return mixers_by_layer(plan, list(plannable_layers(model.network, plan, model.ports)))


def distill_model(
    model: UserModel, plan: PlanSource | MixerConfig, images: Images, layers: Distillation, outputs: Distillation,
    folder: Path | None = None, *, rank: int = 0, guard: bool = True, extra: Extra = (),
    report: Callable[[str], None] | None = None,
) -> Distilled:  # fmt: skip
    """Swap a copy of the model by a plan and teach it. layers, outputs: how each layer, then the whole model, learns.

    rank: of LoRA with which the whole model learns, 0 = all weights learn (`OutputDistillation`). guard: try the rate
    of `outputs`, a tenth and a hundredth of it in short trials, and leave out a step after which the judged images are
    farther from the original; False learns as it is told.
    folder: the new model is saved there at the end (`how_to_load` says how it is read), and before that its state, from
    which the same call goes on with the same bits; None keeps nothing. report: called with a line of text at each step.
    The model is not changed.
    Raises: as `recommend`; ConfigError for a model that was changed so that it cannot be saved, before anything is
    learned, and for a folder that has a model already; StoreError for a state that is damaged or of another
    distillation.
    """
    if rank:
        require("peft", extra="lora")
    judges = model.judges()
    say = report or (lambda text: None)
    say(judged_as(judges))
    choice = plan_of(model, plan, extra)
    learned, judged = split_images(images)
    asked = f"{spell_layer_plan(choice)}|{judge_text(model.judge)}|{layers}|{outputs}|{rank}|{guard}"
    key = f"{digest(model.network, images)}|{asked}"
    kept = Kept(None if folder is None else folder / STATE, key, _refuse_other)
    if folder is not None and not kept.content and any((folder / name).exists() for name in (*MODEL_FILES, WEIGHTS)):
        raise ConfigError(
            f"{folder} has a saved model already, which is not replaced: choose another (folder=, --out), or delete it"
        )
    mixers = tuple(choice.values())
    with Substitutes(model.network, mixers, model.example, ports=model.ports, reinitialise=True) as substitutes:
        substitutes.keep_only(choice)
        say(f"the original's outputs of {len(judged)} images")
        device = next(model.network.parameters()).device
        fidelity = Fidelity(substitutes, model.prepare(tensors(judged), device), judges)
        if folder is not None and "regard_host" in model.network.__dict__:
            check_recipe(substitutes.apply(choice, model.ports))  # what cannot be saved is refused before it learns
        teaching = _Teaching(model, choice, learned, fidelity, kept, guard, say)
        student = teaching.run(layers, outputs, rank)
    if folder is not None:
        _save(student, choice, folder, model)
        kept.remove()
    return Distilled(student, teaching.changes, len(judged), judges[0])


@dataclass
class _Teaching:
    """The steps of one distillation; changes: after each, the last that of the student."""

    model: UserModel
    choice: dict[str, MixerConfig]
    images: Images
    fidelity: Fidelity
    kept: Kept
    guard: bool
    say: Callable[[str], None]
    changes: dict[str, AnswerChange] = field(default_factory=dict)

    def run(self, layers: Distillation, outputs: Distillation, rank: int) -> nn.Module:
        """Layers, then outputs; returns the student."""
        substitutes = self.fidelity.substitutes
        self._add("swapped", self.fidelity.of_plan(self.choice))
        start = {name: value.clone() for name, value in substitutes.weights().items()}
        self.kept.learn(LayerDistillation(substitutes, self.model, self.images, layers), "layers", self.say)
        if layers.steps and not self._add("layers learned", self.fidelity.of_plan(self.choice)):
            substitutes.load_weights(start)
        before = self._student()
        if outputs.steps and not all(judge.learnable for judge in self.fidelity.judges):
            self.say("the output has no gradients, so that only the layers learned")
            return before
        rate = self._rate(outputs, rank) if self.guard and outputs.steps else 1.0
        if not outputs.steps or not rate:
            return before
        learning = self._distillation(self._student(), replace(outputs, lr=outputs.lr * rate), rank)
        self.kept.learn(learning, "outputs", self.say)
        student = learning.end()
        return student if self._add("outputs learned", self.fidelity.of_model(student)) else before

    def _student(self) -> nn.Module:
        return self.fidelity.substitutes.apply(self.choice, self.model.ports)

    def _distillation(self, student: nn.Module, how: Distillation, rank: int) -> OutputDistillation:
        return OutputDistillation(student, self.model, self.images, self.fidelity.judges, how, rank)

    def _add(self, step: str, change: AnswerChange) -> bool:
        """Keep and say what a step changed; returns False for one that is left out."""
        text, last = change_text(step, change, self.fidelity.judges[0]), next(reversed(self.changes.values()), None)
        others = "".join(f"; {name}: {other.divergence.mean:.4g}" for name, other in change.others.items())
        if self.guard and last is not None and change.loss > last.loss:
            self.say(f"{text}{others}: farther from the original than before, so that this step is left out")
            return False
        self.changes[step] = change
        self.say(text + others)
        return True

    def _rate(self, outputs: Distillation, rank: int) -> float:
        """The factor of the rate with which the output gets nearest to the original in a few steps; 0 if with none; 1
        if there are too few steps for trials."""
        steps = min(max(TRIAL, outputs.steps // TRIAL), outputs.steps // (2 * len(RATES)))
        if not steps:
            return 1.0
        if "rate" not in self.kept.content:
            best, rate = next(reversed(self.changes.values())).loss, 0.0
            for factor in RATES:
                how = replace(outputs, steps=steps, lr=outputs.lr * factor)
                trial = self._distillation(self._student(), how, rank)
                trial.run()
                loss = self.fidelity.of_model(trial.end()).loss
                self.say(f"trial of {how.steps} steps at rate {how.lr:.2g}: divergence {loss:.4g}")
                best, rate = min((best, rate), (loss, factor))
            self.kept.content["rate"] = rate
            self.kept.write()
        rate = self.kept.content["rate"]
        if not rate:
            self.say("no rate brings the output nearer to the original: it learns no more")
        return float(rate)


def _save(student: nn.Module, choice: dict[str, MixerConfig], folder: Path, model: UserModel) -> None:
    """As `save` does, or, for a network that only the user's code builds, its plan and its weights by name."""
    if model.saveable:
        student.regard_data = model.data  # type: ignore[assignment]  # of which `save` keeps what fits
        save(student, folder)
    else:
        write_atomically(folder / WEIGHTS, save_tensors(stored_tensors(student)))
        write_layer_plan(choice, folder / PLAN, model.label)


def how_to_load(folder: Path, model: UserModel) -> str:
    """The lines of Python that give the model that `distill_model` saved."""
    if model.saveable:
        return f"regard.load({str(folder)!r})"
    return (
        f"regard.swap(model, {str(folder / PLAN)!r}); model.load_state_dict(load_file({str(folder / WEIGHTS)!r})) with "
        "your model, and load_file of safetensors.torch"
    )


def _refuse_other(text: str) -> None:
    raise StoreError(
        f"{text} that did not end: end it with its own command, choose another folder (folder=, --out), or delete it"
    )


def digest(network: nn.Module, images: Images) -> str:
    """Of all tensors of a model, and of the images: what is learned from them is the same for equal digests."""
    total = hashlib.sha256()
    for name, value in network.state_dict().items():
        total.update(f"{name}|{tuple(value.shape)}|{value.dtype}".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    total.update(images.pixels.tobytes())
    return total.hexdigest()
