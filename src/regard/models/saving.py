"""A model in a folder: model.safetensors and model.json, which has the spelled host and mixers. Never pickle."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from regard.core import ConfigError, Grid, MixerConfig, RegardError, StoreError
from regard.mixers.spelling import parse_mixer, parts, spell
from regard.swapping.inspect import example_of
from regard.swapping.layer import Port
from regard.swapping.removed import Nothing
from regard.swapping.shared_state import shared_of
from regard.swapping.swap import plan_layers

from .create import create_model, parse_host, spell_host

FORMAT, VERSION = "regard-model", 1


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model that came from `create_model` (swapped or not, retuned or not); returns the folder.

    Another number of classes since then, as by timm's `reset_classifier`, is noted.
    Raises: ConfigError if the model did not come from `create_model`, or was changed since so that its recipe gives
    other parameters; StoreError if the folder cannot be written.
    """
    recipe = _checked(model)
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    data = save_tensors(tensors)
    about = {
        "format": FORMAT,
        "version": VERSION,
        **recipe,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write(target / "model.safetensors", data)
        _write(target / "model.json", json.dumps(about, indent=1).encode())
    except OSError as error:
        raise StoreError(
            f"cannot write {target}: {error.strerror or error}; check permissions and free space"
        ) from error
    return target


def describe(model: nn.Module) -> dict[str, Any]:
    """What it takes to build a model again without its weights: host (spelled) and swaps (mixer, layers, grids).

    Raises: ConfigError if the model did not come from `create_model`.
    """
    record = model.__dict__.get("regard_host")
    if record is None:
        raise ConfigError("save needs a model from create_model(name, ...): its name and options are the recipe")
    name, options = record
    options = {key: value for key, value in options.items() if key not in ("pretrained", "checkpoint_path")}
    return {"host": spell_host(name, options), "swaps": swaps_of(model)}


def _checked(model: nn.Module) -> dict[str, Any]:
    """`describe`, proved by building the model again without memory. Raises: ConfigError if it has other tensors."""
    recipe = describe(model)
    differs = difference(model, partial(rebuild, recipe))
    classes = getattr(model, "num_classes", None)
    if differs and isinstance(classes, int):
        name, options = parse_host(recipe["host"])
        other = recipe | {"host": spell_host(name, options | {"num_classes": classes})}
        if not difference(model, partial(rebuild, other)):
            return other
    if differs:
        raise ConfigError(
            f"{recipe['host']}, built again, is not this model: {differs}. Give create_model what was changed by hand "
            "(num_classes=, img_size=, or attended_resnet18 and attended_resnet50 for attention in a ResNet), or save "
            "model.state_dict() with safetensors"
        )
    return recipe


def difference(model: nn.Module, build: Callable[[tuple[type, ...]], nn.Module]) -> str:
    """In which tensors a model differs from what is built for it, with the kinds of its configurations; "" if in none.

    Nothing is filled: where it can be, the other model is built without memory.
    """
    kinds = {type(item) for layer in model.modules() if isinstance(layer, Port) for item in parts(layer.mixer.config)}
    built: nn.Module | None = None
    with torch.random.fork_rng(devices=[]):
        for device in ("meta", "cpu"):  # not everything can be built without memory
            try:
                with torch.device(device):
                    built = build(tuple(kinds))
                break
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
    if built is None:
        return failure
    own, other = ({key: tuple(value.shape) for key, value in m.state_dict().items()} for m in (model, built))
    odd = [key for key in own | other if own.get(key) != other.get(key)]
    said = [f"{key} is {own.get(key, 'missing')} here and {other.get(key, 'missing')} there" for key in odd[:3]]
    return "; ".join(said) + (f"; and {len(odd) - 3} more" if len(odd) > 3 else "")


def load(folder: str | os.PathLike[str], extra: Iterable[type] = ()) -> nn.Module:
    """The model that `save` wrote, in evaluation mode, on the CPU. extra: a user's own mechanisms that it names.

    Raises: StoreError if the folder is not one of ours, incomplete or damaged.
    """
    target = Path(folder)
    about = _about(target)
    try:
        data = (target / "model.safetensors").read_bytes()
    except OSError as error:
        raise StoreError(f"{target} has model.json but no readable model.safetensors; save the model again") from error
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise StoreError(
            f"{target}/model.safetensors is damaged or belongs to another model.json; save the model again"
        )
    with described(target, "model.json"):
        model = rebuild(about, tuple(extra))
        fill(model, load_tensors(data))
    return model.eval()


@contextmanager
def described(target: Path, file: str) -> Iterator[None]:
    """Turn what a damaged description or its tensors raise into a StoreError that names the folder and its file."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, RegardError, SafetensorError) as error:
        own = "; load takes a mechanism of your own by extra=[its class]" if isinstance(error, ConfigError) else ""
        raise StoreError(f"{target} does not hold the model that its {file} describes: {error}{own}") from error


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a whole state, in place, with its dtype where those with a floating point have one in common."""
    found = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(found) == 1:
        model.to(found.pop())
    model.load_state_dict(tensors)


def swaps_of(model: nn.Module) -> list[dict[str, Any]]:
    """Layers that one swap made: the same mechanism and the same shared module, in the model's order."""
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Port):
            config, grid = layer.mixer.config, layer.mixer.site.grid
            spelled = "removed" if isinstance(config, Nothing) else spell(config)
            group = groups.setdefault((spelled, id(shared_of(layer))), {"mixer": spelled, "layers": {}})
            group["layers"][name] = [grid.height, grid.width, grid.prefix, grid.suffix]
    return list(groups.values())


def rebuild(about: dict[str, Any], extra: tuple[type, ...] = ()) -> nn.Module:
    """The model of `describe`, with first weights.

    extra: a user's own mechanisms that it names. Raises: RegardError.
    """
    model = create_model(about["host"], None)
    replay(model, about["swaps"], extra)
    return model


def replay(model: nn.Module, swaps: list[dict[str, Any]], extra: tuple[type, ...] = ()) -> None:
    """Do again, in place, what `swaps_of` wrote down. Raises: RegardError."""
    for group in swaps:
        grids = {layer: Grid(*numbers) for layer, numbers in group["layers"].items()}
        removed = group["mixer"] == "removed"
        mixer: MixerConfig | None = Nothing() if removed else parse_mixer(group["mixer"], extra)
        if mixer is None:
            raise ConfigError("a swap without a mixer")
        plan_layers(model, mixer, list(grids), example_of(model, default=(224, 224)), grids).apply()


def read_about(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """model.json of a saved folder: host, swaps and the sha256 of the weights. Raises: StoreError."""
    return _about(Path(folder))


def _about(target: Path) -> dict[str, Any]:
    try:
        about = json.loads((target / "model.json").read_text())
    except FileNotFoundError as error:
        raise StoreError(f"{target} has no model.json; expected a folder that regard.save wrote") from error
    except OSError as error:
        raise StoreError(f"cannot read {target}/model.json: {error.strerror or error}") from error
    except ValueError as error:
        raise StoreError(f"{target}/model.json is damaged: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise StoreError(f"{target}/model.json was not written by regard.save")
    if about.get("version") != VERSION:
        raise StoreError(f"{target} has version {about.get('version')}, this Regard reads {VERSION}; update Regard")
    needed = {"host": str, "swaps": list, "sha256": str}
    for key, kind in needed.items():
        if not isinstance(about.get(key), kind):
            raise StoreError(f"{target}/model.json is damaged: {key!r} is missing or of the wrong kind")
    return about


def _write(path: Path, data: bytes) -> None:
    """Beside the target, synced, renamed: a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
