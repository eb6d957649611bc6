"""Saving swapped models of transformers: config.json, model.safetensors, and regard.json with the swap."""

import copy
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from regard.core import ConfigError, Extra, MissingExtra, StoreError
from regard.files.atomic import one_writer, parse_json, prepare_write, read_bytes
from regard.files.data_record import data_problem
from regard.files.paths import user_path
from regard.files.records import read_record, record_text
from regard.swapping.ports.hugging_face import config_of

from . import recipe

FILE = "regard.json"
MODEL_FILES = ("model.json", FILE, "config.json", "model.safetensors")
"""Files of which each says that a folder has a model, of Regard or of another library."""
FIELDS = ("architecture", "swaps", "options", "sha256", "config_sha256", "data")
_TIMM_MADE = ("conditional_detr", "dab_detr", "deformable_detr", "detr", "omdet_turbo", "table_transformer")
"""Models whose `use_timm_backbone` builds timm's network without asking the hub; others ignore it."""


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers itself, not a module around one."""
    return config_of(model) is not None and type(model).__module__.startswith("transformers.")


def save_transformers(model: nn.Module, folder: str | os.PathLike[str], known: dict[str, Any]) -> Path:
    """Write a model of transformers: config.json, model.safetensors and regard.json; returns the folder.

    known: the `data` of `regard.save`, for regard.json.
    Raises: ConfigError if the model was changed so that it cannot be built again; StoreError.
    """
    config = config_of(model)
    about: dict[str, Any] = {"architecture": type(model).__name__, "swaps": recipe.recorded_swaps(model)}
    if about["swaps"] and any(getattr(config_of(part), "output_attentions", False) for part in model.modules()):
        raise ConfigError(
            "the configuration has output_attentions=True, which no swapped model gives, so load would refuse it: set "
            "model.config.output_attentions = False; regard.capture collects attention maps"
        )
    if getattr(model, "pooler", model) is None:
        about["options"] = {"add_pooling_layer": False}
    differences = recipe.model_differences(model, partial(_build_model, about, copy.deepcopy(config)))
    if differences:
        raise ConfigError(
            f"{type(model).__name__}, built again, is not this model: {differences}. Merge adapters "
            "(merge_and_unload() of PEFT), or save model.state_dict() with safetensors"
        )
    target = user_path(folder, StoreError)
    check_folder(target, FILE, lambda: read_record(target / FILE, FIELDS))
    data, text = save_tensors(recipe.stored_tensors(model), metadata={"format": "pt"}), config.to_json_string().encode()
    about |= {"sha256": hashlib.sha256(data).hexdigest(), "config_sha256": hashlib.sha256(text).hexdigest()}
    about |= {"data": known} if known else {}
    with (
        one_writer(target),
        prepare_write(target / "config.json", text) as replace_config,
        prepare_write(target / "model.safetensors", data) as replace_weights,
        prepare_write(target / FILE, record_text(about)) as replace_description,
    ):
        replace_description()  # first: what an interruption leaves can be written over
        replace_config()
        replace_weights()
    return target


def check_folder(folder: Path, description: str, read: Callable[[], object]) -> None:
    """Raises: StoreError where a folder has files of a model, but not with this description, which `read` refuses where
    another program wrote it."""
    if (folder / description).exists():
        read()
    elif held := [name for name in MODEL_FILES if (folder / name).exists()]:
        raise StoreError(
            f"{folder} holds another model, or one of another library ({', '.join(held)}): save into another folder, "
            "or delete it"
        )


def load_transformers(target: Path, extra: Extra = ()) -> nn.Module:
    """The model that `save_transformers` wrote, in evaluation mode, on the CPU, in the dtype of its weights.

    Raises: StoreError if the folder has no regard.json or does not fit it, or a file is damaged; MissingExtra without
    transformers.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf") from error

    for name in (FILE, "config.json", "model.safetensors"):
        if not (target / name).exists():
            raise StoreError(
                f"{target} has no {name}; regard.save writes swapped models, and transformers' own save_pretrained "
                "and Trainer do not: read it by its class of transformers with attn_implementation='sdpa' and swap it "
                "again. That loses a mechanism's own parameters, such as static keys, which "
                "regard.save(trainer.model, folder) keeps"
            )
    about = read_record(target / FILE, FIELDS)
    if problem := data_problem(about.get("data", {})):
        raise StoreError(f"{target}/{FILE} is damaged: of its data, {problem}")
    text = read_bytes(target / "config.json")
    if hashlib.sha256(text).hexdigest() != about.get("config_sha256", hashlib.sha256(text).hexdigest()):
        raise StoreError(f"{target}/config.json is damaged or belongs to another {FILE}; save the model again")
    configuration = parse_json(target / "config.json", text)
    recipe.check_local(target / "config.json", _without_backbones(configuration))
    check_no_hub(target, configuration)
    data = read_bytes(target / "model.safetensors")
    with recipe.description_errors(target, FILE):
        if "sha256" in about and hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise StoreError("model.safetensors is damaged or belongs to another regard.json")
        try:
            config = transformers.AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its checks of fields have errors of their own
            raise StoreError(f"transformers refuses config.json ({error})") from error
        tensors = load_tensors(data)
        model = _build_model(about, config, tuple(extra))
        recipe.fill(model, tensors)
    model.regard_data = about.get("data", {})  # `save` keeps it
    return model.eval()


def _start_without_weights(config: Any) -> None:
    """Let a backbone start without the weights that older configurations name, in place: the folder has them all."""
    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False
    for part in vars(config).values():
        if type(part).__module__.startswith("transformers."):
            _start_without_weights(part)


def _without_backbones(config: Any) -> Any:
    """A configuration without `use_pretrained_backbone`, which `_start_without_weights` turns off."""
    if isinstance(config, dict):
        kept = {key: value for key, value in config.items() if key != "use_pretrained_backbone"}
        return {key: _without_backbones(value) for key, value in kept.items()}
    return config


def check_no_hub(folder: Path, configuration: Any) -> None:
    """Raises: StoreError if a configuration has a backbone that transformers or timm would read from its hub, or
    weights that timm would read from another file."""
    if backbone := _backbone_of_hub(configuration):
        raise StoreError(f"{folder}/config.json takes its backbone {backbone!r} from the hub, which is not asked")
    if source := _timm_source(configuration):
        raise StoreError(f"{folder}/config.json takes a network or weights from {source!r}, which is not asked")


def hub_attention(config: Any) -> str:
    """The code of attention that transformers would read from its hub, anywhere in a configuration; "" if none."""
    if not isinstance(config, dict):
        return ""
    own = (value for key, value in config.items() if key.lstrip("_").startswith("attn_implementation"))
    return next(filter(None, (*(str(x) for x in own if "/" in str(x)), *map(hub_attention, config.values()))), "")


def _backbone_of_hub(config: Any) -> str:
    """The backbone whose configuration transformers would read from its hub; "" where there is none.

    timm's own backbones (`timm_backbone`, and `use_timm_backbone` of some models) are built without asking.
    """
    if not isinstance(config, dict):
        return ""
    backbone, kind = config.get("backbone"), str(config.get("model_type")).replace("-", "_")
    by_timm = kind in _TIMM_MADE and config.get("use_timm_backbone") and not config.get("backbone_kwargs")
    timm_made = kind == "timm_backbone" or by_timm
    if backbone and not timm_made:
        return str(backbone)
    return next(filter(None, map(_backbone_of_hub, config.values())), "")


def _timm_source(config: Any) -> str:
    """The address, in any value, from which timm would take a network, or its file of weights; "" if there is none."""
    if isinstance(config, str):
        return config if config.lower().strip().startswith(("hf-hub:", "hf_hub:", "local-dir:")) else ""
    if isinstance(config, dict):
        named = [str(config["checkpoint_path"])] if config.get("checkpoint_path") else []
        return next(filter(None, [*named, *map(_timm_source, config.values())]), "")
    return next(filter(None, map(_timm_source, config)), "") if isinstance(config, list) else ""


def _build_model(about: dict[str, Any], config: Any, extra: Extra) -> nn.Module:
    """The model of regard.json and a configuration (changed), with initial weights."""
    import transformers

    config.__dict__.pop("attn_implementation", None)
    config._attn_implementation = None  # transformers chooses: not all classes have "sdpa"
    _start_without_weights(config)
    architecture = getattr(transformers, about["architecture"], None)
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        raise ConfigError(f"transformers has no model {about['architecture']!r}")
    model = architecture(config, **about.get("options", {}))
    recipe.replay_swaps(model, about["swaps"], extra)
    return model
