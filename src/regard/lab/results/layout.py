"""File names of a study's snapshots: NAME-SCALE.json, and NAME-SCALE+CHANGES.json for changed data, host or size.

The setting's name is the part after the study's name: "desk", or "desk+imagenette_small+64x64". Needs no torch.
"""

import hashlib
import re
from pathlib import Path

from regard.core import ConfigError

MAX_LENGTH = 32
"""Of a text in a file name."""


def setting_name(scale: str, variant: str | None) -> str:
    """The name of a setting: its scale, and what was changed."""
    return f"{scale}+{variant}" if variant else scale


SCALES = ("smoke", "desk", "paper")
"""The scales of studies, by size."""
TUNING_SEED = 10_000
"""Of the runs that choose learning rates; studies have no such seed."""


def scale_of(setting: str) -> str:
    """The scale in a setting's name."""
    return setting.partition("+")[0]


def slug(text: str) -> str:
    """A text as part of a file name. Other characters become "_", and 4 hexadecimal digits of its SHA-256 follow."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip("_.")[:MAX_LENGTH].rstrip("_.")
    return plain if plain == text else f"{plain}_{hashlib.sha256(text.encode()).hexdigest()[:4]}"


def setting_names(root: Path | str, name: str, folder: str = "studies") -> list[str]:
    """The settings of which a study has a snapshot, or, in the folder "analyses", an analysis has a result."""
    names = [path.stem.removeprefix(f"{name}-") for path in sorted((Path(root) / folder).glob(f"{name}-*.json"))]
    return [setting for setting in names if "-" not in setting]


def find_setting_name(root: Path | str, name: str, scale: str | None) -> str:
    """The study's setting with exactly this name, else the only one of this scale; `scale` itself if there is none.

    scale: None for the largest one with results, or "desk" without any.
    Raises: ConfigError with the list, if several settings have this scale and all of them have changes.
    """
    settings = setting_names(root, name)
    if scale is None:
        scale = next((each for each in reversed(SCALES) if each in map(scale_of, settings)), "desk")
    if scale in settings:
        return scale
    matches = [setting for setting in settings if scale_of(setting) == scale]
    if len(matches) > 1:
        options = ", ".join(f"--scale {setting}" for setting in matches)
        raise ConfigError(f"{name} has several results at {scale} scale, all with changes: give one of {options}")
    return matches[0] if matches else scale
