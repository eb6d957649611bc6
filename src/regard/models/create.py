"""Models by name: `create_model`, and the spelling of a model with its options."""

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from regard.core import ConfigError, Extra, MixerConfig, RegardError, StoreError, nearest
from regard.mixers.spelling import YOUR_OWN, spell
from regard.swapping.swap import plan_swap

from .catalog import list_models, make_regard_model, own_models, user_ports


def create_model(name: str, mixer: MixerConfig | None, *, extra: Extra = (), **timm_options: Any) -> nn.Module:
    """A host with a mechanism; mixer=None keeps the host's own attention.

    name: of timm or one of Regard's (see `list_models`), or a spelling with options, "vit_desk(dim=48, depth=2)".
    extra: the user's own models and ports; a model has the name of its function or class.
    timm_options: passed to `timm.create_model` unchanged: num_classes, in_chans, img_size, pretrained, features_only.
    Raises: ConfigError for an unknown name or option, StoreError for weights that cannot be loaded.
    """
    plain, options = parse_host(name)
    options |= timm_options
    model = _create(plain, options, extra)
    model.regard_host = (plain, options)  # type: ignore[assignment]
    model.regard_extra = tuple(extra)  # type: ignore[assignment]  # `save` builds the model again
    if mixer is None:
        return model
    plan = plan_swap(model, mixer, ports=user_ports(extra))
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


def parse_host(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a spelled host; nothing is evaluated. Raises: ConfigError if it cannot be read."""
    if "(" not in text:
        return text.strip(), {}
    name, _, rest = text.strip().partition("(")
    try:
        call = ast.parse(f"host({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return name.strip(), {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"cannot read the host {text!r}: expected name(option=value, ...) with plain values"
        ) from error


def spell_host(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of `parse_host`. Raises: ConfigError if an option has no spelling, such as a class."""
    parts = []
    for key, value in options.items():
        text = spell(value)
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise ConfigError(f"option {key}={value!r} of {name} cannot be spelled; use plain values") from error
        parts.append(f"{key}={text}")
    return f"{name}({', '.join(parts)})" if parts else name


def check_host(name: str, extra: Extra = ()) -> None:
    """Raises: ConfigError if `name` is neither one of `own_models` nor a model of timm, and has no prefix of a hub."""
    import timm

    exists = ":" in name or name.removeprefix("regard_") in own_models(extra) or timm.is_model(name.partition(".")[0])
    if not exists:
        hint = f"{nearest(name, list_models())}, or run `regard list hosts`"
        raise ConfigError(f"there is no host {name!r}; {hint}{YOUR_OWN}")


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
        return make(**options)
    except RegardError:
        raise
    except OSError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise StoreError(
            f"cannot load the weights of {name}: {reason}. Load them once with a network, or leave pretrained out"
        ) from error
    except (TypeError, AttributeError, ValueError, ArithmeticError, LookupError, AssertionError, RuntimeError) as error:
        passed_options = ", ".join(f"{key}={value!r}" for key, value in options.items())
        accepted = list(inspect.signature(models[plain]).parameters) if plain in models else []
        wrong = [key for key in options if accepted and key not in accepted]
        hint = "".join(f"; it has no {key!r}: {nearest(key, accepted)}" for key in wrong)
        raise ConfigError(
            f"{name} cannot be built with {passed_options or 'its defaults'}: {error or type(error).__name__}{hint}"
        ) from error
