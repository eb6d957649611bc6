"""Where a study's snapshots lie: NAME-SCALE.json, and NAME-SCALE+CHANGES.json for changed data, host or size.

"Place" is the part after the study's name: "desk", or "desk+imagenette_small+64x64". Needs no torch.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.core import ConfigError

LONGEST = 32


def place_of(snapshot: Mapping[str, Any]) -> str:
    """The place of a snapshot: its scale, and what was changed."""
    variant = str(snapshot.get("variant") or "")
    return f"{snapshot.get('scale')}" + (f"+{variant}" if variant else "")


def scale_of(place: str) -> str:
    """The scale of a place."""
    return place.partition("+")[0]


def slug(text: str) -> str:
    """A text as a part of a file name. What cannot stand there becomes "_", and 4 hex digits of the text follow."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip("_.")[:LONGEST].rstrip("_.")
    return plain if plain == text else f"{plain}_{hashlib.sha256(text.encode()).hexdigest()[:4]}"


def places(root: Path | str, name: str, folder: str = "studies") -> list[str]:
    """The places at which a study has a snapshot, or, in the folder "analyses", an analysis a result."""
    found = sorted((Path(root) / folder).glob(f"{name}-*.json"))
    return [path.stem.removeprefix(f"{name}-") for path in found if "-" not in path.stem.removeprefix(f"{name}-")]


def find_place(root: Path | str, name: str, wanted: str) -> str:
    """The place that is meant: exactly this one, or the only one of this scale; `wanted` itself if there is none.

    Raises: ConfigError with the list, if there are several and none is the plain one.
    """
    known = places(root, name)
    if wanted in known:
        return wanted
    alike = [place for place in known if scale_of(place) == wanted]
    if len(alike) > 1:
        commands = ", ".join(f"--scale {place}" for place in alike)
        raise ConfigError(f"{name} has several results at {wanted} scale, all with changes: give {commands}")
    return alike[0] if alike else wanted
