"""Distilling a whole model: swap by a plan, learn layer by layer, then, if asked, the class scores; save the result."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.core import ConfigError, Extra, MixerConfig, StoreError, UnsupportedError, require
from regard.images.images import Images
from regard.models.recipe import check_recipe
from regard.models.saving import save
from regard.swapping.inspect import matching_layers, plannable_layers
from regard.swapping.layer_plan import PlanSource, is_layer_plan, mixers_by_layer, read_layer_plan, spell_layer_plan

from .fidelity import Fidelity, ScoreChange
from .kept import Kept
from .learning import Distillation, LayerDistillation, ScoreDistillation
from .substitutes import Substitutes
from .user_model import UserModel, split_images, tensors

STATE = "distill.state"


@dataclass(frozen=True)
class Distilled:
    """The outcome. model: swapped, with what it learned. changes: of the class scores after each step, by its name, on
    `judged` images that it did not learn from."""

    model: nn.Module
    changes: dict[str, ScoreChange]
    judged: int


def plan_of(model: UserModel, source: PlanSource | MixerConfig, extra: Extra = ()) -> dict[str, MixerConfig]:
    """A plan with exact layer names of a plan, or of one mechanism for all layers. Raises: ConfigError, SwapError."""
    if isinstance(source, MixerConfig):
        return dict.fromkeys(matching_layers(model.network, ports=model.ports), source)
    matching_layers(model.network, ports=model.ports, reinitialise=True)  # refuses a model without attention
    if isinstance(source, str) and not is_layer_plan(source):
        source = f"*={source}"
    plan = read_layer_plan(source, extra)
    return mixers_by_layer(plan, list(plannable_layers(model.network, plan, model.ports)))


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
    Raises: as `recommend`; UnsupportedError for a model that cannot be saved, before anything is learned; ConfigError
    for a folder that has a model already; StoreError for a state that is damaged or of another distillation.
    """
    if rank:
        require("peft", extra="lora")
    model.check()
    if folder is not None and not model.saveable:
        raise UnsupportedError(
            f"neither create_model nor a run of segmentation made {model.label}, so what it learns cannot be saved; in "
            "Python, distill_model with folder=None returns the new model"
        )
    say = report or (lambda text: None)
    choice = plan_of(model, plan, extra)
    learned, judged = split_images(images)
    key = f"{_key(model, choice, images, layers, scores)}|{rank}"
    kept = Kept(None if folder is None else folder / STATE, key, _refuse_other)
    if folder is not None and not kept.content and (folder / "model.json").exists():
        raise ConfigError(
            f"{folder} has a saved model already, which is not replaced: choose another folder with --out, or delete it"
        )
    mixers = tuple(choice.values())
    with Substitutes(model.network, mixers, model.example, ports=model.ports, reinitialise=True) as substitutes:
        substitutes.keep_only(choice)
        device = next(model.network.parameters()).device
        fidelity = Fidelity(substitutes, model.prepared(tensors(judged), device))
        if folder is not None:
            check_recipe(substitutes.applied(choice, model.ports))  # what cannot be saved is refused before it learns
        changes = {"swapped": fidelity.scores(choice)}
        say(_line("swapped", changes["swapped"]))
        learning = LayerDistillation(substitutes, model, learned, layers)
        kept.learn(learning, "layers", say)
        if layers.steps:
            changes["layers learned"] = fidelity.scores(choice)
            say(_line("after learning layer by layer", changes["layers learned"]))
        student = substitutes.applied(choice, model.ports)
        if scores.steps:
            learning_scores = ScoreDistillation(student, model, learned, scores, rank)
            kept.learn(learning_scores, "scores", say)
            student = learning_scores.end()
            changes["scores learned"] = fidelity.of_model(student)
            say(_line("after learning the class scores", changes["scores learned"]))
    if folder is not None:
        save(student, folder, data=model.data)
        kept.remove()
    return Distilled(student, changes, len(judged))


def _refuse_other(text: str) -> None:
    raise StoreError(
        f"{text} that did not end: end it with its own command, choose another folder with --out, or delete the file"
    )


def _line(step: str, change: ScoreChange) -> str:
    return f"{step}: divergence {change.divergence.mean:.4g} nats, agreement {change.agreement.mean:.1f} %"


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
