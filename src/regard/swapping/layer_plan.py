"""Layer plans: a mechanism for each layer of a model, as a mapping, as a text and as a file."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from regard.core import ConfigError, Extra, MixerConfig, SwapError
from regard.core.validation import short_repr
from regard.files.atomic import read_bytes, write_atomically
from regard.files.paths import user_path
from regard.mixers.spelling import parse_mixer, spell

from .removed import Removed

LayerPlan = Mapping[str, MixerConfig]
"""Layer names (or globs) -> the mechanism that each gets; layers that it does not name keep their attention."""
PlanSource = str | os.PathLike[str] | Mapping[str, MixerConfig | str | None]
"""What `read_layer_plan` takes."""

FORMAT = "regard-plan"
EXPECTED = "a plan is LAYER=MECHANISM; LAYER=MECHANISM; ..., such as blocks.0.attn=MiTA(m=25, k=25)"


def is_layer_plan(value: object) -> bool:
    """Whether a value that stands for a mechanism is a plan of layers: a mapping, a path or a text with LAYER=."""
    if isinstance(value, str):
        return "=" in value.partition("(")[0] or value.strip().endswith(".json")
    return isinstance(value, Mapping | os.PathLike)


def read_layer_plan(source: PlanSource, extra: Extra = ()) -> dict[str, MixerConfig]:
    """The plan of a mapping, of a text such as "blocks.0.attn=SKA(); blocks.[1-3].attn=None", or of a file.

    A text that ends in .json is the path of a file. None removes the attention of a layer. An empty mapping is a plan
    that changes nothing. extra: the user's own mechanisms. Raises: ConfigError for anything else; StoreError for a file
    that is missing or damaged.
    """
    if isinstance(source, os.PathLike) or (isinstance(source, str) and source.strip().endswith(".json")):
        pairs: Iterable[tuple[Any, Any]] = _from_file(user_path(cast(str, source))).items()
    elif isinstance(source, str):
        pairs = [_pair(part) for part in source.split(";") if part.strip()]
    elif isinstance(source, Mapping):
        pairs = source.items()
    else:
        raise ConfigError(f"{EXPECTED}; a mapping, or the path of a file, not {short_repr(source)}")
    plan: dict[str, MixerConfig] = {}
    for layer, mixer in pairs:
        if not isinstance(layer, str) or not layer.strip():
            raise ConfigError(f"{EXPECTED}; {short_repr(layer)} is no name of a layer")
        layer = layer.strip()
        if set(layer) & {";", "="}:
            raise ConfigError(f"{EXPECTED}; a name of a layer has no ; and no =, not {short_repr(layer)}")
        if layer in plan:
            raise ConfigError(f"the plan has two mechanisms for {layer}; keep one")
        plan[layer] = _mixer(layer, mixer, extra)
    if not plan and not isinstance(source, Mapping):
        raise ConfigError(f"the plan has no layer; {EXPECTED}")
    return plan


def spell_layer_plan(plan: LayerPlan) -> str:
    """The text of a plan, which `read_layer_plan` reads; layers in a row with the same mechanism stay apart."""
    return "; ".join(f"{layer}={spell_or_none(mixer)}" for layer, mixer in plan.items())


def spell_or_none(mixer: MixerConfig) -> str:
    """The spelling of a mechanism; "None" for removed attention."""
    return "None" if isinstance(mixer, Removed) else spell(mixer)


def write_layer_plan(plan: LayerPlan, path: str | os.PathLike[str], model: str = "") -> Path:
    """Write a plan as a JSON file that a person can read and change. model: what it was made for, for the reader.

    Raises: StoreError.
    """
    layers = {layer: spell_or_none(mixer) for layer, mixer in plan.items()}
    file = Path(path)
    write_atomically(file, json.dumps({"format": FORMAT, "model": model, "layers": layers}, indent=1) + "\n")
    return file


def mixers_by_layer(plan: LayerPlan, layers: Sequence[str]) -> dict[str, MixerConfig]:
    """The mechanism of each layer of a model that a plan names, in the order of the model.

    A name matches as a glob, or, where no layer has it, as the end of a name, so that a plan for a classifier also fits
    the same network inside a detector. Raises: SwapError for a name without a layer, or a layer with two mechanisms.
    """
    found: dict[str, MixerConfig] = {}
    for pattern, mixer in plan.items():
        names = [name for name in layers if fnmatchcase(name, pattern)]
        names = names or [name for name in layers if fnmatchcase(name, f"*.{pattern}")]
        if not names:
            raise SwapError(f"no layer matches {pattern!r} of the plan; the model has {', '.join(layers) or 'none'}")
        for name in names:
            if name in found:
                raise SwapError(f"the plan has two mechanisms for {name}; let each layer match one name")
            found[name] = mixer
    return {name: found[name] for name in layers if name in found}


def _pair(part: str) -> tuple[str, str]:
    layer, equals, mixer = part.partition("=")
    if not equals:
        raise ConfigError(f"{EXPECTED}; {short_repr(part.strip())} has no =")
    return layer.strip(), mixer.strip()


def _mixer(layer: str, mixer: Any, extra: Extra) -> MixerConfig:
    if isinstance(mixer, MixerConfig):
        return mixer
    if mixer is None:
        return Removed()
    if not isinstance(mixer, str):
        raise ConfigError(
            f"the plan has {short_repr(mixer)} for {layer}; a mechanism, its spelling or None is expected"
        )
    return parse_mixer(mixer, extra) or Removed()


def _from_file(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise ConfigError(f"there is no plan {path}; `regard advise MODEL --data DIR` writes one")
    data = read_bytes(path)
    try:
        content = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("layers"), dict):
        raise ConfigError(f'{path} is no plan: it needs "format": "{FORMAT}" and "layers", a mechanism for each layer')
    if unknown := sorted(content.keys() - {"format", "model", "layers"}):
        raise ConfigError(f"{path} has {short_repr(unknown[0])}, which this Regard does not know: update, or delete it")
    return cast(Mapping[str, Any], content["layers"])


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of pairs in JSON. Raises: ValueError for a key that is given twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is given twice")
    return content
