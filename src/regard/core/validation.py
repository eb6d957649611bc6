"""Validation of configurations: the value of every field has a type that its annotation allows.

Otherwise k=2.5 would pass the check k >= 1 and fail much later with an error of torch, or give a cost that is not
a whole number.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from .errors import ConfigError, nearest


class Rule(NamedTuple):
    """holds: whether a value is valid. expected: the valid values in words. options: the values of a Literal."""

    holds: Callable[[Any], bool]
    expected: str
    options: tuple[Any, ...] = ()


_PLAIN: dict[Any, Rule] = {
    int: Rule(lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    float: Rule(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        "a finite number",
    ),
    bool: Rule(lambda value: isinstance(value, bool), "True or False"),
    str: Rule(lambda value: isinstance(value, str), "a string"),
    type(None): Rule(lambda value: value is None, "None"),
}


def check_fields(config: object) -> None:
    """Compare the fields of a dataclass with their annotations; annotations without a rule allow any value.

    Raises: ConfigError that names the first field which does not fit, such as "MiTA has k=2.5; a whole number is
    expected".
    """
    for name, rule in _rules(type(config)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(config, name)
        if rule.holds(value):
            continue
        cls = type(config).__name__
        if not rule.options:
            raise ConfigError(f"{cls} has {name}={value!r}; {rule.expected} is expected")
        close = nearest(str(value), map(str, rule.options))
        hint = f"; {close}" if close.startswith("did") else ""
        raise ConfigError(f"{cls} has no {name}={value!r}: {name} is {rule.expected}{hint}")


@functools.cache
def _rules(cls: type) -> tuple[tuple[str, Rule], ...]:
    """Name and rule of every field that has one."""
    try:
        kinds = typing.get_type_hints(cls)
    except NameError:  # a user's annotation that only type checkers can read
        kinds = {}
    rules = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = kinds.get(field.name)
        rule = None if kind is None else _rule(kind)
        if rule is None:
            continue
        if (kind is str or dataclasses.is_dataclass(kind)) and field.default not in ("", dataclasses.MISSING):
            rule = rule._replace(expected=f"{rule.expected} such as {field.default!r}")
        rules.append((field.name, rule))
    return tuple(rules)


def _rule(kind: Any) -> Rule | None:
    """The rule of an annotation, None if it allows any value."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        names = [repr(option) if option == "" else str(option) for option in args]
        return Rule(lambda value: any(type(value) is type(o) and value == o for o in args), _either(names), args)
    if origin in (typing.Union, types.UnionType):
        return _any_of([_rule(arg) for arg in args])
    if origin is tuple:
        return _tuple_of([_rule(arg) for arg in args if arg is not ...], args[-1:] == (...,))
    cls = origin or kind
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


def _either(names: Iterable[str]) -> str:
    """ "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
