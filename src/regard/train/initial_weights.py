"""Initial weights of a run: those in a saved folder, and the copying of weights between models."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from regard.core import ConfigError
from regard.models.saving import read_description

log = logging.getLogger("regard.lab")


@dataclass(frozen=True)
class Saved:
    """The weights of a folder that `save` wrote. A run's key contains a digest of them, not the path."""

    folder: str

    def identity(self) -> "Saved":
        """The digest instead of the path. Raises: StoreError if `save` did not write the folder."""
        if self.folder.startswith("saved:"):
            return self
        return dataclasses.replace(self, folder=f"saved:{read_description(self.folder)['sha256'][:12]}")


def copy_weights(source: nn.Module, target: nn.Module) -> tuple[int, int]:
    """Copy tensors of the same name and shape; others of the target (a new head, a mechanism's parameters) stay.

    A target with a `backbone` also takes the weights of the same model without one, such as a classifier's.
    Returns the numbers of tensors copied and of all tensors in the target.
    Raises: ConfigError if no tensor fits.
    """
    weights, target_weights = source.state_dict(), target.state_dict()
    if hasattr(target, "backbone") and not hasattr(source, "backbone"):
        weights = _named_as(weights, target_weights)
    fitting = {
        name: value
        for name, value in weights.items()
        if name in target_weights and target_weights[name].shape == value.shape
    }
    if not fitting:
        raise ConfigError(f"no initial weight fits {type(target).__name__}; both runs need the same host")
    new = ", ".join(sorted(set(target_weights) - set(fitting))) or "none"
    log.info("%d of %d tensors start from the initial weights; new: %s", len(fitting), len(target_weights), new)
    target.load_state_dict(fitting, strict=False)
    return len(fitting), len(target_weights)


def _named_as(weights: dict[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A classifier's weights with their names in a backbone: "blocks.0..." as "backbone.model.blocks.0..."."""
    prefixes = {name[: -len(own)] for own in weights for name in names if name.endswith(f".{own}")}
    prefixes = {prefix for prefix in prefixes if prefix.startswith("backbone.")}
    if not prefixes:
        return weights
    prefix = max(prefixes, key=lambda item: sum(f"{item}{own}" in names for own in weights))
    return {f"{prefix}{own}": value for own, value in weights.items()}
