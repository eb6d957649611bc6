"""What a swap checks before it changes a model, what it refuses, and what a plan notes."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from regard.core import MixerConfig, SwapError, UnsupportedError
from regard.core.mask import POSITION_BIASES
from regard.mixers.shared.heads import HeadMixerConfig, drops_bias
from regard.mixers.spelling import parts, spell
from regard.mixers.static_keys.keys import FROM_TEACHER, StaticConfig

from .adapters import LIBRARIES, alteration, package_name
from .host_names import MIXER_CHILD
from .layer import Port
from .separate_qkv import SEPARATE_BIASES, SEPARATE_MATRICES, SHORT_MATRICES

PATCH_DROPOUT = ("PatchDropout", "PatchDropoutWithIndices")
"""Classes of timm and OpenCLIP that drop patches in training."""
_MATRICES = ("qkv", "proj", *SEPARATE_MATRICES.values(), *SHORT_MATRICES.values())
_WEIGHTS = tuple(f"{each}.weight" for each in _MATRICES)
_BIASES = (*(f"{each}.bias" for each in _MATRICES), *SEPARATE_BIASES.values())
_PARTS = ("qkv.kv.", "q_norm.", "k_norm.", "operator.", "around.")
"""Parameters that a layer of Regard may have, by the mixer's names, and that some mechanisms do not use."""
OTHER_MASKS = "leave the layer out with where=, or take a mechanism that can: `regard list` shows the masks of each"


def check_supported(port: type[Port], host: nn.Module, name: str, mixer: MixerConfig) -> None:
    """Raises: UnsupportedError if the port or the mechanism cannot be used here. host: the library's module."""
    passed = port.host_masks(host) - (POSITION_BIASES if drops_bias(mixer) else set())
    taken = mixer.masks | (POSITION_BIASES if "bias" in mixer.masks else set())
    missing = sorted(passed - taken) if mixer.uses else []
    if reason := port.refusal(host):
        raise UnsupportedError(f"{port.__name__} cannot replace {name}: {reason}")
    if missing:
        raise UnsupportedError(
            f"{name} passes a {'bias' if missing == ['product'] else ', '.join(missing)} mask, which {spell(mixer)} "
            f"cannot apply; {OTHER_MASKS}"
            + (
                '; host_bias="drop" leaves its position biases out'
                if set(missing) <= POSITION_BIASES and isinstance(mixer, HeadMixerConfig)
                else ""
            )
        )


def check_patch_dropout(model: nn.Module) -> None:
    """Raises: UnsupportedError if a model drops patches at random in training, when its tokens are on no grid."""
    for name, module in model.named_modules():
        rate = getattr(module, "prob", 0.0)
        if type(module).__name__ in PATCH_DROPOUT and rate > 0:
            raise UnsupportedError(
                f"{name} drops {rate:g} of the patches in training, so that the tokens are on no grid; build the model "
                f"without it (patch_drop_rate=0), or set {name}.prob = 0"
            )


def check_plain(layer: nn.Module, name: str) -> None:
    """Raises: SwapError if a tool has wrapped or replaced the weights of a layer (pruning, quantisation)."""
    if isinstance(layer, Port):
        reason = alteration(layer.mixer, {package_name(part) for part in parts(layer.mixer.config)}, skip="operator")
    else:
        reason = alteration(layer, replaced=True)  # without such a port it is left out: `changed_attention`
    if reason:
        raise SwapError(
            f"{name}: {reason}, whose weights would be lost; merge or remove it first (merge_and_unload() of PEFT, "
            "prune.remove() or remove_parametrizations() of torch), or leave the layer out with where="
        )


def check_linears(layer: Port, host: nn.Module, name: str) -> None:
    """Raises: SwapError if a linear layer with a forward of the user's own, such as LoRA, becomes a plain one."""
    matched, own = layer.matched_roles(), dict(layer.mixer.named_modules())
    for path, part in host.named_modules():
        kind = type(part)
        if not isinstance(part, nn.Linear) or kind.forward is nn.Linear.forward or package_name(part) in LIBRARIES:
            continue
        if f"{path}.weight" in matched and type(own[layer.mixer_name(f"{path}.weight").rpartition(".")[0]]) is not kind:
            raise SwapError(
                f"{name}: its {path} is of {kind.__module__}.{kind.__qualname__}, whose forward would be lost; put a "
                "plain nn.Linear with merged weights there, or leave the layer out with where="
            )


def lost_adapters_error(name: str, paths: list[str]) -> SwapError:
    """The error for adapters around weights that do not stay."""
    return SwapError(
        f"{name}: the adapter around {', '.join(paths)} would be lost, as those weights do not stay in full; merge it "
        "first (merge_and_unload() of PEFT), or leave the layer out with where="
    )


def check_memory(model: nn.Module) -> None:
    """Raises: SwapError if a parameter has no shape yet, or new layers would get no memory beside those that have."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise SwapError(f"{name} has no shape yet: run the model once, then swap")
        if parameter.device.type != "meta" and torch.get_default_device().type == "meta":
            raise SwapError("torch.device('meta') gives new layers no memory, unlike the model: swap outside of it")


def warn_of_lost_hooks(lost: Mapping[str, list[str]]) -> None:
    """Warn about hooks, by layer, that cannot move."""
    if any(lost.values()):
        texts = "; ".join(f"{name}: {', '.join(hooks)}" for name, hooks in lost.items() if hooks)
        warnings.warn(f"hooks and attributes that do not move to the new layers: {texts}", stacklevel=4)


def unsaved(before: nn.Module, dropped: Sequence[str] = ()) -> list[str]:
    """Parameters of the host that no file of a loaded model had, and that what takes the place of `before` uses.

    dropped: those that it does not use, as `Port.parameter_changes` has them.
    """
    parts = before.unsaved if isinstance(before, Port) else ()
    return [each for each in parts if each not in dropped and each.partition("[")[0] not in dropped]


def warn_of_unsaved(used: Mapping[str, list[str]]) -> None:
    """Warn about parameters, by layer, that are as in a new model, as `unsaved` finds them."""
    if names := [name for name, parts in used.items() if parts]:
        more = f" and of {len(names) - 1} more layers" if len(names) > 1 else ""
        warnings.warn(
            f"{', '.join(used[names[0]])} of {names[0]}{more}: the mechanism did not use them, so they were not saved "
            "with the model and are as in a new one; train them, or load them from the original model", stacklevel=4,
        )  # fmt: skip


def left_out(layers: Sequence[tuple[Port, list[str]]]) -> str:
    """What to say of trained parts of the hosts' own mechanism that the new one does not have, such as SegFormer's
    reduction of keys. layers: each port with the parameters it drops. "" where nothing is lost.
    """
    lost = [[key for key in dropped if layer.mixer_name(key).startswith("operator.")] for layer, dropped in layers]
    parts = dict.fromkeys(key.rpartition(".")[0] or key for keys in lost for key in keys)
    if not parts:
        return ""
    number = sum(map(bool, lost))
    return (
        f"there is no place for {', '.join(parts)} of the host's attention, so the output of {number} "
        f"layer{'s' if number > 1 else ''} changes until the model is trained; docs/hosts.md says what "
        "keeps it"
    )


def describe_unmapped(name: str, layer: Port, new: list[str], dropped: list[str]) -> str:
    """What to say where a port of the user's own leaves matrices behind and the mechanism starts with new ones.

    new, dropped: as `Port.parameter_changes` has them. "" where all is in order, or the port is one of Regard's for
    this class.
    """
    random = [path for key in new if (path := key.removeprefix(f"{MIXER_CHILD}.")) in _WEIGHTS]
    unused = [key for key in dropped if len(layer.host_shapes.get(key, ())) > 1]
    port = type(layer)
    if port.__module__.startswith("regard.") and (port.matches(layer.host) or package_name(layer.host) == "regard"):
        return ""
    if not (random and unused):
        return _describe_lost(name, layer, dropped)
    return (
        f"{name}: {', '.join(unused)} of the host {'is' if len(unused) == 1 else 'are'} not used, and "
        f"{', '.join(random)} of the new layer {'starts' if len(random) == 1 else 'start'} at random; "
        f"{port.__name__}.parameter_names says which is which"
    )


def _describe_lost(name: str, layer: Port, dropped: list[str]) -> str:
    """What to say of learned parameters of the user's own attention, such as a temperature; "" where none is lost."""
    learned = dict(layer.host.named_parameters()) if layer.mixer.config.uses else {}
    own = {key: layer.mixer_name(key) for key in dropped if key in learned}
    lost = [key for key, path in own.items() if path not in _WEIGHTS + _BIASES and not path.startswith(_PARTS)]
    if not lost:
        return ""
    return (
        f"{name}: there is no place for {', '.join(lost)} of {type(layer.host).__qualname__}, so the output may "
        f"change; {type(layer).__name__}.kept_parameters names what the port's forward uses itself"
    )


def plan_notes(port: type[Port], host: nn.Module, mixer: MixerConfig, bias: bool) -> list[str]:
    """What a plan says of a layer besides its parameters. bias: of the host's queries, keys and values."""
    notes, rate = [], port.weights_dropout(host)
    if port.loses:
        notes.append(f"re-initialised: {port.loses} is lost, so the layer has to be trained")
    if drops_bias(mixer) and POSITION_BIASES & port.host_masks(host):
        notes.append("position biases are left out, so that the output changes until the model is trained")
    if rate > 0:
        notes.append(f"dropout {rate} of attention weights is left out")
    if bias and "q" in mixer.uses:
        notes.append("q, k, v keep the host's bias (a hidden content term)")
    if isinstance(mixer, StaticConfig) and mixer.init in FROM_TEACHER:
        notes.append("static keys start at random until regard.calibrate(model, teacher, batches) sets them")
    return notes
