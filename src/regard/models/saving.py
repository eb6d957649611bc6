"""Saving a model to a folder, and loading it: one of `create_model` or of transformers. Never pickle.

The first is model.safetensors and model.json, with the spelled host and mixers; the second is what transformers writes,
and regard.json with the swap.
"""

import hashlib
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from regard.core import ConfigError, DataError, Extra, StoreError
from regard.core.validation import check_arguments
from regard.files.atomic import one_writer, prepare_write, read_if_present
from regard.files.data_record import DATA, data_problem
from regard.files.paths import user_path
from regard.files.records import parse_record, record_text
from regard.swapping.hooks import hooked_modules

from .hugging_face import check_folder, is_of_transformers, load_transformers, save_transformers
from .recipe import check_local, check_recipe, description_errors, fill, rebuild, stored_tensors

FORMAT = "regard-model"
_FIELDS = ("format", "host", "swaps", "sha256", "data")


@check_arguments
def save(model: nn.Module, folder: str | os.PathLike[str], *, data: Mapping[str, Any] | None = None) -> Path:
    """Write a model of `create_model` or of transformers, swapped or not, to a folder; returns the folder.

    A model of transformers becomes the files that transformers reads, and regard.json with the swap.
    data: what it was trained on, for `regard predict` and `export`: "class_names", the names of its outputs, "normal",
    [mean, deviation] of each channel by which images are normalised, and "name" of the set; others are left out. None
    = what was known of a model that was loaded.
    A number of classes or an input size changed since then, by timm's `reset_classifier` and `set_input_size`, is
    recorded.
    A `forward` that was replaced on a module, and hooks, are not kept; a warning names them.
    Several threads and processes may save to one folder: it then has the model of the last one.
    Raises: ConfigError if the model is of neither, was changed since so that its recipe builds other parameters (LoRA),
    has parameters that are not finite, or for wrong `data`; StoreError if the folder cannot be written, or holds what
    another library or program wrote.
    """
    if replaced := [name or "the model" for name, module in model.named_modules() if "forward" in vars(module)]:
        warnings.warn(f"the folder does not have the replaced forward of {', '.join(replaced)}", stacklevel=2)
    if hooked := hooked_modules(model):
        warnings.warn(f"the folder does not have the forward hooks of {', '.join(hooked)}", stacklevel=2)
    known = _known_data(model, _loaded_data(model) if data is None else data)
    if is_of_transformers(model):
        return save_transformers(model, folder, known)
    recipe = check_recipe(model)
    weights = save_tensors(stored_tensors(model))
    about = {
        "format": FORMAT, **recipe, "sha256": hashlib.sha256(weights).hexdigest(), **({"data": known} if known else {}),
    }  # fmt: skip
    target = user_path(folder, StoreError)
    check_folder(target, "model.json", lambda: read_description(target))
    with (
        one_writer(target),
        prepare_write(target / "model.safetensors", weights) as replace_weights,
        prepare_write(target / "model.json", record_text(about)) as replace_description,
    ):
        replace_description()  # first: what an interruption leaves can be written over
        replace_weights()
    return target


@check_arguments
def load(folder: str | os.PathLike[str], extra: Extra = (), *, download: bool = False) -> nn.Module:
    """The model that `save` wrote, of `create_model` or of transformers, in evaluation mode, on the CPU.

    Nothing is unpickled, and no network is asked. extra: the user's own mechanisms, models and ports that it needs.
    download: also load a model whose description names pretrained weights, a hub or a checkpoint file, which are then
    loaded first.
    Raises: DataError for the folder of a run; MissingExtra for a model of transformers where that is not installed;
    StoreError if `save` did not write the folder, it is incomplete or damaged, or its description names other weights
    without `download`.
    """
    target = user_path(folder, StoreError)
    if (target / "run.json").exists() and not (target / "model.json").exists():
        raise DataError(f"{target} is the folder of a run: regard.lab.load_run reads it")
    if (target / "config.json").exists() and not (target / "model.json").exists():
        return load_transformers(target, extra)
    about = read_description(target)
    if not download:
        check_local(target / "model.json", about)
    data = read_if_present(target / "model.safetensors")
    if data is None:
        raise StoreError(f"{target} has model.json but no readable model.safetensors; save the model again")
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise StoreError(f"{target}/model.safetensors is damaged or belongs to another model.json; save it again")
    with description_errors(target, "model.json"):
        tensors = load_tensors(data)
        model = rebuild(about, tuple(extra))
        fill(model, tensors)
    model.regard_data = about.get("data", {})  # type: ignore[assignment]  # `save` keeps it
    return model.eval()


def read_description(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """model.json of a saved folder: host, swaps, the sha256 of the weights, and data, if `save` got them.

    Raises: StoreError.
    """
    path = Path(folder) / "model.json"
    data = read_if_present(path)
    if data is None:
        raise StoreError(f"{folder} has no model.json; expected a folder that regard.save wrote")
    about = parse_record(path, data)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise StoreError(f"{path} was not written by regard.save")
    kinds = {"host": str, "swaps": list, "sha256": str}
    for key, kind in kinds.items():
        if not isinstance(about.get(key), kind):
            raise StoreError(f"{path} is damaged: {key!r} is missing or of the wrong type")
    if problem := data_problem(about.get("data", {})):
        raise StoreError(f"{path} is damaged: of its data, {problem}")
    if unknown := sorted(about.keys() - {*_FIELDS, "version"}):
        raise StoreError(f"{path} has {', '.join(unknown)}, which this Regard does not know; update Regard")
    return about


def _loaded_data(model: nn.Module) -> Mapping[str, Any]:
    """What was known of a model when it was loaded; without the names of classes if it has another number of them."""
    data = dict(model.__dict__.get("regard_data") or {})
    names = data.get("class_names") or ()
    if len(names) != getattr(model, "num_classes", len(names)):
        data.pop("class_names", None)
    return data


def _known_data(model: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of `data`, with tensors and arrays as lists, without what is None. Raises: ConfigError."""
    known = {name: value for name, value in data.items() if name in DATA and value is not None}
    with suppress(TypeError, ValueError):  # the check below names it
        if "normal" in known:
            known["normal"] = [[float(value) for value in part] for part in known["normal"]]
    if isinstance(known.get("class_names"), tuple):
        known["class_names"] = list(known["class_names"])
    if problem := data_problem(known):
        raise ConfigError(f"save(data=...): {problem}")
    names, outputs = known.get("class_names"), getattr(model, "num_classes", getattr(model, "num_labels", None))
    if names and outputs and len(names) != outputs:
        raise ConfigError(f"save(data=...): class_names has {len(names)} names, but the model has {outputs} outputs")
    return known
