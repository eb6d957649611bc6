"""The contract that every mechanism keeps, as a function: `regard.testing.check(MyMechanism())`.

Our own tests run it over every mechanism and projection; users run it on their own mechanisms before a study. It works
in float64 on small grids, with parameters moved away from their start (a zero would hide what it multiplies).
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.core import (
    ConfigError,
    Grid,
    GridError,
    Mask,
    Mixer,
    MixerConfig,
    RegardError,
    ShapeError,
    Site,
    UnsupportedError,
    merge,
    nearest,
)
from regard.mixers.heads import HeadMixer, HeadMixerConfig
from regard.mixers.spell import parse, spell

GRIDS = (Grid(4, 4), Grid(4, 6, 2), Grid(6, 4, 1), Grid(3, 5, 1, 2), Grid(1, 12))
LARGER = (Grid(8, 8), Grid(7, 9, 2), Grid(9, 7, 1), Grid(7, 8, 1, 2))
EXACT = 1e-12  # float64, relative to the size of the output
STEP = 2e-5  # inputs that jump within this step are not compared: a tie decided otherwise is no fault


class ContractError(RegardError, AssertionError):
    """A mechanism broke an item of the contract; the message names item, grid and what was measured."""


@dataclass(frozen=True)
class Report:
    """What `check` found: items that passed, and the others with the reason why they do not apply."""

    spelling: str
    grids: tuple[Grid, ...]
    passed: tuple[str, ...]
    skipped: Mapping[str, str]
    refused: Mapping[Grid, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.spelling}: {len(self.passed)} items passed on {len(self.grids)} grids"]
        lines += [f"  passed          {name}" for name in self.passed]
        lines += [f"  not applicable  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines + [f"  refused         {grid}: {reason}" for grid, reason in self.refused.items()])


@dataclass
class Subject:
    """A mechanism under test at one grid. Layers are in float64 with values that float32 holds exactly."""

    config: MixerConfig
    grid: Grid
    dim: int
    heads: int
    batch: int
    seed: int
    macs: str
    counted: Mapping[str, object]
    positions: bool
    reach: int | None

    def site(self, grid: Grid | None = None, memory: Grid | None = None) -> Site:
        """The place that layers are built for."""
        return Site(self.dim, self.heads, grid or self.grid, memory=memory)

    def make(self, config: MixerConfig, seed: int = 0) -> Mixer:
        """A layer of a configuration at the site, parameters moved a little, in evaluation mode, float64."""
        torch.manual_seed(self.seed + seed)
        return _moved(config.build(self.site()))

    @cached_property
    def layer(self) -> Mixer:
        """The layer under test."""
        return self.make(self.config)

    @cached_property
    def x(self) -> Tensor:
        """(batch, N, dim): a draw at which the layer neither jumps nor bends within STEP in a random direction."""
        for seed in range(40):
            x = self.draw(self.grid, seed)
            step = STEP * self.draw(self.grid, seed + 1000)
            with torch.no_grad():
                middle = self.layer.reference(x, self.grid)
                bend = self.layer.reference(x + step, self.grid) + self.layer.reference(x - step, self.grid)
            if _gap(bend, 2 * middle) < 1e-6:
                return x
        raise ContractError("the plain form jumps at each of 40 random inputs: it is not deterministic or not finite")

    def draw(self, grid: Grid, seed: int) -> Tensor:
        """Random tokens of a grid with float32 values in float64."""
        source = torch.Generator().manual_seed(self.seed + seed)
        return torch.randn(self.batch, grid.tokens, self.dim, generator=source).double()

    def same(self, what: str, one: Tensor, other: Tensor, tolerance: float = EXACT) -> None:
        """Raises ContractError unless two tensors agree within the tolerance times their size (at least 1)."""
        if one.shape != other.shape:
            raise ContractError(f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}")
        allowed = tolerance * max(1.0, other.detach().abs().max().item()) if other.numel() else 0.0
        if not (gap := _gap(one, other)) <= allowed:
            raise ContractError(f"{what}: they differ by {gap:.3g}, allowed are {allowed:.3g}")


def check(
    config: MixerConfig,
    *,
    grids: Iterable[Grid] = (),
    dim: int = 16,
    heads: int = 2,
    batch: int = 3,
    seed: int = 0,
    macs: Literal["forward", "reference", ""] = "forward",
    counted: Mapping[str, object] | None = None,
    positions: bool = True,
    reach: int | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Run the contract on a mechanism and say which items passed and which do not apply.

    grids: by default five small ones, square and not, with prefix and suffix; where the mechanism refuses some of them
    (25 landmarks do not fit into 4x4 cells), larger ones are added. macs: the execution that `cost` describes, "" where
    the counter cannot see it. counted: attributes of the operator that choose that execution, where it has several,
    such as {"execution": "gather"}. positions: False if the order of tokens must not matter. reach: the number of
    cells that a local mechanism sees in each direction. skip: item -> reason, for items that cannot hold.
    Raises: ContractError for the first item that fails; ConfigError for a name in skip that is no item.
    """
    skip = dict(skip or {})
    for name in skip:
        if name not in ITEMS:
            raise ConfigError(f"the contract has no item {name!r}; {nearest(name, ITEMS)}")
    subjects: list[Subject] = []
    refused: dict[Grid, str] = {}
    with torch.random.fork_rng(devices=[]):
        for grid in _candidates(tuple(grids)):
            if not grids and grid in LARGER and len(subjects) >= 3:
                break
            subject = Subject(config, grid, dim, heads, batch, seed, macs, counted or {}, positions, reach)
            try:
                subject.layer.reference(subject.draw(grid, 0), grid)
            except (ConfigError, GridError) as error:
                refused[grid] = str(error)
            except Exception as error:
                raise ContractError(f"{spell(config)} on {grid}: {type(error).__name__}: {error}") from error
            else:
                subjects.append(subject)
        if not subjects:
            raise ContractError(f"{spell(config)} refuses every grid: {next(iter(refused.values()), 'none was given')}")
        reasons = {name: skip[name] if name in skip else _run(name, subjects) for name in ITEMS}
    passed = tuple(name for name, reason in reasons.items() if not reason)
    skipped = {name: reason for name, reason in reasons.items() if reason}
    return Report(spell(config), tuple(subject.grid for subject in subjects), passed, skipped, refused)


def _candidates(grids: tuple[Grid, ...]) -> tuple[Grid, ...]:
    return grids or (*GRIDS, *LARGER)


def _run(name: str, subjects: list[Subject]) -> str:
    """One item on its grids; the reason if it applies to none of them."""
    item = ITEMS[name]
    reason = ""
    # an item that costs much runs on the grid with the most kinds of tokens
    chosen = [max(subjects, key=lambda s: (s.grid.suffix, s.grid.prefix))] if name in ONCE else subjects
    for subject in chosen:
        try:
            reason = item(subject)
        except Exception as error:
            kind = "" if isinstance(error, ContractError) else f"{type(error).__name__}: "
            raise ContractError(f"{spell(subject.config)}: {name} on {subject.grid}: {kind}{error}") from error
        if reason:
            break
    return reason


def _moved(layer: Mixer) -> Mixer:
    """Every parameter a little away from where it starts: zeros and symmetric starts would hide what they multiply."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.double().eval()


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; NaN if either has one."""
    return (one.detach() - other.detach()).abs().max().item() if one.numel() else 0.0


def _shape(s: Subject) -> str:
    for dtype in (torch.float32, torch.bfloat16):
        out = copy.deepcopy(s.layer).to(dtype)(s.x.to(dtype), s.grid)
        if out.shape != s.x.shape or out.dtype != dtype:
            raise ContractError(f"{tuple(s.x.shape)} in {dtype} became {tuple(out.shape)} in {out.dtype}")
        if not out.isfinite().all():
            raise ContractError(f"{int((~out.isfinite()).sum())} values are not finite in {dtype}")
    return ""


def _doors(s: Subject) -> str:
    wrong = {
        "one token too many": (torch.cat([s.x, s.x[:, :1]], 1), GridError),
        "one token too few": (s.x[:, 1:], GridError),
        "one channel too many": (torch.cat([s.x, s.x[..., :1]], -1), ShapeError),
    }
    for what, (x, expected) in wrong.items():
        try:
            s.layer(x, s.grid)
        except expected:
            continue
        except Exception as error:
            raise ContractError(f"{what}: {type(error).__name__} instead of {expected.__name__}") from error
        raise ContractError(f"{what} raised nothing instead of {expected.__name__}")
    return ""


def _parameters(s: Subject) -> str:
    layer = s.config.build(s.site(), s.config.shared())
    real, formula = sum(p.numel() for p in layer.parameters()), s.config.cost(s.site()).params
    if real != formula:
        raise ContractError(f"the formula says {formula} parameters, the layer has {real}")
    return ""


def _macs(s: Subject) -> str:
    if not s.macs:
        return "the counter does not see its products"
    layer = copy.deepcopy(s.layer).float()
    for name, value in s.counted.items():
        setattr(layer.operator, name, value)
    run = layer if s.macs == "forward" else layer.reference
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run(s.x[:1].float(), s.grid)
    formula = s.config.cost(s.site()).macs
    if counter.get_total_flops() != 2 * formula:
        raise ContractError(f"the formula says {formula} MACs, counted were {counter.get_total_flops() / 2:.0f}")
    return ""


def _reference(s: Subject) -> str:
    with torch.no_grad():
        exact = s.layer.reference(s.x, s.grid)
        s.same("fast and plain form in float64", s.layer(s.x, s.grid), exact)
        single = copy.deepcopy(s.layer).float()
        own = _gap(single.reference(s.x.float(), s.grid).double(), exact)
        fast = _gap(single(s.x.float(), s.grid).double(), exact)
    allowed = 4 * own + 1e-7 * max(1.0, exact.abs().max().item())
    if not fast <= allowed:
        raise ContractError(f"float32 error of the fast form {fast:.3g}; the plain form's is {own:.3g}")
    return ""


def _weights(s: Subject) -> str:
    if not isinstance(s.layer, HeadMixer) or not s.config.card.row_maps:
        return "no matrix of token weights"
    with torch.no_grad():
        made = s.layer.roles(s.x, s.grid)
        if (v := made["v"]) is None:
            return "no values"
        a = s.layer.operator.weights(made["q"], made["k"], v, grid=s.grid)
        s.same("weights @ v and the operator", a @ v, s.layer.operator(**made, grid=s.grid), 1e-11)  # type: ignore[arg-type]
    return ""


def _gradients(s: Subject) -> str:
    names = [name for name, _ in s.layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in s.layer.parameters()]
    x = s.x.clone().requires_grad_()

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(s.layer, dict(zip(names, values, strict=True)), (x, s.grid))

    out = run(x, *values)
    ahead = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, *values), ahead, allow_unused=True)
    plain = torch.autograd.grad(s.layer.reference(x, s.grid), (x, *s.layer.parameters()), ahead, allow_unused=True)
    for name, fast, other in zip(("x", *names), grads, plain, strict=True):
        if fast is None or other is None:
            raise ContractError(f"{name} gets no gradient in the {'fast' if fast is None else 'plain'} form")
        s.same(f"gradients of {name} in fast and plain form", fast, other, 1e-10)
    torch.autograd.gradcheck(run, (x, *values), fast_mode=True)
    return ""


def _compile(s: Subject) -> str:
    if hasattr(HeadMixer.forward, "__wrapped__"):
        return "not run: annotation checks are on"
    torch.compiler.reset()
    compiled = torch.compile(s.layer, fullgraph=True, backend="aot_eager")
    x = s.x.clone().requires_grad_()
    out, plain = compiled(x, s.grid), s.layer(x, s.grid)
    s.same("compiled and eager form", out, plain)
    ahead = torch.randn_like(out)
    one, other = torch.autograd.grad(out, x, ahead)[0], torch.autograd.grad(plain, x, ahead)[0]
    s.same("gradients of x, compiled and eager", one, other, 1e-11)
    return ""


def _masks(s: Subject) -> str:
    n = s.grid.tokens
    keep = torch.ones(s.batch, n, dtype=torch.bool)
    keep[0, n // 2 :] = False
    keep[1, 1::3] = False
    rows = torch.randn(s.heads, n, n, dtype=torch.float64)
    masks = {
        "causal": (Mask(causal=True),),
        "padding": (Mask(keep=keep),),
        "bias": (Mask(bias=rows), Mask(bias=rows[:, :1])),
    }
    config = _without_dwc(s.config)
    layer = s.layer if config == s.config else s.make(config)
    for kind, options in masks.items():
        if kind in s.config.masks:
            _applies(s, layer, kind, options[-1])
            try:
                _applies(s, layer, kind, options[0])
            except UnsupportedError as error:  # one bias for all queries only
                if kind != "bias" or kind not in str(error):
                    raise
        else:
            _refuses(s, layer, kind, options[0])
    return ""


def _without_dwc(config: MixerConfig) -> MixerConfig:
    """The convolution beside the mechanism knows no masks."""
    return dataclasses.replace(config, dwc=0) if isinstance(config, HeadMixerConfig) else config


def _applies(s: Subject, layer: Mixer, kind: str, mask: Mask) -> None:
    """A mask has its effect: what is hidden does not matter, and the plain form agrees."""
    with torch.no_grad():
        out = layer(s.x, s.grid, mask)
        s.same(f"fast and plain form with a {kind} mask", out, layer.reference(s.x, s.grid, mask))
        if kind == "bias":
            if _gap(out, layer(s.x, s.grid)) < 1e-6:
                raise ContractError("a bias changes nothing")
            return
        kept = (
            mask.keep if mask.keep is not None else torch.arange(s.grid.tokens).expand(s.batch, -1) < s.grid.tokens // 2
        )
        other = torch.where(kept[..., None], s.x, s.x.flip(0) + 1)
        s.same(f"outputs after a change of hidden tokens ({kind})", layer(other, s.grid, mask)[kept], out[kept], 1e-11)
    if mask.keep is not None:
        x = s.x.clone().requires_grad_()
        out = layer(x, s.grid, Mask(keep=torch.zeros_like(mask.keep)))
        (grad,) = torch.autograd.grad(out.sum(), x)
        if not (out.isfinite().all() and grad.isfinite().all()):
            raise ContractError("with every token hidden, outputs or gradients are not finite")


def _refuses(s: Subject, layer: Mixer, kind: str, mask: Mask) -> None:
    try:
        layer(s.x, s.grid, mask)
    except UnsupportedError as error:
        if kind not in str(error):
            raise ContractError(f"the error about a {kind} mask does not name it: {error}") from error
    else:
        raise ContractError(f"a {kind} mask is not among its masks and was accepted")


def _rotary(s: Subject) -> str:
    if not isinstance(s.layer, HeadMixer) or not set("qk") & set(s.layer.config.uses):
        return "no queries and keys to rotate"
    angles = torch.randn(s.grid.cells, s.layer.site.width // 2, dtype=torch.float64).repeat_interleave(2, -1)
    rope = torch.cat([angles.sin(), angles.cos()], -1)
    torch.manual_seed(s.seed)
    try:
        layer = _moved(s.config.build(dataclasses.replace(s.site(), rotary=True)))
        out = layer(s.x, s.grid, None, rope)
    except UnsupportedError as error:
        return f"refused: {error}"
    if not s.config.card.discrete:  # a rotation may bring two scores to a tie
        s.same("fast and plain form with rotary", out, layer.reference(s.x, s.grid, None, rope))
    return ""


def _cross(s: Subject) -> str:
    if not isinstance(s.config, HeadMixerConfig) or not s.config.cross:
        return "no cross-attention"
    config = dataclasses.replace(s.config, dwc=0)
    layer = s.layer if config == s.config else s.make(config)
    with torch.no_grad():
        cross = config.build_cross(s.site(memory=s.grid)).double().eval()
        cross.load_state_dict(layer.state_dict())
        out = cross(s.x, s.grid, memory=s.x, memory_grid=s.grid)
        s.same("cross-attention to itself and self-attention", out, layer(s.x, s.grid))
        other = Grid(s.grid.height + 1, s.grid.width, s.grid.prefix)
        cross = config.build_cross(s.site(memory=other)).double().eval()
        out = cross(s.x, s.grid, memory=s.draw(other, 5), memory_grid=other)
    if out.shape != s.x.shape or not out.isfinite().all():
        raise ContractError(f"memory on {other} gave {tuple(out.shape)}, expected finite {tuple(s.x.shape)}")
    return ""


def _state(s: Subject) -> str:
    with torch.no_grad():
        out = s.layer(s.x, s.grid)
        s.same("two passes", s.layer(s.x, s.grid), out, 0.0)
        s.same("a deep copy", copy.deepcopy(s.layer)(s.x, s.grid), out, 0.0)
        other = s.make(s.config, seed=1)
        other.load_state_dict(s.layer.state_dict())
        s.same("a layer with the same state", other(s.x, s.grid), out, 0.0)
    return ""


def _reset(s: Subject) -> str:
    """Every module with parameters of its own can draw them anew, from torch's generator, to the same values."""
    for name, module in s.layer.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if not callable(getattr(module, "reset_parameters", None)):
            raise ContractError(f"{name or 'the layer'} ({type(module).__name__}) has no reset_parameters()")
        copied = copy.deepcopy(module)
        draws = []
        for noise in (0.0, 1.0):
            with torch.no_grad():
                for parameter in copied.parameters(recurse=False):
                    parameter.add_(noise)
            torch.manual_seed(3)
            cast(Callable[[], None], copied.reset_parameters)()
            draws.append([parameter.detach().clone() for parameter in copied.parameters(recurse=False)])
        for one, other in zip(*draws, strict=True):
            s.same(f"two draws of {name} from one seed", one, other, 0.0)
    return ""


def _spelling(s: Subject) -> str:
    text = spell(s.config)
    if (again := parse(text, _classes(s.config))) != s.config:
        raise ContractError(f"{text} was read back as {spell(again)}")
    if s.layer.config != s.config:
        raise ContractError("the layer does not keep its configuration as `config`")
    return ""


def _classes(value: object) -> list[type]:
    """The dataclasses in a configuration."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    inner = [_classes(getattr(value, item.name)) for item in dataclasses.fields(value)]
    return [type(value), *(cls for found in inner for cls in found)]


def _batch(s: Subject) -> str:
    with torch.no_grad():
        out = s.layer(s.x, s.grid)
        s.same("a batch in another order", s.layer(s.x.flip(0), s.grid), out.flip(0))
        s.same("a sample alone", s.layer(s.x[1:2], s.grid), out[1:2])
    return ""


def _order(s: Subject) -> str:
    if s.positions:
        return "places matter to it"
    if isinstance(s.config, HeadMixerConfig) and s.config.dwc:
        return "the depth-wise convolution knows places"
    order = torch.randperm(s.grid.tokens)
    with torch.no_grad():
        s.same("tokens in another order", s.layer(s.x[:, order], s.grid), s.layer(s.x, s.grid)[:, order])
    return ""


def _geometry(s: Subject) -> str:
    """A one-cell kernel of the convolution beside the mechanism shifts the values by one row."""
    if not isinstance(s.config, HeadMixerConfig):
        return "no depth-wise convolution beside it"
    layer = cast(HeadMixer, s.make(dataclasses.replace(s.config, dwc=3, gate=False)))
    conv = cast(nn.Conv2d, layer.dwc)
    with torch.no_grad():
        conv.weight.zero_()
        cast(Tensor, conv.bias).zero_()
        before = layer(s.x, s.grid)
        conv.weight[:, :, 0, 1] = 1
        v = cast(Tensor, layer.roles(s.x, s.grid)["v"])
        moved = torch.zeros_like(merge(v))
        start, stop, width = s.grid.prefix, s.grid.prefix + s.grid.cells, s.grid.width
        moved[:, start + width : stop] = merge(v)[:, start : stop - width]
        s.same(
            "a kernel of one cell and values shifted by one row",
            layer(s.x, s.grid) - before,
            F.linear(moved, layer.proj.weight),
        )
    return ""


def _local(s: Subject) -> str:
    if s.reach is None:
        return "not local"
    y, x = s.grid.height // 2, s.grid.width // 2
    changed = s.x.clone()
    changed[:, s.grid.prefix + y * s.grid.width + x] += 1
    with torch.no_grad():
        difference = (s.layer(changed, s.grid) - s.layer(s.x, s.grid))[:, s.grid.span].abs().amax((0, 2))
    rows, columns = torch.arange(s.grid.height)[:, None], torch.arange(s.grid.width)
    near = (torch.maximum((rows - y).abs(), (columns - x).abs()) <= s.reach).flatten()
    if (difference[~near] > EXACT).any():
        raise ContractError(f"a change of one cell reaches beyond {s.reach} cells: by {difference[~near].max():.3g}")
    if (near & (difference <= EXACT)).any():
        raise ContractError(f"a change of one cell does not reach all cells within {s.reach}")
    return ""


def _other_grid(s: Subject) -> str:
    """A forward pass on another grid works or says why not."""
    grid = dataclasses.replace(s.grid, height=s.grid.height + 1, width=s.grid.width + 2)
    try:
        out = s.layer(s.draw(grid, 7), grid)
    except RegardError as error:
        return f"refused: {error}"
    if out.shape != (s.batch, grid.tokens, s.dim) or not out.isfinite().all():
        raise ContractError(f"{grid} gave {tuple(out.shape)} or values that are not finite")
    return ""


ITEMS: dict[str, Callable[[Subject], str]] = {
    "shape": _shape,
    "doors": _doors,
    "parameters": _parameters,
    "macs": _macs,
    "reference": _reference,
    "weights": _weights,
    "gradients": _gradients,
    "compile": _compile,
    "batch": _batch,
    "masks": _masks,
    "rotary": _rotary,
    "cross": _cross,
    "state": _state,
    "reset": _reset,
    "spelling": _spelling,
    "order": _order,
    "geometry": _geometry,
    "local": _local,
    "other grid": _other_grid,
}
ONCE = frozenset({"gradients", "compile", "rotary", "cross", "reset", "spelling"})
