"""Validation of configurations and arguments: every value has a type that its annotation allows.

Otherwise k=2.5 would pass the check k >= 1 and fail much later with an error of torch, or give a cost that is not
a whole number. Needs no torch.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import ConfigError, RegardError, nearest


class Rule(NamedTuple):
    """holds: whether a value is valid. expected: the valid values in words. options: the values of a Literal."""

    holds: Callable[[Any], bool]
    expected: str
    options: tuple[Any, ...] = ()


Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST_NUMBER = 1e18
"""The square of a larger number is infinite in float32, and so are logits and gradients with such a factor."""


def is_whole(value: object) -> bool:
    """Whether a value is an integer of Python, other than True and False."""
    return isinstance(value, int) and not isinstance(value, bool)


_PLAIN: dict[Any, Rule] = {
    int: Rule(is_whole, "a whole number"),
    float: Rule(
        lambda value: (is_whole(value) or isinstance(value, float)) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER,
        "a finite number",
    ),
    bool: Rule(lambda value: isinstance(value, bool), "True or False"),
    str: Rule(lambda value: isinstance(value, str), "a string"),
    type(None): Rule(lambda value: value is None, "None"),
}


def plain_number(value: Any) -> Any:
    """A number of NumPy, or a tuple of such, as the number of Python that it equals; other values unchanged."""
    cls = type(value)
    if cls.__module__ == "numpy" and (isinstance(value, numbers.Number) or cls.__name__ in ("bool", "bool_")):
        return value.item()
    if type(value) is tuple:
        return tuple(map(plain_number, value))
    return value


def as_float(value: object, example: object) -> object:
    """A whole number as a float where the example is one: both spell the same, and so have the same key."""
    return float(value) if isinstance(example, float) and type(value) is int else value


def check_fields(config: object, error: type[RegardError] = ConfigError) -> None:
    """Compare the fields of a dataclass with their annotations; annotations without a rule allow any value.

    Numbers of NumPy become Python's, and a list becomes a tuple where one is expected. A field's metadata may have the
    bounds "least" and "most" of its numbers.
    Raises: ConfigError, or the error passed, that names the first field which does not fit, such as "MiTA has k=2.5; a
    whole number is expected".
    """
    for name, rule in _rules(type(config)):  # type: ignore[arg-type]  # classes are hashable
        given = getattr(config, name)
        value = _plain(given, rule)
        if value is not given:
            object.__setattr__(config, name, value)
        if rule.holds(value):
            continue
        cls = type(config).__name__
        if not rule.options:
            raise error(f"{cls} has {name}={short_repr(value)}; {rule.expected} is expected{_size_hint(value)}")
        close = nearest(str(value), map(str, rule.options)) if isinstance(value, str) and len(value) < 100 else ""
        hint = f"; {close}" if close.startswith("did") else ""
        raise error(f"{cls} has no {name}={short_repr(value)}: {name} is {rule.expected}{hint}")


_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_arguments(function: Function) -> Function:
    """A function whose arguments are compared with its annotations before it runs, as `check_fields` does for fields.

    Raises: ConfigError, such as "bench: dim is '16'; a whole number is expected".
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for label, rule in _argument_rules(function).items():
            if label not in bound.arguments or signature.parameters[label].kind in _SEVERAL:
                continue
            value = _plain(bound.arguments[label], rule)
            if not rule.holds(value):
                raise ConfigError(
                    f"{name}: {label} is {short_repr(value)}; {rule.expected} is expected{_size_hint(value)}"
                )
            bound.arguments[label] = value
        return function(*bound.args, **bound.kwargs)

    return typing.cast(Function, wrapper)


@functools.cache
def _argument_rules(function: Callable[..., Any]) -> dict[str, Rule]:
    rules = {name: field_rule(kind) for name, kind in _hints(function).items() if name != "return"}
    return {name: rule for name, rule in rules.items() if rule is not None}


def _plain(given: Any, rule: Rule) -> Any:
    """A value with numbers of NumPy as Python's, and a list as a tuple where one is expected."""
    value = plain_number(given)
    is_tuple = isinstance(value, list) and not rule.holds(value) and rule.holds(tuple(value))
    return tuple(value) if is_tuple else value


def short_repr(value: object, length: int = 80) -> str:
    """`repr` of a value of a user for a message: one line, not longer than `length`, without lone surrogates."""
    cut = value[:length] if isinstance(value, str | bytes) else value
    text = " ".join(repr(cut).split())
    if cut is not value and len(cut) < len(value):  # type: ignore[arg-type]
        return f"{text}... ({len(value)} characters)"  # type: ignore[arg-type]
    return text if len(text) <= 2 * length else f"{text[: 2 * length]}..."


def _size_hint(value: object) -> str:
    """What is wrong with a number that is too large: its kind is right."""
    if isinstance(value, float) and LARGEST_NUMBER < abs(value) < math.inf:
        return f" between -{LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}"
    return ""


@functools.cache
def _rules(cls: type) -> tuple[tuple[str, Rule], ...]:
    """Name and rule of every field that has one."""
    kinds = _hints(cls)
    rules = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = kinds.get(field.name)
        rule = None if kind is None else field_rule(kind)
        if rule is None:
            continue
        rule = _with_bounds(rule, field.metadata.get("least"), field.metadata.get("most"))
        if (kind is str or dataclasses.is_dataclass(kind)) and field.default not in ("", dataclasses.MISSING):
            rule = rule._replace(expected=f"{rule.expected} such as {field.default!r}")
        rules.append((field.name, rule))
    return tuple(rules)


def _hints(owner: Any) -> dict[str, Any]:
    """Annotations of a class or function by name; what only type checkers can read is Any."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(owner, localns=unknown or None)
        except NameError as error:
            if not error.name or error.name in unknown:
                return {}
            unknown[error.name] = Any
        except (AttributeError, TypeError):  # a part of an unknown module
            return {}


def _with_bounds(rule: Rule, least: int | float | None, most: int | float | None) -> Rule:
    """The rule for numbers between two bounds, None for no bound; other values, such as None, have no bounds."""
    if least is None and most is None:
        return rule
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    words = " and ".join(f"at {word} {n}" for word, n in (("least", least), ("most", most)) if n is not None)
    return rule._replace(
        holds=lambda value: rule.holds(value) and (not isinstance(value, int | float) or low <= value <= high),
        expected=f"{rule.expected}, {words},",
    )


def field_rule(kind: Any) -> Rule | None:
    """The rule of an annotation, None if it allows any value."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        names = [repr(option) if option == "" else str(option) for option in args]
        return Rule(lambda value: any(type(value) is type(o) and value == o for o in args), _either(names), args)
    if origin in (typing.Union, types.UnionType):
        return _any_of([field_rule(arg) for arg in args])
    if origin is tuple:
        return _tuple_of([field_rule(arg) for arg in args if arg is not ...], args[-1:] == (...,))
    cls = origin or kind
    if cls in (Sequence, Mapping) and args:
        return _collection_of(cls, [field_rule(arg) for arg in args])
    try:
        isinstance(None, cls)
    except TypeError:  # Any, a protocol or a type variable, which isinstance does not take
        return None
    return Rule(lambda value: isinstance(value, cls), f"a {cls.__name__}")


def _any_of(rules: list[Rule | None]) -> Rule | None:
    parts = [rule for rule in rules if rule is not None]
    if len(parts) < len(rules):
        return None
    names = [name for rule in parts for name in (map(repr, rule.options) if rule.options else [rule.expected])]
    return Rule(lambda value: any(rule.holds(value) for rule in parts), _either(names))


def _tuple_of(rules: list[Rule | None], repeated: bool) -> Rule:
    """A tuple with one rule per entry; repeated: any number of entries, all with the first rule."""

    def holds(value: Any) -> bool:
        if not isinstance(value, tuple):
            return False
        entries = rules * len(value) if repeated else rules
        return len(value) == len(entries) and all(
            rule is None or rule.holds(entry) for rule, entry in zip(entries, value, strict=True)
        )

    names = ["anything" if rule is None else rule.expected for rule in rules]
    return Rule(holds, f"({', '.join([*names, '...'] if repeated else names)})")


def _collection_of(cls: type, rules: list[Rule | None]) -> Rule:
    """A Sequence with a rule for its entries, or a Mapping with rules for its keys and values."""

    def holds(value: Any) -> bool:
        if not isinstance(value, cls) or isinstance(value, str | bytes):
            return False
        parts: Any = (value.keys(), value.values()) if isinstance(value, Mapping) else (value,)
        return all(rule is None or all(map(rule.holds, part)) for rule, part in zip(rules, parts, strict=True))

    words = ["anything" if rule is None else rule.expected for rule in rules]
    return Rule(holds, f"a mapping ({words[0]}: {words[1]})" if cls is Mapping else f"a list (each entry {words[0]})")


def _either(names: Iterable[str]) -> str:
    """ "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
