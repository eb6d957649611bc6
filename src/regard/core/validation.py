"""The door of every configuration: values of the kinds that the annotations of its fields name.

A number of the wrong kind would pass a comparison with 1 and end far away in a torch error, or in a cost that is no
whole number.
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
    """holds: whether a value is right. expected: in words what is. options: the values of a field that lists them."""

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
    """Compare the fields of a dataclass with their annotations; kinds that are not known here pass.

    Raises: ConfigError that names the first field which does not fit, such as "MiTA has k=2.5; a whole number is
    expected".
    """
    for name, rule in _rules(type(config)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(config, name)
        if rule.holds(value):
            continue
        who = type(config).__name__
        if not rule.options:
            raise ConfigError(f"{who} has {name}={value!r}; {rule.expected} is expected")
        close = nearest(str(value), map(str, rule.options))
        hint = f"; {close}" if close.startswith("did") else ""
        raise ConfigError(f"{who} has no {name}={value!r}: {name} is {rule.expected}{hint}")


@functools.cache
def _rules(cls: type) -> tuple[tuple[str, Rule], ...]:
    """Name and rule of every field that has one."""
    try:
        kinds = typing.get_type_hints(cls)
    except NameError:  # a user's annotation that only type checkers can read
        kinds = {}
    found = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = kinds.get(field.name)
        rule = None if kind is None else _rule(kind)
        if rule is None:
            continue
        if (kind is str or dataclasses.is_dataclass(kind)) and field.default not in ("", dataclasses.MISSING):
            rule = rule._replace(expected=f"{rule.expected} such as {field.default!r}")
        found.append((field.name, rule))
    return tuple(found)


def _rule(kind: Any) -> Rule | None:
    """The rule of an annotation, None if anything may stand there."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        words = [repr(option) if option == "" else str(option) for option in inner]
        return Rule(lambda value: any(type(value) is type(o) and value == o for o in inner), _either(words), inner)
    if origin in (typing.Union, types.UnionType):
        return _any_of([_rule(part) for part in inner])
    if origin is tuple:
        return _row([_rule(part) for part in inner if part is not ...], inner[-1:] == (...,))
    cls = origin or kind
    try:
        isinstance(None, cls)
    except TypeError:  # Any, a protocol, a type variable: nothing that can be asked
        return None
    return Rule(lambda value: isinstance(value, cls), f"a {cls.__name__}")


def _any_of(rules: list[Rule | None]) -> Rule | None:
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None
    words = [word for rule in known for word in (map(repr, rule.options) if rule.options else [rule.expected])]
    return Rule(lambda value: any(rule.holds(value) for rule in known), _either(words))


def _row(rules: list[Rule | None], endless: bool) -> Rule:
    """A tuple with one rule an entry; endless: any number of entries, all of the first kind."""

    def holds(value: Any) -> bool:
        if not isinstance(value, tuple):
            return False
        each = rules * len(value) if endless else rules
        return len(value) == len(each) and all(
            rule is None or rule.holds(entry) for rule, entry in zip(each, value, strict=True)
        )

    words = ["anything" if rule is None else rule.expected for rule in rules]
    return Rule(holds, f"({', '.join([*words, '...'] if endless else words)})")


def _either(words: Iterable[str]) -> str:
    """ "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
