"""Input checks that the operator functions and configurations of several mechanisms share."""

from collections.abc import Sequence
from dataclasses import fields

from jaxtyping import Bool
from torch import Tensor

from regard.core import NO_MASK, ConfigError, Grid, GridError, Mask, MixerConfig, ShapeError, Site, UnsupportedError

from .native import eager_on_cpu


def check_heads(name: str, **tensors: Tensor) -> None:
    """Raises ShapeError unless all tensors are (B, H, tokens, width) with the same B, H and dtype.

    name: the operator function, for the message.
    """
    first_name, first = next(iter(tensors.items()))
    for label, x in tensors.items():
        if x.ndim != 4:
            raise ShapeError(f"{name}: {label} has shape {tuple(x.shape)}; expected (batch, heads, tokens, width)")
        if x.shape[:2] != first.shape[:2]:
            raise ShapeError(
                f"{name}: {label} has batch and heads {tuple(x.shape[:2])}, {first_name} has {tuple(first.shape[:2])}"
            )
        if x.dtype != first.dtype:
            raise ShapeError(f"{name}: {label} is {x.dtype}, {first_name} is {first.dtype}; cast them to one dtype")


def check_qkv(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`check_heads` of q, k and v; also q and k must have the same width, and k and v the same number of tokens."""
    check_heads(name, q=q, k=k, v=v)
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"{name}: q has width {q.shape[-1]}, k has {k.shape[-1]}; they must be equal")
    if k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"{name}: k has {k.shape[-2]} tokens, v has {v.shape[-2]}; they must be equal")


def check_qkv_on_grid(name: str, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> None:
    """`check_qkv` for self-attention on a grid. Raises: ShapeError, GridError unless q and k are the grid's tokens."""
    check_qkv(name, q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ShapeError(f"{name}: q has {q.shape[-2]} tokens, k has {k.shape[-2]}; both must be the grid's tokens")
    grid.check(q)


def check_qkv_and_padding(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Bool[Tensor, "B M"] | None:
    """`check_qkv`; returns the keys that a padding mask keeps, None for all.

    Raises: ShapeError; UnsupportedError for other masks.
    """
    check_qkv(name, q, k, v)
    return padding_only(name, mask).keep


def padding_only(name: str, mask: Mask | None) -> Mask:
    """The mask, an empty one for None. Raises: UnsupportedError for a causal mask or a bias."""
    mask = mask or NO_MASK
    if unsupported := sorted(mask.kinds - {"padding"}):
        raise UnsupportedError(f"{name} cannot apply a {' or '.join(unsupported)} mask (it can: padding)")
    return mask


def check_top(name: str, top: int, number: int, plural: str) -> None:
    """Raises ShapeError unless 1 <= top <= number. plural: what is chosen from, for the message."""
    if not 1 <= top <= number:
        raise ShapeError(f"{name}: top={top} of {number} {plural}; choose top between 1 and {number}")


def check_odd_kernel(name: str, field: str, kernel: int) -> None:
    """Raises ConfigError unless the kernel of a convolution is 0 (none) or odd."""
    if kernel < 0 or (kernel and kernel % 2 == 0):
        raise ConfigError(f"{name}: {field} is the odd kernel of a convolution or 0 for none, not {kernel}")


def refuse_unused(config: MixerConfig, names: Sequence[str], belongs: str) -> None:
    """Raises: ConfigError for a field that is not at its default though nothing uses it. belongs: where it would."""
    for item in fields(config):
        if item.name in names and (value := getattr(config, item.name)) != item.default:
            raise ConfigError(f"{type(config).__name__}: {item.name}={value!r} belongs to {belongs}; remove it")


def check_prefix_suffix(label: str, built: Grid, grid: Grid) -> None:
    """Raises GridError unless a grid has as many prefix and suffix tokens as the build grid."""
    if grid.prefix != built.prefix or grid.suffix != built.suffix:
        raise GridError(f"{label} were built for {built}, not for {grid}; prefix and suffix tokens must be the same")


def check_site(field: str, value: int, site: Site, number: int, plural: str) -> None:
    """Raises ConfigError if a field asks for more than the `number` keys or tokens (`plural`) of a site."""
    if value > number:
        has = f"the site{f' of {site.name}' if site.name else ''} has {number} {plural}"
        raise ConfigError(f"{field}={value}, but {has}; choose {field} between 1 and {number}")


def check_chosen(label: str, chosen: Tensor, shape: tuple[int, ...], number: int) -> None:
    """Raises ShapeError unless `chosen` has this shape and, in eager mode on the CPU, indices from 0 to number - 1.

    Elsewhere values are not read: that would break a graph, or wait for the device.
    """
    if tuple(chosen.shape) != shape:
        raise ShapeError(f"{label} has shape {tuple(chosen.shape)}; expected {shape}")
    if eager_on_cpu(chosen) and chosen.numel():
        low, high = (int(end) for end in chosen.aminmax())
        if low < 0 or high >= number:
            raise ShapeError(f"{label} has indices from {low} to {high}; expected 0 to {number - 1}")
