"""Checks of tensors where they enter: at operator functions, by their annotations, and at layers.

A wrong tensor is one error of this package, instead of one of PyTorch from inside the computation or a silent
broadcast. `torch.compile` and `torch.export` do not trace the checks.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import AbstractArray
from torch import Tensor

from .errors import ShapeError, UnsupportedError
from .grid import Grid
from .mask import Mask
from .validation import Rule, field_rule, plain_number, short_repr

Function = TypeVar("Function", bound=Callable[..., Any])

_WORDS = {"B": "batch", "H": "heads", "N": "tokens", "M": "tokens", "d": "width", "e": "width", "C": "channels"}
_HALF = (torch.float16, torch.bfloat16)
_ROLES = ("q", "k", "v")
_EXAMPLES = {Grid: "Grid(14, 14, prefix=1)", Mask: "Mask(causal=True)"}


class _TensorArgument(NamedTuple):
    """floating: whether it holds floating-point numbers, otherwise whole numbers or truth values. axes: one name for
    each axis, None where their number is free. words: the same for messages. optional: whether it may be None. instead:
    a class whose objects may stand in its place.
    """

    floating: bool
    axes: tuple[str, ...] | None
    words: str
    optional: bool
    instead: type | None = None


_ROLE_ARGUMENTS = {
    role: _TensorArgument(True, axes, "(batch, heads, tokens, width)", True)
    for role, axes in (("q", ("B", "H", "N", "d")), ("k", ("B", "H", "M", "d")), ("v", ("B", "H", "M", "e")))
}


class _Plan(NamedTuple):
    """A selection as an argument: its class, and the tensors that it holds. optional: whether it may be None."""

    cls: type
    tensors: dict[str, _TensorArgument]
    optional: bool


@typing.overload
def operator_function(function: Function) -> Function: ...
@typing.overload
def operator_function(*, depth: bool) -> Callable[[Function], Function]: ...


def operator_function(function: Any = None, *, depth: bool = False) -> Any:
    """A function of tensors whose arguments are compared with its annotations before it runs.

    depth: whether its grid may have several frames.
    Raises: ShapeError for an argument that is no tensor, holds other numbers, has another number of axes, is sparse,
    nested or on another device, or whose axis of a name has another length than that of another argument; also for
    what is no Grid, Mask, plan, finite number or pair of numbers where one is expected. UnsupportedError for several
    frames where there may be one alone.
    """
    if function is None:
        return functools.partial(operator_function, depth=depth)
    name = function.__name__
    hints = typing.get_type_hints(function, include_extras=True)
    names = [parameter for parameter in inspect.signature(function).parameters]
    kinds = {parameter: _argument(hints.get(parameter, Any)) for parameter in names}

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args, kwargs = plain_number(args), {key: plain_number(value) for key, value in kwargs.items()}
            _check_arguments(name, kinds, [*zip(names, args, strict=False), *kwargs.items()], depth)
        return function(*args, **kwargs)

    return wrapper


def is_exporting() -> bool:
    """Whether `torch.export` traces. `torch.compiler.is_exporting()` of PyTorch 2.11 also holds in `torch.compile`."""
    return torch.compiler._is_exporting_flag


def check_tensor(label: str, x: object, words: str, floating: bool = True) -> None:
    """Raises ShapeError unless x is a dense tensor of floating-point numbers, or with `floating` False of others.

    words: its axes, for the message.
    """
    numbers = "floating-point numbers" if floating else "whole numbers or True and False"
    if not isinstance(x, Tensor):
        raise ShapeError(f"{label} is {_kind(x)}; expected a tensor of {numbers} {words}")
    if x.is_nested or x.layout != torch.strided:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ShapeError(f"{label} is a {layout} tensor; pass a dense one, {words}")
    if x.is_quantized or x.is_floating_point() != floating or x.is_complex():
        hint = f": pass {label.rpartition(' ')[2]}.float()" if floating and not x.is_complex() else ""
        raise ShapeError(f"{label} is {x.dtype}; expected {numbers}{hint}")


def check_place(label: str, x: Tensor, other_label: str, other: Tensor) -> None:
    """Raises ShapeError unless two tensors are on one device."""
    if x.device != other.device:
        raise ShapeError(f"{label} is on {x.device}, {other_label} on {other.device}; move one with .to(device)")


def _check_dtype(label: str, x: Tensor, other_label: str, other: Tensor) -> None:
    """Raises ShapeError for two dtypes; parameters may stay in float32 beside inputs of half precision."""
    if x.dtype == torch.float32 and other.dtype in _HALF and label.rpartition(" ")[2] not in _ROLES:
        return
    check_dtype(label, x, other_label, other)


def check_dtype(label: str, x: Tensor, other_label: str, other: Tensor) -> None:
    """Raises ShapeError unless two tensors have one dtype, or autocast is on."""
    if x.dtype != other.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ShapeError(f"{label} is {x.dtype}, {other_label} is {other.dtype}; cast them to one dtype")


def check_layer_input(x: object, weight: object, dim: int, hooked: bool) -> None:
    """The input of a layer, compared with a weight of it.

    hooked: whether a wrapper of the layer's forward pass may move its weights before they are used (offloading).
    Raises: ShapeError unless x is a dense tensor (batch, tokens, dim) of floating-point numbers, in the dtype (except
    under autocast) and on the device of the weight.
    """
    if (
        type(x) is Tensor
        and isinstance(weight, Tensor)
        and _is_right(x, 3)
        and x.shape[-1] == dim
        and x.dtype == weight.dtype
        and x.device == weight.device
    ):
        return
    words = f"(batch, tokens, {dim})"
    if isinstance(x, Tensor) and not x.is_nested and (x.ndim != 3 or x.shape[-1] != dim):
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected {words}")
    check_tensor("x", x, words)
    if not isinstance(weight, Tensor) or not isinstance(x, Tensor) or not weight.is_floating_point():
        return  # a quantised layer
    if not hooked:
        check_place("x", x, "the layer", weight)
    if x.dtype != weight.dtype and weight.dtype.itemsize > 1 and not torch.is_autocast_enabled(x.device.type):
        short = str(weight.dtype).removeprefix("torch.")
        raise ShapeError(f"x is {x.dtype}, the layer {weight.dtype}; pass x.to(torch.{short}), or use torch.autocast")


def check_roles(roles: dict[str, Any], needed: str, grid: Grid) -> None:
    """The inputs of an operator: q (B, H, N, d), k (B, H, M, d), v (B, H, M, e) by name, None where it needs none.

    Raises: ShapeError for a needed one that is None, and for tensors that are not of one kind, device, dtype, batch
    and number of heads; GridError unless q has the tokens of the grid.
    """
    q = roles["q"]
    if type(q) is Tensor and _is_like(roles["k"], q) and _is_like(roles["v"], q) and _is_right(q, 4):
        return grid.check_number(q.shape[-2])
    given = [(role, x) for role, x in roles.items() if x is not None or role in needed]
    sizes: dict[str, tuple[str, int]] = {}
    for role, x in given:
        check_tensor(role, x, _ROLE_ARGUMENTS[role].words)
        if x is not given[0][1]:
            check_place(role, x, *given[0])
            _check_dtype(role, x, *given[0])
        _check_axes("operator", role, x, _ROLE_ARGUMENTS[role], sizes)
    if q is not None:
        grid.check(q)
    return None


def _is_like(x: object, other: Tensor) -> bool:
    """Whether a tensor is of the kind of one that was checked, as keys and values mostly are, so it is right too."""
    return (
        type(x) is type(other)
        and not x.is_nested  # has no shape
        and x.shape == other.shape
        and x.dtype == other.dtype
        and x.device == other.device
        and x.layout == torch.strided
    )


def _is_right(x: Tensor, axes: int) -> bool:
    """Whether a tensor is dense, with this number of axes and floating-point numbers."""
    return not x.is_nested and x.layout == torch.strided and x.ndim == axes and x.is_floating_point()


def check_kinds(grid: object, memory: object, mask: object) -> None:
    """Raises ShapeError unless these are a Grid, a Grid or None, and a Mask or None."""
    if isinstance(grid, Grid) and memory is None and mask is None:
        return
    for label, value, kind, needed in (
        ("grid", grid, Grid, True),
        ("memory", memory, Grid, False),
        ("mask", mask, Mask, False),
    ):
        if not isinstance(value, kind) and (needed or value is not None):
            raise ShapeError(f"{label} is {_kind(value)}; expected a {kind.__name__} such as {_EXAMPLES[kind]}")


def _check_arguments(name: str, kinds: dict[str, Any], given: Iterable[tuple[str, Any]], depth: bool) -> None:
    first: tuple[str, Tensor] | None = None
    floating: tuple[str, Tensor] | None = None
    sizes: dict[str, tuple[str, int]] = {}
    mask: Mask | None = None
    grid: Grid | None = None
    for label, value in given:
        kind = kinds.get(label)
        if kind is None:
            continue
        if isinstance(kind, _TensorArgument):
            if (value is None and kind.optional) or (kind.instead and isinstance(value, kind.instead)):
                continue
            if not (kind.floating and floating is not None and _is_like(value, floating[1])):
                check_tensor(f"{name}: {label}", value, kind.words, kind.floating)
                first = first or (label, value)
                check_place(f"{name}: {label}", value, *first)
                if kind.floating:
                    floating = floating or (label, value)
                    _check_dtype(f"{name}: {label}", value, *floating)
            _check_axes(name, label, value, kind, sizes)
        elif isinstance(kind, _Plan):
            if value is not None or not kind.optional:
                _check_plan(f"{name}: {label}", value, kind, first)
        elif kind is Grid or kind is Mask:
            if not isinstance(value, kind):
                if kind is Mask and value is None:
                    continue
                expected = f"expected a {kind.__name__} such as {_EXAMPLES[kind]}"
                raise ShapeError(f"{name}: {label} is {_kind(value)}; {expected}")
            if isinstance(value, Mask):
                mask = value
            elif label == "grid":
                grid = value
        elif not kind.holds(value) and not (isinstance(value, list) and kind.holds(tuple(value))):
            raise ShapeError(f"{name}: {label} is {short_repr(value)}; {kind.expected} is expected")
    if grid is not None and grid.depth > 1 and not depth:
        raise UnsupportedError(f"{name} takes images, not {grid.depth} frames ({grid})")
    if grid is not None and "N" in sizes:
        grid.check_number(sizes["N"][1])
    if mask is not None and first is not None:
        mask.check_device(first[1].device)
        if sizes.keys() >= {"B", "H", "N"}:
            number = {axis: size for axis, (_, size) in sizes.items()}
            mask.check_bias(number["B"], number["H"], number["N"], number.get("M", number["N"]))


def _check_plan(label: str, plan: object, kind: _Plan, first: tuple[str, Tensor] | None) -> None:
    """Raises ShapeError unless it is of the class, and its tensors are of the kind and number of axes annotated."""
    if not isinstance(plan, kind.cls):
        raise ShapeError(f"{label} is {_kind(plan)}; expected a {kind.cls.__name__}")
    for field, argument in kind.tensors.items():
        x = getattr(plan, field)
        check_tensor(f"{label}.{field}", x, argument.words, argument.floating)
        if not argument.floating and x.dtype == torch.bool:
            raise ShapeError(f"{label}.{field} is torch.bool; expected whole numbers")
        check_place(f"{label}.{field}", x, *(first or (field, x)))
        _check_axes(label, field, x, argument, {})


def _check_axes(name: str, label: str, x: Tensor, kind: _TensorArgument, sizes: dict[str, tuple[str, int]]) -> None:
    if kind.axes is None:
        return
    if x.ndim != len(kind.axes):
        raise ShapeError(f"{name}: {label} has shape {tuple(x.shape)}; expected {kind.words}")
    for axis, size in zip(kind.axes, x.shape, strict=True):
        other, expected = sizes.setdefault(axis, (label, size))
        if axis.isdigit() and size != int(axis):
            raise ShapeError(f"{name}: {label} has shape {tuple(x.shape)}; expected {kind.words}")
        if axis == "d" and not size:
            raise ShapeError(f"{name}: {label} has width 0; it is at least 1")
        if size != expected and axis.isidentifier():
            word = _WORDS.get(axis, axis)
            raise ShapeError(f"{name}: {label} has {word} {size}, {other} has {expected}; they must be equal")


def _argument(hint: Any) -> "_TensorArgument | _Plan | Rule | type | None":
    """What is checked of an argument with this annotation; None if nothing."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    optional = type(None) in parts
    kinds = [part for part in parts if part is not type(None)]
    if len(kinds) <= 2 and isinstance(kinds[0], type) and issubclass(kinds[0], AbstractArray):
        names = tuple(kinds[0].dim_str.split())
        free = any(axis[0] in "*." for axis in names)
        words = ", ".join(_WORDS.get(axis, axis) for axis in names)
        floating = any("float" in dtype for dtype in kinds[0].dtypes)
        return _TensorArgument(floating, None if free else names, f"({words})", optional, *kinds[1:])
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], tuple) and hasattr(kinds[0], "_fields"):
        tensors = {name: _argument(part) for name, part in typing.get_type_hints(kinds[0]).items()}
        held = {name: part for name, part in tensors.items() if isinstance(part, _TensorArgument)}
        return _Plan(kinds[0], held, optional)
    if kinds[0] in (Grid, Mask) and len(kinds) == 1:
        return field_rule(hint) if kinds[0] is Grid and optional else kinds[0]
    return field_rule(hint)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def is_open(*sizes: int) -> bool:
    """Whether an export leaves one of these sizes open, so that nothing may be decided by it."""
    return is_exporting() and any(isinstance(size, torch.SymInt) for size in sizes)
