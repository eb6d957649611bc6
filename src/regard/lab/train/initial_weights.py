"""Initial weights of a run: those in a saved folder, and the copying of weights between models."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn

from regard.core import ConfigError, SwapError
from regard.core.validation import check_fields
from regard.mixers.static_keys.keys import StaticOperator
from regard.models.saving import read_description
from regard.models.sizes import set_size

from .class_rows import ClassRows, match_classes

log = logging.getLogger("regard.lab.engine")


@dataclass(frozen=True)
class Saved:
    """The weights of a folder that `save` wrote. A run's key contains a digest of them, not the path."""

    folder: str

    def __post_init__(self) -> None:
        check_fields(self)

    def identity(self) -> "Saved":
        """The digest instead of the path. Raises: StoreError if `save` did not write the folder."""
        if self.folder.startswith("saved:"):
            return self
        return dataclasses.replace(self, folder=f"saved:{read_description(self.folder)['sha256'][:12]}")


def copy_weights(
    source: nn.Module,
    target: nn.Module,
    classes: tuple[Sequence[str], Sequence[str]] | None = None,
    size: tuple[int, int] | None = None,
    rows: Mapping[str, ClassRows] | None = None,
) -> tuple[int, int]:
    """Copy tensors of the same name and shape; others of the target (a new head, a mechanism's parameters) stay.

    A target that contains the source's network, such as a detector around the backbone of a classifier, takes the
    tensors under their names there. classes: names of the outputs of both, if they are known; an output starts from
    that of the same name, and a class without one from new weights. rows: of the target's tensors, from `class_rows`.
    size: (height, width) of the target's images, to which timm's networks resize positions of the source, which is
    changed; static keys are resampled too.
    Returns the numbers of tensors copied and of all tensors in the target.
    Raises: ConfigError if no tensor fits.
    """
    if size is not None:
        with suppress(AssertionError, RuntimeError, SwapError, ValueError):  # the tensors are then named below
            set_size(source, size)
    source_weights, target_weights = source.state_dict(), target.state_dict()
    prefix, fitting = _match_weights(source_weights, target_weights)
    if not fitting:
        raise ConfigError(f"no initial weight fits {type(target).__name__}; both runs need the same host")
    fitting |= _static_keys(source_weights, target, prefix)
    if classes is not None and list(classes[0]) != list(classes[1]):
        fitting = {name: value for name, value in fitting.items() if name not in (rows or ())}
        fitting |= match_classes(source_weights, target_weights, rows or {}, *classes)
    others = {f"{prefix}{name}": value for name, value in source_weights.items() if name not in (rows or ())}
    _warn_of_other_shapes(others, target_weights, fitting)
    new = ", ".join(sorted(set(target_weights) - set(fitting))) or "none"
    log.info("%d of %d tensors start from the initial weights; new: %s", len(fitting), len(target_weights), new)
    target.load_state_dict(fitting, strict=False)
    return len(fitting), len(target_weights)


def _static_keys(weights: Mapping[str, Tensor], target: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Parameters of static keys that were learned on another grid, resampled to the target's."""
    found: dict[str, Tensor] = {}
    for layer, module in target.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if isinstance(module, StaticOperator) else ():
            value = weights.get(f"{layer}.{name}".removeprefix(prefix))
            if value is not None and value.shape != parameter.shape:
                resampled = module.transfer_parameter(name, value)
                found |= {} if resampled is None else {f"{layer}.{name}": resampled}
    return found


def _warn_of_other_shapes(
    weights: Mapping[str, Tensor], target: Mapping[str, Tensor], fitting: Mapping[str, Tensor]
) -> None:
    """Say which tensors start anew because of their shape."""
    shapes = {
        name: (tuple(weights[name].shape), tuple(value.shape))
        for name, value in target.items()
        if name in weights and name not in fitting
    }
    if shapes:
        first = "; ".join(f"{name} is {old} there and {new} here" for name, (old, new) in list(shapes.items())[:3])
        more = f"; and {len(shapes) - 3} more" if len(shapes) > 3 else ""
        which = "tensor of another shape is" if len(shapes) == 1 else "tensors of another shape are"
        log.warning("%d learned %s not taken, but drawn anew: %s%s", len(shapes), which, first, more)


def _match_weights(weights: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """The prefix under which most weights fit, and those that fit, by their names in the target.

    A prefix is used only if more than half of the weights fit with it.
    """
    prefixes = {""}
    for name in weights:
        prefixes |= {other[: -len(name)] for other in target if other.endswith(f".{name}")}
    found = {
        prefix: {
            f"{prefix}{name}": value
            for name, value in weights.items()
            if f"{prefix}{name}" in target and target[f"{prefix}{name}"].shape == value.shape
        }
        for prefix in sorted(prefixes)
    }
    inside = [(prefix, fitting) for prefix, fitting in found.items() if prefix and 2 * len(fitting) > len(weights)]
    return max([("", found[""]), *inside], key=lambda each: len(each[1]))
