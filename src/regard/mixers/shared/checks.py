"""Input checks that the operator functions and configurations of several mechanisms share."""

from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from regard.core import NO_MASK, ConfigError, Grid, GridError, Mask, MixerConfig, ShapeError, Site, UnsupportedError

from .native import eager_on_cpu


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
