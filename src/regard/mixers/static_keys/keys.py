"""The shared part of static keys (SKA, CSKA): activations, other grids, freezing for export, keys from a teacher.

A static key belongs to a patch token of the grid that it was built for. On another grid keys are resampled, or windows
of the trained grid cover it; keys of prefix and suffix tokens stay as they are.
Every head has keys of its own. Keys are resampled at every call, also without gradients; `freeze` stores the result.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Cost, Grid, GridError, Operator, Site, SwapError, softmax_rows
from regard.core.eval_mode import eval_mode
from regard.core.validation import check_arguments
from regard.mixers.shared.checks import check_prefix_suffix
from regard.mixers.shared.heads import CrossMixer, HeadMixer, HeadMixerConfig
from regard.mixers.shared.tiles import join_tokens

from .grids import former_grid, resample, same_cells, windows_on


def _star_relu(x: Tensor) -> Tensor:
    return 0.8944 * F.relu(x).square() - 0.4472  # MetaFormer's constants, not learned here


# alternatives to the softmax (SKA Table 4); the weights of a row then do not sum to 1
_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "starrelu": _star_relu, "none": lambda x: x,
}  # fmt: skip
ACTIVATIONS = ("softmax", *_POINTWISE)
FROM_TEACHER = ("calibrate", "positions")


@dataclass(frozen=True, kw_only=True)
class StaticConfig(HeadMixerConfig):
    """The fields that SKA and CSKA share.

    scale: factor of the logits, None = d^-0.5 as in the authors' code; the paper's Sec. 4.1 and Algorithm 1 have none,
    which is scale=1.0.
    init: "trunc_normal" draws the keys with standard deviation 0.02, near the uniform average; "paper" as the authors'
    code does. "calibrate" and "positions" start like the first, until `regard.calibrate` copies the keys from a trained
    host: the means of its keys over images, or the keys of its position embedding.
    resize: on another grid "interpolate" resamples the keys, "window" covers it with windows of the trained grid from
    the upper left corner (a window that is cut off is masked), "error" raises GridError. With "interpolate" a
    checkpoint of another grid is resampled too, if that grid was square or had the shape of the new one.
    activation: "softmax", or "relu", "gelu", "starrelu" (SKA Table 4) or "none", whose weights do not sum to 1.
    normalise: "1/N" divides these weights by the number of keys, hidden ones included (in windows, of a window's keys);
    the paper mentions no division.
    heads: number of heads of the host's width, 0 = the host's number. The paper's models "b" have more heads, to be
    as large as the model that they are compared with.
    """

    scale: float | None = None
    init: Literal["trunc_normal", "paper", "calibrate", "positions"] = "trunc_normal"
    resize: Literal["interpolate", "window", "error"] = "interpolate"
    activation: Literal["softmax", "relu", "gelu", "starrelu", "none"] = "softmax"
    heads: int = 0
    normalise: Literal["none", "1/N"] = "none"

    masks = frozenset({"causal", "padding", "bias"})
    cross = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.heads < 0:
            raise ConfigError(f"{name} has at least one head, or 0 for the host's number, not heads={self.heads}")
        if self.normalise != "none" and self.activation == "softmax":
            raise ConfigError(f"the softmax of {name} sums to 1 already; normalise='1/N' is for the other activations")

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        return super().build(self._with_own_heads(site), shared)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> CrossMixer:
        return super().build_cross(self._with_own_heads(site), shared)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        return super().cost(self._with_own_heads(site), accounting)

    def _with_own_heads(self, site: Site) -> Site:
        return replace(site, heads=self.heads) if self.heads else site

    @property
    def uses(self) -> str:
        """No key is projected."""
        return "qv"


def weigh(logits: Float[Tensor, "*B M"], activation: str = "softmax", masked: bool = True) -> Float[Tensor, "*B M"]:
    """Weights of M keys from their logits. masked: whether keys may be hidden; such keys get the weight 0.

    A key is hidden by -inf, or by the large negative numbers of transformers' masks: the smallest of a dtype, or -1e9.
    """
    if not masked:
        return logits.softmax(-1) if activation == "softmax" else _POINTWISE[activation](logits)
    if activation == "softmax":
        return softmax_rows(logits)
    hidden = logits < max(-5e8, torch.finfo(logits.dtype).min / 2)
    return _POINTWISE[activation](logits.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)


class StaticOperator(Operator):
    """An operator whose keys are parameters on `grid`; `site_grid` is that of the queries at build time.

    Parameters named in `on_cells` are (H, patch tokens, d) or (H * patch tokens, ...).
    """

    config: StaticConfig
    on_cells: ClassVar[frozenset[str]] = frozenset({"keys", "weight", "bias", "row_keys"})

    def __init__(self, config: StaticConfig, site: Site) -> None:
        super().__init__()
        self.config, self.grid, self.site_grid = config, site.memory or site.grid, site.grid
        self.heads, self.width = site.heads, site.width
        self.frozen: Grid | None = None
        self._frozen_names: tuple[str, ...] = ()
        self.register_load_state_dict_pre_hook(_check_state)
        self.register_load_state_dict_post_hook(_thaw)

    def constants(self, grid: Grid) -> dict[str, Tensor]:
        """The tensors for a call with keys on `grid`, resampled if the configuration says so."""
        raise NotImplementedError

    def set_keys(self, keys: Float[Tensor, "H M d"]) -> None:
        """Use these keys, in token order on the build grid, as static keys; ends `freeze`."""
        raise NotImplementedError

    def share(self, v: Tensor, keys: int) -> Tensor:
        """Values divided by the number of keys if `config.normalise` says so."""
        return v / keys if self.config.normalise == "1/N" else v

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: all, as the softmax does not depend on the mean of the keys."""
        return {name for name, _ in self.named_parameters()}

    def freeze(self, grid: Grid | None) -> None:
        """Store the tensors for one grid of keys as constants, for export; None ends that.

        The constants are buffers outside the state dict, so checkpoints do not change. A frozen operator refuses other
        grids and its keys are not trained. Loading a state or resetting the parameters ends it.
        Raises: GridError as a call on that grid would.
        """
        for name in self._frozen_names:
            delattr(self, f"frozen_{name}")
        self.frozen, self._frozen_names = None, ()
        if grid is None:
            return
        with torch.inference_mode(False), torch.no_grad():  # the model may be trained after
            constants = self.on(grid)
            for name, value in constants.items():
                self.register_buffer(f"frozen_{name}", value.detach().clone(), persistent=False)
        self.frozen, self._frozen_names = grid, tuple(constants)

    def on(self, grid: Grid) -> dict[str, Tensor]:
        """`constants`, or those that `freeze` stored.

        Raises: GridError if prefix and suffix differ from those of the build grid, if the grid differs and resize is
        "error", or if the operator is frozen for another grid.
        """
        check_prefix_suffix("static keys", self.grid, grid)
        if self.frozen is not None:
            if not same_cells(self.frozen, grid):
                raise GridError(f"static keys are frozen for {self.frozen}, not for {grid}; freeze(None) ends that")
            return {name: self.get_buffer(f"frozen_{name}") for name in self._frozen_names}
        if self.config.resize == "error" and not same_cells(self.grid, grid):
            raise GridError(f"static keys lie on {self.grid}, not on {grid}; resize='interpolate' resamples them")
        return self.constants(grid)

    def runs_in_windows(self, grid: Grid) -> bool:
        """Whether a call with keys on `grid` runs in windows of the build grid."""
        return self.config.resize == "window" and not same_cells(self.grid, grid)

    def formulas(self, built: Site, site: Site) -> tuple[int, Site]:
        """As in `Operator`; each window has its own queries of prefix and suffix tokens in the count."""
        grid = site.memory or site.grid
        if not self.runs_in_windows(grid):
            return 1, site
        return math.prod(windows_on(grid, self.grid)), built

    def resample_keys(self, cells: Float[Tensor, "H cells d"], grid: Grid) -> Float[Tensor, "H cells2 d"]:
        """Keys of patch tokens on `grid`: resampled, or unchanged if windows cover the grid."""
        return cells if self.config.resize == "window" else resample(cells, self.grid, grid)

    def transfer_parameter(self, name: str, value: Tensor) -> Tensor | None:
        """A parameter of a checkpoint of another grid, resampled to this grid; None where it cannot be resampled."""
        parameter = self.get_parameter(name)
        if self.config.resize != "interpolate" or name not in self.on_cells or value.ndim != parameter.ndim:
            return None
        axis, copies = (1, 1) if parameter.ndim == 3 else (0, self.heads)
        if value.movedim(axis, 0).shape[1:] != parameter.movedim(axis, 0).shape[1:] or value.shape[axis] % copies:
            return None
        old = former_grid(value.shape[axis] // copies, self.grid)
        if old is None:
            return None
        return resample(value.reshape(self.heads, old.cells, -1), old, self.grid).reshape(parameter.shape)


def _check_state(module: StaticOperator, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Resample parameters of a checkpoint of another grid, or say what to do, which torch's own message does not."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if value is None or value.shape == parameter.shape:
            continue
        resampled = module.transfer_parameter(name, value)
        if resampled is not None:
            state[prefix + name] = resampled  # load_state_dict works on its own copy of the caller's dictionary
        else:
            shapes = f"{tuple(value.shape)}, this layer's {tuple(parameter.shape)} for {module.grid}"
            args[-1].append(  # the messages of errors
                f"{prefix}{name} of the checkpoint is {shapes}: trained on another grid or with other prefix and "
                "suffix tokens; build the model for the trained grid, load, and call it on the new one"
            )


def _thaw(module: StaticOperator, incompatible: object) -> None:
    module.freeze(None)


@check_arguments
def freeze_keys(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Freeze the static keys of a whole model for the grids of one forward pass; returns the names of the operators.

    The pass is in evaluation mode; afterwards every module has its own mode again.
    `for name in freeze_keys(model, images): ...`; `model.get_submodule(name).freeze(None)` ends it.
    Raises: ConfigError if the model has no static keys.
    """
    grids: dict[str, Grid] = {}
    operators = _operators(model)
    if not operators:
        raise ConfigError("the model has no static keys to freeze; it needs SKA() or CSKA() layers")

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def record(module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
            grids[name] = cast(Grid, options.get("memory") or options["grid"])

        return operators[name].register_forward_pre_hook(record, with_kwargs=True)

    for operator in operators.values():
        operator.freeze(None)
    with ExitStack() as hooks, eval_mode(model):
        for name in operators:
            hooks.enter_context(watch(name))
        model(*inputs)
    for name, grid in grids.items():
        operators[name].freeze(grid)
    return list(grids)


def _operators(model: nn.Module) -> dict[str, StaticOperator]:
    return {name: module for name, module in model.named_modules() if isinstance(module, StaticOperator)}


@check_arguments
def calibrate(student: nn.Module, teacher: nn.Module, batches: Iterable[Tensor] = ()) -> list[str]:
    """Set static keys from a trained model; returns the names of the operators whose keys were set.

    teacher: the same host with `Softmax()` swapped in, so that its layers have the student's names. Layers of the
    student with init="calibrate" get the mean keys over the batches, a running mean in float32: exact for one image.
    Those with init="positions" get the keys that the teacher makes of its position embedding: K = W_k norm1(pos).
    The teacher runs in evaluation mode; afterwards its modules have their own modes again.
    Raises: ConfigError if no layer has either init, batches are missing, or mean keys are not finite; SwapError if the
    teacher lacks a layer, does not run it, has no `pos_embed` and `norm1`, or has other heads or another width;
    GridError if the grids differ.
    No key is set then.
    """
    operators = {name: op for name, op in _operators(student).items() if op.config.init in FROM_TEACHER}
    if not operators:
        raise ConfigError("no layer has static keys with init='calibrate' or init='positions'")
    donors = dict(teacher.named_modules())
    for name in operators:
        if not isinstance(donors.get(name), Operator) or isinstance(donors[name], StaticOperator):
            raise SwapError(f"the teacher has no projected keys at {name}; swap Softmax() into it first")
    averaged = {name: operator for name, operator in operators.items() if operator.config.init == "calibrate"}
    keys = _mean_keys(averaged, teacher, batches) if averaged else {}
    for name, operator in operators.items():
        if name not in averaged:
            keys[name] = _position_keys(operator, teacher, name)
        shape, expected = tuple(keys[name].shape), (operator.heads, operator.grid.tokens, operator.width)
        if shape != expected:
            raise SwapError(
                f"{name}: the teacher's keys are {shape} (heads, tokens, width), the student's {expected}; leave out "
                "heads= of the student, or take a teacher of the same host"
            )
    for name, operator in operators.items():
        operator.set_keys(keys[name])
    return list(operators)


def _mean_keys(
    operators: dict[str, StaticOperator], teacher: nn.Module, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    means: dict[str, Tensor] = {}
    counts = dict.fromkeys(operators, 0)

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def add(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, object]) -> None:
            grid = cast(Grid, options.get("memory") or options["grid"])
            if grid != operators[name].grid:
                raise GridError(f"{name}: the batch lies on {grid}, the static keys on {operators[name].grid}")
            k = args[1].float() if args[1].dtype in (torch.float16, torch.bfloat16) else args[1]
            counts[name] += len(k)
            mean = k.mean(0)
            means[name] = means[name].lerp(mean, len(k) / counts[name]) if name in means else mean

        return teacher.get_submodule(name).register_forward_pre_hook(add, with_kwargs=True)

    if isinstance(batches, Tensor):
        raise ConfigError("batches is one tensor; expected batches of images: pass [images]")
    with ExitStack() as hooks, eval_mode(teacher):
        for name in operators:
            hooks.enter_context(watch(name))
        for batch in batches:
            if not isinstance(batch, Tensor):
                kind = type(batch).__name__
                raise ConfigError(f"batches has a {kind}; expected images: (images for images, labels in loader)")
            teacher(batch)
    if not any(counts.values()):
        raise ConfigError("init='calibrate' needs at least one batch of inputs")
    unused = [name for name, count in counts.items() if not count]
    if unused:
        raise SwapError(f"the forward pass of the teacher did not run {', '.join(unused)}")
    if wrong := [name for name, mean in means.items() if not mean.isfinite().all()]:
        raise ConfigError(
            f"{wrong[0]}: the teacher's mean keys are not finite; leave out images or weights with values that are not"
        )
    return means


@torch.no_grad()
def _position_keys(operator: StaticOperator, teacher: nn.Module, name: str) -> Tensor:
    positions = getattr(teacher, "pos_embed", None)
    path = name.split(".")
    parents = [teacher.get_submodule(".".join(path[:i])) for i in range(len(path) - 1, 0, -1)]
    norm = next((parent.norm1 for parent in parents if hasattr(parent, "norm1")), None)
    head, grid = next((parent for parent in parents if isinstance(parent, HeadMixer)), None), operator.grid
    if not isinstance(positions, Tensor) or norm is None or head is None:
        raise SwapError(f"{name}: init='positions' needs a host with pos_embed and norm1; use init='calibrate'")
    if positions.shape[-2] == grid.cells and grid.extra:
        positions = join_tokens(positions.new_zeros(1, grid.extra, positions.shape[-1]), positions, grid)
    if positions.shape[-2] != grid.tokens:
        raise GridError(f"{name}: {positions.shape[-2]} positions do not fit {grid}")
    return cast(Tensor, head.project_heads(cast(nn.Module, norm)(positions), grid)["k"]).mean(0)
