"""What static keys (SKA, CSKA) have in common: resampling, windows, freezing for export, and keys from a teacher.

A static key belongs to a cell of the grid that it was built for. On another grid keys are resampled, or the trained
grid becomes a window that is laid over the larger one; keys of extra tokens stay as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Grid, GridError, Mask, Operator, Site, SwapError, UnsupportedError, nearest

from .heads import HeadMixer, HeadMixerConfig

RESIZE = ("interpolate", "window", "error")
INIT = ("trunc_normal", "paper", "calibrate", "positions")


@dataclass(frozen=True, kw_only=True)
class StaticConfig(HeadMixerConfig):
    """What SKA and CSKA have in common.

    scale: factor of the logits, None = d^-0.5 (the paper's Algorithm 1 has 1.0, its code d^-0.5).
    init: "trunc_normal" starts the keys with standard deviation 0.02, near the uniform average; "paper" as the paper's
    code does. "calibrate" and "positions" start like the first, until `static.calibrate` takes the keys from a trained
    host: the means of its keys over images, or the keys of its position embedding.
    resize: what a call on another grid does: "interpolate" resamples the keys, "window" lays the trained grid over it
    as windows, from the upper left corner (a window that stands out is masked), "error" refuses.
    """

    scale: float | None = None
    init: Literal["trunc_normal", "paper", "calibrate", "positions"] = "trunc_normal"
    resize: Literal["interpolate", "window", "error"] = "interpolate"

    cross: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options({"init": INIT, "resize": RESIZE})

    def check_options(self, options: Mapping[str, tuple[str, ...]]) -> None:
        """Raises: ConfigError for a field that has none of its options."""
        for name, known in options.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{type(self).__name__} has no {name}={value!r}; {nearest(str(value), known)}")

    @property
    def uses(self) -> str:
        """No key is projected."""
        return "qv"


class StaticOperator(Operator):
    """An operator whose keys are parameters on `grid`; `site_grid` is that of the queries at build time."""

    config: StaticConfig

    def __init__(self, config: StaticConfig, site: Site) -> None:
        super().__init__()
        self.config, self.grid, self.site_grid = config, site.memory or site.grid, site.grid
        self.frozen: Grid | None = None
        self._frozen_names: tuple[str, ...] = ()
        self.register_load_state_dict_pre_hook(_check_state)
        self.register_load_state_dict_post_hook(_thaw)

    def constants(self, grid: Grid) -> dict[str, Tensor]:
        """The tensors that a call with keys on `grid` needs, resampled where the configuration says so."""
        raise NotImplementedError

    def set_keys(self, keys: Float[Tensor, "H M d"]) -> None:
        """Take these keys, in token order on the build grid, as static keys."""
        raise NotImplementedError

    def means(self, k: Float[Tensor, "B H M d"]) -> Float[Tensor, "H2 M d"]:
        """The mean key of every token over a batch, as `set_keys` takes it."""
        return k.mean(0)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to keep out of weight decay: under softmax it would only move the keys' free mean."""
        return {name for name, _ in self.named_parameters()}

    def freeze(self, grid: Grid | None) -> None:
        """Keep the tensors for one grid of keys as constants, for export; None makes them follow the parameters again.

        Buffers outside the state dict: a checkpoint stays as it is. A frozen operator refuses other grids and its keys
        are not trained. Loading a state or drawing the parameters anew ends it.
        Raises: GridError as a call on that grid would.
        """
        for name in self._frozen_names:
            delattr(self, f"frozen_{name}")
        self.frozen, self._frozen_names = None, ()
        if grid is None:
            return
        with torch.no_grad():
            made = self.on(grid)
        for name, value in made.items():
            self.register_buffer(f"frozen_{name}", value.detach().clone(), persistent=False)
        self.frozen, self._frozen_names = grid, tuple(made)

    def on(self, grid: Grid) -> dict[str, Tensor]:
        """`constants`, or what `freeze` kept.

        Raises: GridError if the extra tokens are others than those of the build grid, if the grid is another and
        resize is "error", or if the operator is frozen for another grid.
        """
        if (grid.prefix, grid.suffix) != (self.grid.prefix, self.grid.suffix):
            raise GridError(f"static keys were built for {self.grid}, not for {grid}; extra tokens must be the same")
        if self.frozen is not None:
            if not same_cells(self.frozen, grid):
                raise GridError(f"static keys are frozen for {self.frozen}, not for {grid}; freeze(None) ends that")
            return {name: self.get_buffer(f"frozen_{name}") for name in self._frozen_names}
        if self.config.resize == "error" and not same_cells(self.grid, grid):
            raise GridError(f"static keys lie on {self.grid}, not on {grid}; resize='interpolate' resamples them")
        return self.constants(grid)

    def windowed(self, grid: Grid) -> bool:
        """Whether a call with keys on `grid` runs in windows of the build grid."""
        return self.config.resize == "window" and not same_cells(self.grid, grid)

    def resampled(self, cells: Float[Tensor, "H cells d"], grid: Grid) -> Float[Tensor, "H cells2 d"]:
        """Keys of cells on `grid`: resampled, or as they are if windows carry them there."""
        return cells if self.config.resize == "window" else resample(cells, self.grid, grid)


def _check_state(
    module: StaticOperator,
    state: dict[str, Tensor],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    # the door of a checkpoint: torch's own message, a size, would not say what to do
    for name, parameter in module.named_parameters(recurse=False):
        came = state.get(prefix + name)
        if came is not None and came.shape != parameter.shape:
            shapes = f"{tuple(came.shape)}, this layer's {tuple(parameter.shape)} for {module.grid}"
            errors.append(
                f"{prefix}{name} of the checkpoint is {shapes}: trained on another grid or other extra tokens; "
                "build the model for the trained grid, load, and call it on the new one"
            )


def _thaw(module: StaticOperator, incompatible: object) -> None:
    module.freeze(None)


def same_cells(one: Grid, other: Grid) -> bool:
    """Whether two grids have the same sides."""
    return one.height == other.height and one.width == other.width  # Dynamo cannot compare whole grids


def resample(keys: Float[Tensor, "H cells d"], old: Grid, new: Grid) -> Float[Tensor, "H cells2 d"]:
    """Keys of the cells of `old`, bicubic and antialiased, on the cells of `new`; computed in float32 at least."""
    if same_cells(old, new):
        return keys
    wide = torch.promote_types(keys.dtype, torch.float32)
    rows, columns = (_bicubic(a, b, wide, keys.device) for a, b in ((old.height, new.height), (old.width, new.width)))
    image = keys.mT.unflatten(-1, (old.height, old.width)).to(wide)
    return (rows @ image @ columns.mT).flatten(-2).mT.to(keys.dtype)


@torch.no_grad()
def _bicubic(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "new old"]:
    # The resampling is linear and separable. As a matrix it has a gradient under torch.compile at any size; that of
    # the interpolation itself fails there for a size that is not constant.
    # Two equal columns: torch 2.15 on the CPU resamples an image of one column wrongly.
    eye = torch.eye(old, dtype=dtype, device=device)[None, :, :, None].repeat(1, 1, 1, 2)
    return F.interpolate(eye, (new, 2), mode="bicubic", antialias=True, align_corners=False)[0, :, :, 0].mT


def tokens_of(cells: Float[Tensor, "... c d"], extra: Float[Tensor, "... E d"], grid: Grid) -> Float[Tensor, "... M d"]:
    """Cells and extra tokens (prefix, then suffix) in token order."""
    if not grid.extra:
        return cells
    return torch.cat([extra[..., : grid.prefix, :], cells, extra[..., grid.prefix :, :]], -2)


def apart(x: Float[Tensor, "... M d"], grid: Grid) -> tuple[Float[Tensor, "... E d"], Float[Tensor, "... c d"]]:
    """The inverse of `tokens_of`: extra tokens, cells."""
    if not grid.extra:
        return x[..., :0, :], x
    stop = grid.prefix + grid.cells
    return torch.cat([x[..., : grid.prefix, :], x[..., stop:, :]], -2), x[..., grid.span, :]


def tiled(cells: Float[Tensor, "H cells d"], window: Grid, grid: Grid) -> Float[Tensor, "H cells2 d"]:
    """Keys of a window repeated over a grid from its upper left corner."""
    down, across = windows_on(grid, window)
    image = cells.unflatten(1, (window.height, window.width)).repeat(1, down, across, 1)
    return image[:, : grid.height, : grid.width].flatten(1, 2)


def windows_on(grid: Grid, window: Grid) -> tuple[int, int]:
    """How many windows cover a grid, down and across; those at the lower and right edge may stand out."""
    return -(-grid.height // window.height), -(-grid.width // window.width)


def split(x: Float[Tensor, "B H c d"], grid: Grid, window: Grid) -> Float[Tensor, "BW H w d"]:
    """Cells in windows; windows go into the batch (batch first), cells beyond the grid are zeros."""
    down, across = windows_on(grid, window)
    low, right = down * window.height - grid.height, across * window.width - grid.width
    image = x.unflatten(2, (grid.height, grid.width))
    if low or right:
        image = F.pad(image, (0, 0, 0, right, 0, low))
    image = image.unflatten(3, (across, window.width)).unflatten(2, (down, window.height))
    return image.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def join(x: Float[Tensor, "BW H w d"], grid: Grid, window: Grid) -> Float[Tensor, "B H c d"]:
    """The inverse of `split`; cells beyond the grid are dropped."""
    down, across = windows_on(grid, window)
    image = x.unflatten(2, (window.height, window.width)).unflatten(0, (-1, down, across))
    image = image.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)
    return image[:, :, : grid.height, : grid.width].flatten(2, 3)


def in_windows(
    q: Tensor, v: Tensor, grids: tuple[Grid, Grid], windows: tuple[Grid, Grid], mask: Mask | None
) -> tuple[Tensor, Tensor, Mask | None]:
    """Cells of q (B, H, cells, d) and all of v in windows, and the mask that hides keys beyond the grid.

    grids and windows: of queries and of keys. Every window has the values of all extra tokens beside its own.
    Raises: GridError if queries and keys fall into other numbers of windows, UnsupportedError for other masks.
    """
    (grid, memory), (window, key_window) = grids, windows
    if windows_on(grid, window) != windows_on(memory, key_window):
        raise GridError(
            f"windows do not divide alike: {window.height}x{window.width} on {grid} for queries, "
            f"{key_window.height}x{key_window.width} on {memory} for keys; use resize='interpolate'"
        )
    if mask is not None and mask.kinds - {"padding"}:
        raise UnsupportedError(
            f"windows of static keys cannot apply a {' or '.join(sorted(mask.kinds - {'padding'}))} mask on another "
            "grid than the trained one (they can: padding); use resize='interpolate'"
        )
    extra, cells = apart(v, memory)
    down, across = windows_on(memory, key_window)
    values = tokens_of(split(cells, memory, key_window), extra.repeat_interleave(down * across, 0), memory)
    keep = None if mask is None else mask.keep
    ragged = memory.height % key_window.height or memory.width % key_window.width
    if keep is None and ragged:
        keep = torch.ones(len(v), memory.tokens, dtype=torch.bool, device=v.device)
    if keep is None:
        return split(q, grid, window), values, None
    extra_keep, cell_keep = apart(keep[:, None, :, None].to(v.dtype), memory)
    inside = split(cell_keep, memory, key_window)
    inside = tokens_of(inside, extra_keep.repeat_interleave(down * across, 0), memory)
    return split(q, grid, window), values, Mask(keep=inside[:, 0, :, 0] > 0)


def freeze_keys(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Turn the static keys of a whole model into constants for the grids of one forward pass; names of the operators.

    `for name in freeze_keys(model, images): ...`; `model.get_submodule(name).freeze(None)` ends it.
    Raises: ConfigError if the model has no static keys.
    """
    seen: dict[str, Grid] = {}
    operators = _operators(model)
    if not operators:
        raise ConfigError("the model has no static keys to freeze; it needs SKA() or CSKA() layers")

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def note(module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
            seen[name] = cast(Grid, options.get("memory") or options["grid"])

        return operators[name].register_forward_pre_hook(note, with_kwargs=True)

    for operator in operators.values():
        operator.freeze(None)
    handles = [watch(name) for name in operators]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    for name, grid in seen.items():
        operators[name].freeze(grid)
    return list(seen)


def _operators(model: nn.Module) -> dict[str, StaticOperator]:
    return {name: module for name, module in model.named_modules() if isinstance(module, StaticOperator)}


def calibrate(student: nn.Module, teacher: nn.Module, batches: Iterable[Tensor] = ()) -> list[str]:
    """Start static keys from a trained model; returns the names of the operators that got keys.

    teacher: the same host with `Softmax()` swapped in, so that its layers have the student's names. Layers of the
    student with init="calibrate" get the mean keys over the batches, a running mean in float32: exact for one image.
    Those with init="positions" get the keys that the teacher makes of its position embedding: K = W_k norm1(pos).
    Raises: ConfigError if no layer asks for either, or there are no batches for those that need them; SwapError if a
    layer is not in the teacher, was not run, or has no `pos_embed` and `norm1`; GridError if the grids differ.
    """
    operators = {name: op for name, op in _operators(student).items() if op.config.init in INIT[2:]}
    if not operators:
        raise ConfigError("no layer has static keys with init='calibrate' or init='positions'")
    donors = dict(teacher.named_modules())
    for name in operators:
        if not isinstance(donors.get(name), Operator) or isinstance(donors[name], StaticOperator):
            raise SwapError(f"the teacher has no projected keys at {name}; swap Softmax() into it first")
    counted = {name: operator for name, operator in operators.items() if operator.config.init == "calibrate"}
    found = _mean_keys(counted, teacher, batches) if counted else {}
    for name, operator in operators.items():
        keys = found[name] if name in found else _position_keys(operator, teacher, name)
        operator.set_keys(keys)
    return list(operators)


def _mean_keys(
    operators: dict[str, StaticOperator], teacher: nn.Module, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    counts = dict.fromkeys(operators, 0)

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def add(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, object]) -> None:
            grid = cast(Grid, options.get("memory") or options["grid"])
            if grid != operators[name].grid:
                raise GridError(f"{name}: the batch lies on {grid}, the static keys on {operators[name].grid}")
            k = args[1].float() if args[1].dtype in (torch.float16, torch.bfloat16) else args[1]
            counts[name] += len(k)
            mean = operators[name].means(k)
            found[name] = found[name].lerp(mean, len(k) / counts[name]) if name in found else mean

        return teacher.get_submodule(name).register_forward_pre_hook(add, with_kwargs=True)

    handles = [watch(name) for name in operators]
    try:
        with torch.no_grad():
            for batch in batches:
                teacher(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not any(counts.values()):
        raise ConfigError("init='calibrate' needs at least one batch of inputs")
    silent = [name for name, count in counts.items() if not count]
    if silent:
        raise SwapError(f"the forward pass of the teacher did not enter {', '.join(silent)}")
    return found


@torch.no_grad()
def _position_keys(operator: StaticOperator, teacher: nn.Module, name: str) -> Tensor:
    positions = getattr(teacher, "pos_embed", None)
    path = name.split(".")
    parents = [teacher.get_submodule(".".join(path[:i])) for i in range(len(path) - 1, 0, -1)]
    norm = next((parent.norm1 for parent in parents if hasattr(parent, "norm1")), None)
    head, grid = parents[0], operator.grid
    if not isinstance(positions, Tensor) or norm is None or not isinstance(head, HeadMixer):
        raise SwapError(f"{name}: init='positions' needs a host with pos_embed and norm1; use init='calibrate'")
    if positions.shape[-2] == grid.cells and grid.extra:
        positions = tokens_of(positions, positions.new_zeros(1, grid.extra, positions.shape[-1]), grid)
    if positions.shape[-2] != grid.tokens:
        raise GridError(f"{name}: {positions.shape[-2]} positions do not fit {grid}")
    return operator.means(cast(Tensor, head.roles(cast(nn.Module, norm)(positions), grid)["k"]))
