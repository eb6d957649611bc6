"""Where a run's first weights may come from besides chance: a saved folder; and how weights are copied."""

import dataclasses
import logging
from dataclasses import dataclass

from torch import nn

from regard.core import ConfigError
from regard.models.saving import read_about

log = logging.getLogger("regard.lab")


@dataclass(frozen=True)
class Saved:
    """The weights of a folder that `save` wrote. A run's key holds a digest of them, not the path."""

    folder: str

    def identity(self) -> "Saved":
        """The digest in the place of the path. Raises: StoreError if the folder is not one of ours."""
        if self.folder.startswith("saved:"):
            return self
        return dataclasses.replace(self, folder=f"saved:{read_about(self.folder)['sha256'][:12]}")


def copy_weights(source: nn.Module, target: nn.Module) -> tuple[int, int]:
    """Copy what has the same name and shape; the rest of the target (a new head, a mechanism's own part) stays.

    Returns the numbers of tensors copied and of those that the target has.
    Raises: ConfigError if nothing fits.
    """
    have, want = source.state_dict(), target.state_dict()
    fitting = {name: value for name, value in have.items() if name in want and want[name].shape == value.shape}
    if not fitting:
        raise ConfigError(f"no weight of the start fits {type(target).__name__}; both runs need the same host")
    rest = sorted(set(want) - set(fitting))
    log.info("%d of %d weights are taken from the start; new: %s", len(fitting), len(want), ", ".join(rest) or "none")
    target.load_state_dict(fitting, strict=False)
    return len(fitting), len(want)
