"""The recipe of a model: the spelled host and its swaps, from which it is built again, without its weights."""

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from regard.core import ConfigError, Extra, Grid, MixerConfig, RegardError, StoreError
from regard.files.tensor_files import check_weights
from regard.mixers.spelling import parse_mixer, parts, spell
from regard.swapping.inspect import example_input
from regard.swapping.layer import Port
from regard.swapping.removed import Removed
from regard.swapping.shared_state import shared_module
from regard.swapping.swap import plan_layers

from .catalog import user_ports
from .create import create_model, parse_host, spell_host
from .segmentation.segmenter import SEGMENTER, SEGMENTER_OPTIONS, make_segmenter

_OTHER_WEIGHTS = (
    "pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "hf_hub_id",
    "use_pretrained_backbone", "weights_backbone", "weights",
)  # fmt: skip
"""Options of hosts with which weights are downloaded, or read from a file."""
_SPEAKING = (nn.Linear, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
"""Modules whose `extra_repr` has all that they compute with, beside their tensors."""
_HUBS = ("hf-hub:", "hf_hub:", "local-dir:", "http:", "https:", "file:", "timm:")
"""In lower case: timm takes a scheme in any."""


def model_recipe(model: nn.Module) -> dict[str, Any]:
    """The data to build a model again, without its weights: host (spelled) and swaps (mixer, layers, grids).

    Raises: ConfigError if the model did not come from `create_model`.
    """
    record = model.__dict__.get("regard_host")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ConfigError("save writes no compiled model: give it model._orig_mod, and compile what load gives")
    if record is None:
        raise ConfigError(
            "save writes models of regard.create_model, whose name and options build them again, and those of "
            f"transformers, not this {type(model).__name__}: "
            "torch.save(model.state_dict(), ...), and to load it, make the model, swap as before, then load_state_dict"
            "; regard.distill(..., folder=FOLDER) writes the plan and the weights"
        )
    name, options = record
    return {"host": spell_host(name, _without_weights(options)), "swaps": recorded_swaps(model)}


def _without_weights(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a host, and of hosts that they spell, without the weights that it started from."""
    kept = {key: value for key, value in options.items() if key not in ("pretrained", "checkpoint_path")}
    return {key: local_host(value) if isinstance(value, str) else value for key, value in kept.items()}


def local_host(host: str) -> str:
    """A spelled host without the weights that it starts from: where others are loaded into it, they do not matter."""
    if not any(f"{name}=" in host for name in ("pretrained", "checkpoint_path")):
        return host
    name, options = parse_host(host)
    return spell_host(name, _without_weights(options))


def check_local(path: Path, value: Any) -> None:
    """Check that building what a file describes asks no network and reads no other file.

    value: a spelled host, or plain data in which hosts may be spelled. path: of the file, for the error.
    Raises: StoreError.
    """
    if source := _weights_source(value):
        raise StoreError(
            f"{path} names {source}, but a saved model asks no network and reads no other file; if you trust it, load "
            "it in Python with download=True, and save it anew"
        )


def _weights_source(value: Any) -> str:
    """What in a value names other weights, "" if nothing does."""
    if isinstance(value, Mapping):
        named = [f"{key}={item!r}" for key, item in value.items() if key in _OTHER_WEIGHTS and item]
        return next(filter(None, [*named, *map(_weights_source, value.values())]), "")
    if isinstance(value, list | tuple):
        return next(filter(None, map(_weights_source, value)), "")
    if not isinstance(value, str):
        return ""
    if any(hub in value.lower() for hub in _HUBS):
        return value
    try:
        tree = ast.parse(value.strip(), mode="eval") if "(" in value else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return next((f"{name} in {value!r}" for name in _OTHER_WEIGHTS if name in value), "")
    for node in ast.walk(tree) if tree else ():
        options: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.keyword):
            options = [(node.arg, node.value)]
        elif isinstance(node, ast.Dict):
            options = [(getattr(key, "value", None), item) for key, item in zip(node.keys, node.values, strict=True)]
        for name, item in options:
            if name in _OTHER_WEIGHTS and (text := ast.unparse(item)) not in ("False", "None", "''"):
                return f"{name}={text}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (inner := _weights_source(node.value)):
            return inner
    return ""


def check_recipe(model: nn.Module) -> dict[str, Any]:
    """`model_recipe` as `save` writes it, checked by building the model again without memory.

    Raises: ConfigError if the model did not come from `create_model`, or built again has other tensors.
    """
    recipe = model_recipe(model)
    differences = model_differences(model, partial(rebuild, recipe))
    for changed in _changed_options(model) if differences else ():
        name, options = parse_host(recipe["host"])
        as_changed = recipe | {"host": spell_host(name, options | changed)}
        if not model_differences(model, partial(rebuild, as_changed)):
            return as_changed
    if differences:
        raise ConfigError(
            f"{recipe['host']}, built again, is not this model: {differences}. Pass changes made by hand to "
            "create_model (num_classes=, img_size=, or attended_resnet18 and attended_resnet50 for attention in a "
            "ResNet), or save model.state_dict() with safetensors"
        )
    return recipe


def _changed_options(model: nn.Module) -> list[dict[str, Any]]:
    """Options that methods of timm's models may have changed: `reset_classifier`, `set_input_size`, or both."""
    embedding = getattr(model, "patch_embed", None)
    windows = (getattr(module, "window_size", None) for module in model.modules())
    classes, size, window = (
        {name: tuple(value) if isinstance(value, list) else value}
        for name, value in (
            ("num_classes", getattr(model, "num_classes", None)), ("img_size", getattr(embedding, "img_size", None)),
            ("window_size", next((each for each in windows if each is not None), None)),
        )
    )  # fmt: skip
    every = [classes, size, classes | size, size | window, classes | size | window]
    return [each for each in every if None not in each.values()]


def model_differences(model: nn.Module, build: Callable[[tuple[type, ...]], nn.Module]) -> str:
    """In what a model differs from the one that `build` returns, as text; "" if there is nothing: the shapes of its
    tensors, else its input size, windows, pooling and activations.

    build: a function of the classes of the model's configurations; it is called on the meta device where possible.
    """
    kinds = {type(item) for layer in model.modules() if isinstance(layer, Port) for item in parts(layer.mixer.config)}
    built: nn.Module | None = None
    with torch.random.fork_rng(devices=[]):
        for device in ("meta", "cpu"):  # not every model can be built without memory
            try:
                with torch.device(device):
                    built = build((*kinds, *model.__dict__.get("regard_extra", ())))
                break
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
    if built is None:
        return failure
    actual, rebuilt = ({key: tuple(value.shape) for key, value in m.state_dict().items()} for m in (model, built))
    keys = [key for key in actual | rebuilt if actual.get(key) != rebuilt.get(key)]
    if not keys:
        actual, rebuilt = _functions(model), _functions(built)
        keys = [key for key in actual | rebuilt if actual.get(key) != rebuilt.get(key)]
    lines = [f"{key} is {actual.get(key, 'missing')} here and {rebuilt.get(key, 'missing')} there" for key in keys[:3]]
    return "; ".join(lines) + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


def _functions(model: nn.Module) -> dict[str, Any]:
    """What a model computes beside its tensors, as far as it can be compared: sizes, how it pools, what its modules say
    of themselves, such as the epsilon of a norm."""
    pool = getattr(model, "global_pool", None)
    found: dict[str, Any] = {} if isinstance(pool, nn.Module) else {"global_pool": pool}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, Port):
            found[f"{name}.heads"] = module.mixer.site.heads
            found[f"{name}.parallel"] = getattr(module.host, "parallel", None)
            found[f"{name}.mechanism"] = getattr(getattr(module.mixer, "operator", None), "config", None)
        for key in ("img_size", "window_size", "shift_size", "parallel", "num_heads", "head_dim", "scale", "eps"):
            value = None if isinstance(module, _SPEAKING) else getattr(module, key, None)
            if isinstance(value, bool | int | float | tuple | list):
                found[f"{name}.{key}"] = tuple(value) if isinstance(value, list) else value
        if "drop" in kind.lower() or kind == "Identity":
            continue  # dropout does nothing in evaluation
        if isinstance(module, _SPEAKING) or not (module.state_dict() or any(True for _ in module.children())):
            found[name] = f"{kind}({module.extra_repr()})"
        else:
            found[name] = kind.removeprefix("FSDP")  # and by its tensors
    return found


@contextmanager
def description_errors(target: Path, file: str) -> Iterator[None]:
    """Replace the errors of a damaged description or its tensors by a StoreError that names the folder and file."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        ImportError,
        RegardError,
        SafetensorError,
    ) as error:
        hint = "; pass your own mechanisms, models and ports as extra=[...]" if isinstance(error, ConfigError) else ""
        problem = textwrap.shorten(str(error), 500, placeholder=" ...")  # torch lists every weight that is missing
        raise StoreError(f"{target} does not hold the model that its {file} describes: {problem}{hint}") from error


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model as `fill` reads it. Raises: ConfigError if a parameter has values that are not finite."""
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    try:
        check_weights(model, tensors)
    except ValueError as error:
        raise ConfigError(f"{error}, which load would refuse; save a model whose training did not diverge") from error
    return tensors


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a whole state, in place; the model takes its floating-point dtype, or each tensor its own of several."""
    dtypes = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    elif dtypes:
        for name, value in model.state_dict(keep_vars=True).items():
            if name in tensors and value.is_floating_point():
                value.data = value.data.to(tensors[name].dtype)
    check_weights(model, tensors)
    model.load_state_dict(tensors)


def recorded_swaps(model: nn.Module) -> list[dict[str, Any]]:
    """The swaps of a model: layers with the same mechanism and the same shared module, in the model's order.

    shares: the first layer with this module, where another mechanism has it too, as after `retune` of some layers.
    """
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    first: dict[int, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Port):
            config, grid = layer.mixer.config, layer.planned_grid
            spelled = "removed" if isinstance(config, Removed) else spell(config)
            shared = shared_module(layer)
            shares = name if shared is None else first.setdefault(id(shared), name)
            made: dict[str, Any] = {"mixer": spelled, "layers": {}, **({} if shares == name else {"shares": shares})}
            group = groups.setdefault((spelled, id(shared)), made)
            depth = [grid.depth] if grid.depth > 1 else []
            group["layers"][name] = [grid.height, grid.width, grid.prefix, grid.suffix, *depth]
    return list(groups.values())


def rebuild(about: dict[str, Any], extra: Extra = ()) -> nn.Module:
    """The model of a `model_recipe`, with initial weights.

    extra: the user's own mechanisms, models and ports that it needs. Raises: RegardError.
    """
    model = create_saved(about["host"], extra)
    replay_swaps(model, about["swaps"], extra)
    return model


def create_saved(host: str, extra: Extra = ()) -> nn.Module:
    """The model of a spelled host of `model_recipe`, a segmenter or one of `create_model`. Raises: RegardError."""
    name, options = parse_host(host)
    if name != SEGMENTER:
        return create_model(host, None, extra=extra)
    given: dict[str, Any] = {name: options.get(name) for name in SEGMENTER_OPTIONS}
    if options.keys() != given.keys():
        raise ConfigError(f"{host} is not the spelling of a segmenter, with {', '.join(given)}")
    return make_segmenter(
        given["host"], None, given["head"], classes=given["num_classes"], size=given["img_size"],
        channels=given["in_chans"], extra=extra,
    )  # fmt: skip


def replay_swaps(model: nn.Module, swaps: list[dict[str, Any]], extra: Extra = ()) -> None:
    """Repeat, in place, the swaps of `recorded_swaps`. Raises: RegardError."""
    for group in swaps:
        grids = {layer: _grid_of(*numbers) for layer, numbers in group["layers"].items()}
        removed = group["mixer"] == "removed"
        mixer: MixerConfig | None = Removed() if removed else parse_mixer(group["mixer"], extra)
        if mixer is None:
            raise ConfigError("a recorded swap names no mechanism")
        example = example_input(model, default=(224, 224))
        shared = shared_module(model.get_submodule(group["shares"])) if "shares" in group else None
        plan_layers(model, mixer, list(grids), example, grids, user_ports(extra), shared).apply()
    for layer in model.modules():
        if isinstance(layer, Port):
            parameters = dict(layer.host.named_parameters())
            layer.unsaved = [key for key in layer.parameter_changes()[2] if key.partition("[")[0] in parameters]


def _grid_of(height: int, width: int, prefix: int = 0, suffix: int = 0, depth: int = 1) -> Grid:
    """The grid of the numbers in a record, which has the depth only where it is not 1."""
    return Grid(height, width, prefix, suffix, depth=depth)
