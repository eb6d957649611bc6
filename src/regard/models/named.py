"""A network by a user's words: a name of `create_model`, timm:NAME, hf:FOLDER or MODULE:FUNCTION; and its weights."""

import inspect
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.core import ConfigError, Extra, MissingExtra, StoreError, nearest
from regard.core.user_module import user_module
from regard.core.validation import short_repr
from regard.files.atomic import parse_json, read_if_present
from regard.files.data_record import data_problem
from regard.files.paths import printable, user_path
from regard.files.tensor_files import check_weights
from regard.swapping.host_parameters import read_tensors

from .create import build_sized, create_model, loads_weights
from .hugging_face import FILE, check_no_hub, hub_attention, load_transformers
from .sizes import default_size_of

ENTRIES = ("state_dict", "model_state_dict", "model", "state_dict_ema", "ema_state_dict", "model_ema", "net", "module")
"""Where checkpoints of training loops have the weights."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class NamedNetwork:
    """label: for pages and messages. trained: whether its weights are, as far as is known. data: as for `regard.save`,
    where the network's own files say it."""

    network: nn.Module
    label: str
    trained: bool
    data: Mapping[str, Any] = field(default_factory=dict)


def is_users(text: str) -> bool:
    """Whether a text names a model that `create_model` does not build: hf:FOLDER, or MODULE:FUNCTION."""
    return text.startswith("hf:") or (not text.startswith("timm:") and _FUNCTION.fullmatch(text) is not None)


def named_network(
    text: str, *, weights: str = "", size: tuple[int, int] | None = None, pretrained: bool = False, extra: Extra = ()
) -> NamedNetwork:
    """The network that a user names.

    text: a name such as "deit_tiny_patch16_224", with or without "timm:"; "hf:FOLDER", as transformers saves a model;
    "my_module:make_model", a function without arguments, whose module is searched in the current folder too, last.
    weights: a state dict, in safetensors or as torch saves it; no code in it is run. A file for another number of
    classes gives the model that many. size: (height, width) of images, None = the model's own.
    Raises: ConfigError for an unknown name or a function that gives no model; StoreError for weights or a folder that
    do not fit; MissingExtra without transformers.
    """
    if Path(text).suffix in SUFFIXES and os.path.isfile(text):
        raise ConfigError(f"{text} is a file of weights: give the model that they are of, and --weights {text}")
    if not is_users(text):
        return _of_create_model(text.removeprefix("timm:"), weights, size, pretrained, extra)
    found = _of_transformers(text, extra) if text.startswith("hf:") else _of_function(text)
    if pretrained:
        raise ConfigError(f"--pretrained loads weights of timm's models, which {text} is not: leave it out")
    if weights:
        _load(found.network, _state(weights, found.network), weights)
    return found


def _of_create_model(
    name: str, weights: str, size: tuple[int, int] | None, pretrained: bool, extra: Extra
) -> NamedNetwork:
    if pretrained and weights:
        raise ConfigError("--weights and --pretrained both give the weights: leave one out")
    options: dict[str, Any] = {"pretrained": True} if pretrained else {}

    def make() -> nn.Module:
        return build_sized(name, None, size, extra, **options) if size else create_model(
            name, None, extra=extra, **options
        )  # fmt: skip

    network = make()
    if not weights:
        return NamedNetwork(network, name, loads_weights(name, pretrained, extra))
    state = _state(weights, network)
    classes = _classes(network, state)
    if classes is not None:
        options["num_classes"] = classes
        network = make()
    _load(network, state, weights)
    return NamedNetwork(network, weights, True)


def _classes(network: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes of a file of weights, where it is not the network's."""
    config = getattr(network, "pretrained_cfg", None) or {}
    names = config.get("classifier") or ("head", "fc", "classifier")
    for name in (names,) if isinstance(names, str) else names:
        sizes = [tensors.get(f"{name}.weight", torch.empty(0)).shape for tensors in (state, network.state_dict())]
        if all(len(size) > 1 for size in sizes) and sizes[0] != sizes[1] and sizes[0][1:] == sizes[1][1:]:
            return int(sizes[0][0])
    return None


def _state(weights: str, network: nn.Module) -> dict[str, Tensor]:
    """The tensors of a file by the names of a network: prefixes that all names have are taken off."""
    state, own = read_tensors(user_path(weights, StoreError), *ENTRIES), network.state_dict().keys()
    while not own & state.keys():
        prefix = next(iter(state)).partition(".")[0] + "."
        if not all(name.startswith(prefix) and name != prefix for name in state):
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _load(network: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load all weights, strictly. Raises: StoreError."""
    own = network.state_dict()
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    shapes = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    if problem := "; ".join(
        f"{len(names)} {what}, first {names[0]}"
        for what, names in (("missing", missing), ("not in the model", unknown), ("of another shape", shapes))
        if names
    ):
        hint = f"; {nearest(missing[0], unknown)}" if missing and unknown else _size_hint(network, state)
        raise StoreError(f"the weights of {source} are not those of this model: {problem}{hint}")
    try:
        check_weights(network, state)
    except (ValueError, RuntimeError) as error:  # RuntimeError: of tensors without data, or sparse ones
        raise StoreError(f"the weights of {source} are damaged or of another kind: {error}") from error
    network.load_state_dict(state)


def _size_hint(network: nn.Module, state: Mapping[str, Tensor]) -> str:
    """The size of square images that a table of positions in a file is for; "" where no shape tells it."""
    own, record = getattr(network, "pos_embed", None), network.__dict__.get("regard_host")
    tables = own, state.get("pos_embed")
    if record is None or not all(isinstance(table, Tensor) and table.ndim == 3 for table in tables):
        return ""
    height, width = default_size_of(network, "")
    for prefix in range(6):  # tokens without a place
        first, second = (math.sqrt(max(cast(Tensor, table).shape[1] - prefix, 0)) for table in tables)
        size = height * second / max(first, 1)
        if first.is_integer() and second.is_integer() and size.is_integer() and height == width and first != second:
            return f"; its positions are of images of {size:.0f}x{size:.0f}: give --size {size:.0f}x{size:.0f}"
    return ""


def _of_function(text: str) -> NamedNetwork:
    name, _, function = text.partition(":")
    module = user_module(name, text)
    make = getattr(module, function, None)
    if not callable(make):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(f"{text}: {name} has no function {function!r}; {nearest(function, known)}")
    try:
        network = make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's own code, which may call sys.exit
        raise ConfigError(f"{text}(): {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{text}() returned {short_repr(network, 60)}, no torch.nn.Module")
    return NamedNetwork(network, f"{text} ({inspect.getsourcefile(module) or name})", True)


def _of_transformers(text: str, extra: Extra) -> NamedNetwork:
    """The model of a folder of transformers, by the class that its configuration names; nothing asks the network."""
    folder = user_path(text.removeprefix("hf:"), StoreError)
    data = read_if_present(folder / "config.json")
    if data is None:
        raise StoreError(f"{folder} has no config.json: give the folder that save_pretrained wrote")
    config = parse_json(folder / "config.json", data)
    if (folder / FILE).exists():
        network = load_transformers(folder, extra)
        known = {**_normal(folder), **_class_names(config, network), **network.__dict__["regard_data"]}
        return NamedNetwork(network, text, True, known)
    kinds = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(kinds, list) or not kinds:
        raise StoreError(f"{folder}/config.json names no class of transformers in architectures")
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf") from error

    name = kinds[0]
    kind = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise StoreError(
            f"{folder}/config.json names no class of transformers in architectures: {short_repr(name, 60)}"
        )
    if (folder / "adapter_config.json").exists():  # transformers would add the adapter to the weights beside it
        raise StoreError(
            f"{folder} has weights and an adapter of PEFT (adapter_config.json): if they are merged, delete its files; "
            "else merge them (merge_and_unload) and save them"
        )
    check_no_hub(folder, config)
    if code := hub_attention(config):
        raise StoreError(f"{folder}/config.json takes its attention {code!r} from the hub, which is not asked")
    _check_index(folder)
    verbosity = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()  # its report of the weights, which is said below
        with torch.device("cpu"):  # also where costs are counted, on the meta device
            network, found = cast(Any, kind).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # of transformers, for a configuration or weights that are damaged, it may be any
        said = "; ".join(line.strip() for line in str(error).strip().splitlines()[:3])
        raise StoreError(f"{folder} cannot be loaded: {said}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if lost := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
        raise StoreError(f"{folder} has no weights, or other ones, for {len(lost)} tensors of {name}, first {lost[0]}")
    if unused := sorted(found["unexpected_keys"]):
        said = f"{folder} has weights for {len(unused)} tensors that {name}, as its config.json describes it, has not"
        warnings.warn(f"{said}, first {printable(unused[0])}", stacklevel=2)
    return NamedNetwork(network, text, True, {**_normal(folder), **_class_names(config, network)})


def _check_index(folder: Path) -> None:
    """Raises: StoreError for an index of weights with other files than .safetensors beside it."""
    file = folder / "model.safetensors.index.json"
    index = parse_json(file, data) if (data := read_if_present(file)) else {}
    files = index.get("weight_map", {}) if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(
        re.fullmatch(r"[\w.-]+\.safetensors", str(name)) for name in files.values()
    ):
        raise StoreError(f"{file} names other files than .safetensors in its folder")


def _class_names(config: dict[str, Any], network: nn.Module) -> dict[str, Any]:
    """The names of the outputs of a classifier of images; none for transformers' LABEL_0, or where a name is there
    twice, as "crane" among the classes of ImageNet."""
    labels = config.get("id2label")
    if "ForImageClassification" not in type(network).__name__ or not isinstance(labels, dict):
        return {}
    names = [labels.get(str(number)) for number in range(len(labels))]
    if not all(isinstance(name, str) and name.strip() for name in names) or len(set(names)) < len(names):
        return {}
    return {} if all(re.fullmatch(r"LABEL_\d+", str(name)) for name in names) else {"class_names": names}


def _normal(folder: Path) -> dict[str, Any]:
    """The normalisation, of pixels from 0 to 1, that the folder's image processor has, with its factor and offset.

    Raises: StoreError for one that is none.
    """
    data = read_if_present(folder / "preprocessor_config.json")
    values = parse_json(folder / "preprocessor_config.json", data) if data else {}
    values = values if isinstance(values, dict) else {}
    mean, std = (values.get(name) for name in ("image_mean", "image_std"))
    if values.get("do_normalize") is False:
        mean, std = [0.0] * 3, [1.0] * 3
    if mean is None and std is None:
        return {}
    scaled = values.get("rescale_factor", 1 / 255)
    number = isinstance(scaled, int | float) and 0 < scaled < 1e6
    if problem := data_problem({"normal": [mean, std]}) or ("" if number else "rescale_factor is a number above 0"):
        raise StoreError(f"{folder}/preprocessor_config.json: {problem}; give --mean and --std")
    factor = 255 * scaled if values.get("do_rescale", True) else 255.0
    shift = 1.0 if values.get("offset") or values.get("rescale_offset") else 0.0  # of video models: from -1 to 1
    if abs(factor - 1) < 1e-6 and not shift:
        return {"normal": [mean, std]}
    means, deviations = cast(list[float], mean), cast(list[float], std)
    return {"normal": [[(value + shift) / factor for value in means], [value / factor for value in deviations]]}
