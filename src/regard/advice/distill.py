"""Distilling a whole model: swap by a plan, learn layer by layer, then, if asked, the class scores; save the result."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Extra, MixerConfig, StoreError, require
from regard.models.saving import check_recipe, save
from regard.store.tensor_files import read_state, write_state
from regard.swapping.inspect import matching_layers
from regard.swapping.layer_plan import PlanSource, is_layer_plan, mixers_by_layer, read_layer_plan, spell_layer_plan
from regard.tasks.data.images import Images

from .fidelity import Fidelity, ScoreChange
from .learning import Distillation, LayerDistillation, ScoreDistillation
from .substitutes import Substitutes
from .user_model import UserModel, split_images, tensors

STATE = "distill.state"
BETWEEN_SAVES = 20.0
"""Seconds of learning."""


@dataclass(frozen=True)
class Distilled:
    """The outcome. model: swapped, with what it learned. changes: of the class scores after each step, by its name, on
    `judged` images that it did not learn from."""

    model: nn.Module
    changes: dict[str, ScoreChange]
    judged: int


def plan_of(model: UserModel, source: PlanSource | MixerConfig, extra: Extra = ()) -> dict[str, MixerConfig]:
    """A plan with exact layer names of a plan, or of one mechanism for all layers. Raises: ConfigError, SwapError."""
    layers = matching_layers(model.network, ports=model.ports)
    if isinstance(source, MixerConfig):
        return dict.fromkeys(layers, source)
    if isinstance(source, str) and not is_layer_plan(source):
        source = f"*={source}"
    return mixers_by_layer(read_layer_plan(source, extra), layers)


def distill_model(
    model: UserModel,
    plan: PlanSource | MixerConfig,
    images: Images,
    layers: Distillation,
    scores: Distillation,
    folder: Path | None = None,
    *,
    rank: int = 0,
    extra: Extra = (),
    report: Callable[[str], None] | None = None,
) -> Distilled:
    """Swap a copy of the model by a plan and teach it. layers, scores: how each layer, then the whole model, learns.

    rank: of LoRA with which the whole model learns, 0 = all weights learn (`ScoreDistillation`).
    folder: the new model is saved there at the end, and before that its state, from which the same call goes on with
    the same bits; None keeps nothing. report: called with a line of text at each step. The model is not changed.
    Raises: as `recommend`; ConfigError for a model that cannot be saved, before anything is learned; StoreError for a
    state that is damaged or of another distillation.
    """
    require("scipy")
    if rank:
        require("peft", extra="lora")
    say = report or (lambda text: None)
    choice = plan_of(model, plan, extra)
    learned, judged = split_images(images)
    state = _State(folder, f"{_key(model, choice, images, layers, scores)}|{rank}")
    with Substitutes(model.network, tuple(choice.values()), model.example, ports=model.ports) as substitutes:
        substitutes.keep_only(choice)
        device = next(model.network.parameters()).device
        fidelity = Fidelity(substitutes, model.prepared(tensors(judged), device))
        if folder is not None:
            check_recipe(substitutes.applied(choice, model.ports))  # what cannot be saved is refused before it learns
        changes = {"swapped": fidelity.scores(choice)}
        say(_line("swapped", changes["swapped"]))
        learning = LayerDistillation(substitutes, model, learned, layers)
        state.run(learning, "layers", say)
        if layers.steps:
            changes["layers learned"] = fidelity.scores(choice)
            say(_line("after learning layer by layer", changes["layers learned"]))
        student = substitutes.applied(choice, model.ports)
        if scores.steps:
            learning_scores = ScoreDistillation(student, model, learned, scores, rank)
            state.run(learning_scores, "scores", say)
            student = learning_scores.end()
            changes["scores learned"] = fidelity.of_model(student)
            say(_line("after learning the class scores", changes["scores learned"]))
    if folder is not None:
        save(student, folder)
        state.remove()
    return Distilled(student, changes, len(judged))


def _line(step: str, change: ScoreChange) -> str:
    return f"{step}: divergence {change.divergence.mean:.4g} nats, agreement {change.agreement.mean:.1f} %"


class _State:
    """Where a distillation is, in a file of its folder."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self.file = None if folder is None else folder / STATE
        self.content: dict[str, Any] = {"key": key}
        known = None if self.file is None else read_state(self.file)
        if known is not None and known.get("key") != key:
            raise StoreError(
                f"{self.file} is of another distillation (model, plan, images or numbers), which did not end: end it "
                "with its own command, choose another folder with --out, or delete the file"
            )
        self.content = known or self.content

    def run(self, learning: LayerDistillation | ScoreDistillation, part: str, say: Callable[[str], None]) -> None:
        """Learn to the end, from where this part is; its state is written every `BETWEEN_SAVES` seconds."""
        if part in self.content:
            learning.resume(self.content[part])
            say(f"{part}: continuing at step {learning.step} of {learning.how.steps}")
        start, first = time.monotonic(), learning.step
        while not learning.run(BETWEEN_SAVES):
            self._write(part, learning.state())
            left = (time.monotonic() - start) / max(1, learning.step - first) * (learning.how.steps - learning.step)
            say(f"{part}: step {learning.step} of {learning.how.steps}, about {left / 60:.1f} minutes left")
        self._write(part, learning.state())

    def _write(self, part: str, state: dict[str, Any]) -> None:
        self.content[part] = state
        if self.file is not None:
            write_state(self.file, self.content)

    def remove(self) -> None:
        """The saved model takes its place."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def digest(network: nn.Module, images: Images) -> str:
    """Of all tensors of a model, and of the images: what is learned from them is the same for equal digests."""
    total = hashlib.sha256()

    def add(name: str, value: Tensor) -> None:
        total.update(f"{name}|{tuple(value.shape)}|{value.dtype}".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    for name, value in network.state_dict().items():
        add(name, value)
    total.update(images.pixels.tobytes())
    return total.hexdigest()


def _key(
    model: UserModel, plan: dict[str, MixerConfig], images: Images, layers: Distillation, scores: Distillation
) -> str:
    return f"{digest(model.network, images)}|{spell_layer_plan(plan)}|{layers}|{scores}"
