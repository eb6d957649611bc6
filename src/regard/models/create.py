"""Models by name: `create_model`, and the spelling of a model with its options."""

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from regard.core import ConfigError, Extra, MixerConfig, RegardError, StoreError, nearest
from regard.core.validation import check_arguments, plain_number, short_repr
from regard.mixers.spelling import YOUR_OWN, place_of, read_expression, spell
from regard.swapping.inspect import example_input
from regard.swapping.swap import plan_swap

from .catalog import list_models, make_regard_model, own_models, user_ports

_DEPTHS = ("depth", "depths", "num_layers", "layers")
_PLAIN = "name(option=value, ...) with plain values"


@check_arguments
def create_model(
    name: str, mixer: MixerConfig | None = None, *, reinitialise: bool = False, extra: Extra = (), **timm_options: Any,
) -> nn.Module:  # fmt: skip
    """A host with a mechanism, or with its own attention.

    name: of timm or one of Regard's (see `list_models`), or a spelling with options, "vit_desk(dim=48, depth=2)".
    mixer: None keeps the host's own attention. To take it out, call `remove(model)`: in a plan of layers and on the
    command line None is no attention, and "host" is the host's own. reinitialise: as for `swap`.
    extra: the user's own models and ports; a model has the name of its function or class.
    timm_options: passed to `timm.create_model` unchanged: num_classes, in_chans, img_size, pretrained, features_only.
    Raises: ConfigError for an unknown name or option, StoreError for weights that cannot be loaded.
    """
    plain, options = parse_host(name)
    options |= {key: plain_number(value) for key, value in timm_options.items()}
    model = _create(plain, options, extra)
    model.regard_host = (plain, options)  # type: ignore[assignment]
    model.regard_extra = tuple(extra)  # type: ignore[assignment]  # `save` builds the model again
    if mixer is None:
        return model
    size = options.get("img_size")  # a model of the user may take it without keeping it
    example = None if size is None else example_input(model, default=size)
    plan = plan_swap(model, mixer, example=example, ports=user_ports(extra), reinitialise=reinitialise)
    plan.warn()
    return plan.apply(faithful=bool(options.get("pretrained", False)))


def build_sized(
    text: str, mixer: MixerConfig | None, size: tuple[int, int], extra: Extra = (), **overrides: Any
) -> nn.Module:
    """`create_model` for images of size = (height, width): with `img_size`, unless the host has no such option."""
    try:
        return create_model(text, mixer, extra=extra, img_size=size, **overrides)
    except ConfigError as error:
        message = str(error.__cause__)
        if "unexpected keyword argument" not in message or "img_size" not in message:  # the size is wrong
            raise
    return create_model(text, mixer, extra=extra, **overrides)


def build_host(
    text: str, mixer: MixerConfig | None, size: tuple[int, int], extra: Extra = (), **overrides: Any
) -> nn.Module:
    """`build_sized`, unless the spelling has a size. Raises: as `create_model`."""
    if parse_host(text)[1].keys() & {"img_size", "size"}:
        return create_model(text, mixer, extra=extra, **overrides)
    return build_sized(text, mixer, size, extra, **overrides)


def further_options(text: str, channels: int, pretrained: bool) -> dict[str, Any]:
    """Options for images of so many channels, unless the spelling has them; pretrained: False takes published weights
    from it."""
    spelled = parse_host(text)[1]
    options: dict[str, Any] = {} if "in_chans" in spelled else {"in_chans": channels}
    return options | ({"pretrained": False} if "pretrained" in spelled and not pretrained else {})


def loads_weights(text: str, pretrained: bool, extra: Extra = ()) -> bool:
    """Whether a spelled host comes with trained weights; of a model of the user's own that is taken for granted."""
    name, options = parse_host(text)
    own = any(getattr(item, "__name__", "") == name for item in extra)
    return pretrained or own or bool(options.get("pretrained") or options.get("checkpoint_path"))


def parse_host(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a spelled host; nothing is evaluated.

    Raises: ConfigError, with the place in the text, if it cannot be read, or an option is given twice.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a host is a name or {_PLAIN}, not {short_repr(text)}")
    if "(" not in text:
        return text.strip(), {}
    name, _, rest = text.strip().partition("(")
    spelled = f"{'_' * max(1, len(name))}({rest}"  # a name may have a colon, a slash or a dot
    call = read_expression(spelled, _PLAIN, text.strip())
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ConfigError(f"cannot read the host {short_repr(text)}: expected {_PLAIN}")
    options = {}
    for keyword in call.keywords:
        try:
            options[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError) as error:
            place = place_of(keyword, spelled, short_repr(text.strip()))
            raise ConfigError(f"cannot read the host: {place} has no plain value; expected {_PLAIN}") from error
    return name.strip(), options


def spell_host(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of `parse_host`. Raises: ConfigError if an option has no spelling, such as a class."""
    parts = []
    for key, value in options.items():
        text = spell(plain_number(value))
        try:
            read_expression(text, "a plain value")
            ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError) as error:  # ConfigError is a ValueError
            raise ConfigError(
                f"option {key}={short_repr(value)} of {name} cannot be spelled; use plain values"
            ) from error
        parts.append(f"{key}={text}")
    return f"{name}({', '.join(parts)})" if parts else name


def check_host(name: str, extra: Extra = ()) -> None:
    """Raises: ConfigError if `name` is neither one of `own_models` nor a model of timm, and has no prefix of a hub."""
    import timm

    exists = ":" in name or name.removeprefix("regard_") in own_models(extra) or timm.is_model(name.partition(".")[0])
    if not exists:
        hint = f"{nearest(name[:100], list_models())}, or run `regard list hosts`"
        kind = "folder or host" if "/" in name else "host"
        raise ConfigError(f"there is no {kind} {short_repr(name)}; {hint}{YOUR_OWN}")


def _create(name: str, options: dict[str, Any], extra: Extra) -> nn.Module:
    import timm

    check_host(name, extra)
    models = own_models(extra)
    plain = name.removeprefix("regard_")  # `register_timm` adds the prefix
    if plain in models:
        make: Callable[..., nn.Module] = partial(make_regard_model, plain, extra)
    else:
        make = partial(timm.create_model, name)
    try:
        _check_options(plain, options)
        return make(**options)
    except RegardError:
        raise
    except OSError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0] or "there is no such file"
        raise StoreError(
            f"cannot load the weights of {name}: {reason}. Load them once with a network, or leave pretrained out"
        ) from error
    except (TypeError, AttributeError, ValueError, ArithmeticError, LookupError, AssertionError, RuntimeError) as error:
        if "weights_only" in str(error):  # PyTorch and timm go on to say how its code would be run
            raise ConfigError(
                f"a file of weights of {name} is a pickle with other things than tensors, and is not opened; save the "
                "state_dict with safetensors where the file can be trusted"
            ) from error
        passed_options = ", ".join(f"{key}={short_repr(value)}" for key, value in options.items())
        accepted = list(inspect.signature(models[plain]).parameters) if plain in models else []
        wrong = [key for key in options if accepted and key not in accepted]
        hint = "".join(f"; it has no {key!r}: {nearest(key, accepted)}" for key in wrong)
        raise ConfigError(
            f"{short_repr(name, 200)[1:-1]} cannot be built with {passed_options or 'its defaults'}: "
            f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}{hint}"
        ) from error


# option -> its least value, whether a fraction is allowed, its largest value
_RANGES: dict[str, tuple[float, bool, float]] = {
    **dict.fromkeys(("size", "img_size", "patch", "patch_size", "dim", "embed_dim"), (1, False, math.inf)),
    **dict.fromkeys(("heads", "num_heads", "in_chans"), (1, False, math.inf)),
    **dict.fromkeys(_DEPTHS, (1, False, 1000)), "num_classes": (0, False, math.inf), "mlp_ratio": (1e-9, True, 1e9),
    **dict.fromkeys(("drop_path_rate", "drop_rate", "proj_drop_rate", "attn_drop_rate"), (0, True, 0.999)),
}  # fmt: skip


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value of a common option that no host can have, such as heads=-2.

    None, letters such as size="s" and other values are left to the host.
    """
    for key in _RANGES.keys() & options.keys():
        least, fraction, most = _RANGES[key]
        value = options[key]
        several = isinstance(value, tuple | list)  # a stage may have no blocks
        if several and key in _DEPTHS:
            least = 0
        for number in value if several else (value,):
            if isinstance(number, bool) or (isinstance(number, float) and not fraction) or number is None:
                valid = number is None
            else:
                valid = not isinstance(number, int | float) or least <= number <= most
            if not valid:
                kind = "a number" if fraction else "a whole number"
                bounds = f"of at least {least}" if most == math.inf else f"between {least} and {most}"
                raise ConfigError(f"{name} cannot be built with {key}={short_repr(value)}: {kind} {bounds} is expected")
