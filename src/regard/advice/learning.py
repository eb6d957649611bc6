"""Distillation without labels: substitutes learn the outputs of the layers that they replace, then a model its answers.

Layer by layer, all at once: in each pass of the original, every substitute gets the inputs of its layer and learns its
output (Zhang et al. 2024, LoLCATs, call this attention transfer). Steps are pure functions of (seed, step), so that an
interrupted distillation continues with the same bits.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import ConfigError, check_known
from regard.core.eval_mode import eval_mode
from regard.core.validation import check_fields
from regard.files.tensor_files import check_weights
from regard.images.augment import BATCHWISE
from regard.images.feed import Batches
from regard.images.images import Images
from regard.measure.bench_model import output_tensor
from regard.swapping.host_names import MIXER_CHILD
from regard.swapping.layer import Port

from .judges import Judge
from .substitutes import Substitutes
from .user_model import UserModel

MANY_IMAGES = 1920
"""With which layers learn at the full rate: 120 steps of 16."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How substitutes learn. steps, batch: of images. lr: of weights that the original has; new ones learn `faster`
    times as fast, since they start at random. In layers that learn from fewer than `MANY_IMAGES` images in all, the
    rate of the former is smaller, by the root of their number: few steps at the full rate lead a trained network away.
    augment: of the images, as in a recipe. Raises: ConfigError."""

    steps: int = 120
    batch: int = 16
    lr: float = 1e-3
    faster: float = 4.0
    augment: str = "flip"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_known(self.augment, BATCHWISE, f"unknown augment {self.augment!r}")
        if self.steps < 0 or self.batch < 1 or not 0 < self.lr < 1 or not self.faster > 0 or self.seed < 0:
            raise ConfigError(
                "steps and seed are 0 or more, batch at least 1, lr between 0 and 1, faster positive, not "
                f"steps={self.steps}, seed={self.seed}, batch={self.batch}, lr={self.lr:g}, faster={self.faster:g}"
            )

    def rate(self, step: int) -> float:
        """The factor of the learning rate in a step: warm-up over a tenth, then a cosine to zero."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


class Learning(ABC):
    """Something that learns from a model in steps: `run` makes them, `state` and `resume` keep and restore where it is.

    optimizer: None where nothing can learn.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, model: UserModel, images: Images, how: Distillation) -> None:
        self.model, self.how, self.step = model, how, 0
        self.batches = Batches(images, model.size, min(how.batch, len(images)), how.augment, how.seed)

    @abstractmethod
    def make_step(self, images: Tensor) -> None:
        """One step with prepared images."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Of all that learns."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load what `weights` returned. Raises: RuntimeError or ValueError if they do not fit."""

    def run(self, seconds: int | float = math.inf) -> bool:
        """Make the remaining steps, or as many as begin within `seconds`; returns whether all steps are made."""
        end = time.monotonic() + seconds
        device = next(self.model.network.parameters()).device
        while self.step < self.how.steps:
            if time.monotonic() > end:
                return False
            self.make_step(self.model.prepare(self.batches[self.step][0], device))
            self.step += 1
        return True

    def state(self) -> dict[str, Any]:
        """Where it is, with all weights."""
        kept = {} if self.optimizer is None else self.optimizer.state_dict()["state"]
        moments = {str(number): value for number, value in kept.items()}
        return {"step": self.step, "weights": self.weights(), "moments": moments}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.load_weights(state["weights"])
        self.step = state["step"]
        if self.optimizer is not None and state["moments"]:
            moments = {int(number): value for number, value in state["moments"].items()}
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})


class LayerDistillation(Learning):
    """All substitutes learning at once.

    losses: by layer and mechanism (its spelling), the squared error of the last step, divided by the variance of the
    original's output.
    """

    def __init__(self, substitutes: Substitutes, model: UserModel, images: Images, how: Distillation) -> None:
        super().__init__(model, images, how)
        self.substitutes = substitutes
        self.losses: dict[tuple[str, Any], float] = {}
        new: list[nn.Parameter] = []
        kept: list[nn.Parameter] = []
        for layers in substitutes.layers.values():
            for layer in layers.values():
                own = {layer.layer_name(key) for key in layer.host_parameters()}
                for name, value in layer.named_parameters(remove_duplicate=False):
                    if value.requires_grad:
                        (kept if name in own or not name.startswith(MIXER_CHILD) else new).append(value)
        lr = how.lr * min(1.0, math.sqrt(how.steps * how.batch / MANY_IMAGES))
        self.groups = [(values, rate) for values, rate in ((kept, lr), (new, how.lr * how.faster)) if values]
        groups = [{"params": values, "lr": rate} for values, rate in self.groups]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98)) if groups else None
        if self.optimizer is None:
            self.step = how.steps

    def make_step(self, images: Tensor) -> None:
        assert self.optimizer is not None
        for group, (_, rate) in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["lr"] = rate * self.how.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        with self.substitutes.observe(self._learn):
            self.model.network(images)
        self.optimizer.step()

    def _learn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Add the gradients of the substitutes of one layer; their graphs end here, so that few are in memory."""
        scale = 1 / output.var().clamp_min(1e-12)
        for mixer, layer in self.substitutes.layers[name].items():
            if not any(value.requires_grad for value in layer.parameters()):
                continue
            with torch.enable_grad():
                error = (output_tensor(layer(*args, **kwargs)) - output).square().mean() * scale
            if error.isfinite():
                error.backward()
            self.losses[name, mixer] = float(error.detach())

    def weights(self) -> dict[str, Tensor]:
        return self.substitutes.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.substitutes.load_weights(weights)


class OutputDistillation(Learning):
    """A swapped copy of a model learning the original's outputs, all weights that can be trained.

    The loss is that of the judges of the outputs, added. `end` returns the student. rank: of LoRA around every linear
    layer, which then learns in its place, beside the parameters that are new in the swapped layers; `end` adds it to
    the weights. 0: all weights learn themselves.
    Raises: ConfigError if no weight can be trained; UnsupportedError, by `run`, for outputs that have no gradients.
    """

    def __init__(
        self, student: nn.Module, model: UserModel, images: Images, judges: Sequence[Judge], how: Distillation,
        rank: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model, images, how)
        self.trained = {name: value.requires_grad for name, value in student.named_parameters()}
        self.adapted = _with_lora(student, rank, how.seed) if rank else None
        self.student, self.judges = student.eval(), judges
        self.parameters = [value for value in student.parameters() if value.requires_grad]
        if not self.parameters:
            raise ConfigError("all weights of the model are frozen, so it cannot learn its outputs")
        self.optimizer = torch.optim.AdamW(self.parameters, lr=how.lr, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.enable_grad()
    def make_step(self, images: Tensor) -> None:
        assert self.optimizer is not None
        self.optimizer.param_groups[0]["lr"] = self.how.lr * self.how.rate(self.step)
        with eval_mode(self.model.network):
            target = self.model.network(images)
        output = self.student(images)
        loss = torch.stack([judge.loss(judge.read(target), judge.read(output)) for judge in self.judges]).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.student.state_dict())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        check_weights(self.student, weights)
        self.student.load_state_dict(weights)

    def end(self) -> nn.Module:
        """The student without adapters, whose weights have what they learned."""
        if self.adapted is not None:
            self.student = self.adapted.merge_and_unload()
            self.adapted = None
            for name, value in self.student.named_parameters():
                value.requires_grad_(self.trained[name])
        return self.student


def _with_lora(student: nn.Module, rank: int, seed: int) -> Any:
    """PEFT's LoRA around every linear layer of a model, in place; what is new in swapped layers also learns.

    seed: of the adapters' initial weights.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    linear = [name for name, module in student.named_modules() if isinstance(module, nn.Linear)]
    new = [value for name, layer in student.named_modules() if isinstance(layer, Port) for value in _new_values(layer)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = LoraModel(student, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), "default")
    for value in new:
        value.requires_grad_(True)
    return adapted


def _new_values(layer: Port) -> list[nn.Parameter]:
    """The parameters of a swapped layer that its host does not have, which can be trained."""
    own = {layer.layer_name(key) for key in layer.host_parameters()}
    return [value for name, value in layer.named_parameters() if name not in own and value.requires_grad]
