"""One spelling for Python, the command line and files: `MiTA(m=25, k=25, projection=FSNE(code=8))`."""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from regard.core import ConfigError, Extra, MixerConfig, nearest
from regard.core.validation import short_repr
from regard.projections import PROJECTIONS

from . import MIXERS

YOUR_OWN = "; for your own, name its module with --import (in Python: extra=[...])"
"""What an error about an unknown name adds."""


def spell(value: Any) -> str:
    """A configuration as the shortest Python expression that builds it; fields at their defaults are omitted.

    So are fields with the metadata {"spelled": False}, which say where files are.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        if isinstance(value, (tuple, list)):
            inner = ", ".join(spell(item) for item in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return repr(value)
    arguments = []
    for field in dataclasses.fields(value):
        if not field.metadata.get("spelled", True):
            continue
        present = getattr(value, field.name)
        if present != _default(field):
            arguments.append(f"{field.name}={spell(present)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def parse(text: str, extra: Extra = ()) -> Any:
    """Read what `spell` writes; nothing is evaluated. A bare name such as `Softmax` means `Softmax()`.

    extra: the user's own; its dataclasses, such as a mechanism or a task, may be named.
    Raises: ConfigError for a text that is no configuration, an unknown name or field (with the nearest ones), a wrong
    value, a field given twice, or anything but literals, with its place in the text.
    """
    extra_classes: list[type] = [item for item in extra if isinstance(item, type) and dataclasses.is_dataclass(item)]
    classes: dict[str, type] = {cls.__name__: cls for cls in (*MIXERS, *PROJECTIONS, *extra_classes)}
    tree = read_expression(text, "a spelling such as MiTA(m=25, k=25)")
    value = _value(ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree, classes, text)
    if not dataclasses.is_dataclass(value):
        raise ConfigError(f"{short_repr(text)} is no configuration; expected a spelling such as MiTA(m=25, k=25)")
    return value


def parse_mixer(text: str, extra: Extra = ()) -> MixerConfig | None:
    """`parse`, where the result must be a mechanism; "None" is no mixer at all. Raises: ConfigError."""
    value = None if isinstance(text, str) and text.strip() == "None" else parse(text, extra)
    if value is not None and not isinstance(value, MixerConfig):
        raise ConfigError(f"{short_repr(text)} is not a mechanism; known: {', '.join(cls.__name__ for cls in MIXERS)}")
    if value is None and text.strip() != "None":
        raise ConfigError(f"{short_repr(text)} is not a mechanism; no mixer at all is None")
    return value


def read_expression(text: str, expected: str, named: str = "") -> ast.expr:
    """The syntax tree of one expression; nothing is evaluated. expected: what it is, for the message.

    named: the text that messages show, where another of the same length is read.
    Raises: ConfigError, with the place in the text, if it is no string or no expression, or gives a keyword twice.
    """
    if not isinstance(text, str):
        raise ConfigError(f"cannot read {short_repr(text)}: expected {expected}, as a string")
    text, named = text.strip(), short_repr(named or text)
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        quoted = ', and digits such as "0110" stand in quotes' if "leading zeros" in str(error) else ""
        place = f" at character {error.offset}" if error.offset and error.lineno in (None, 1) else ""
        raise ConfigError(f"cannot read {named}{place}: expected {expected}{quoted}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a number of thousands of digits, a null, many brackets
        raise ConfigError(f"cannot read {named}: {error}; expected {expected}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _refuse_twice(node, text, named)
    return tree


def place_of(node: ast.AST, text: str, named: str = "") -> str:
    """ "'dim=4' at character 6 of 'vit(dim=4)'": a part of a text that `read_expression` has read, for messages."""
    source, named = text.strip(), named or short_repr(text)
    if getattr(node, "lineno", 0) != 1 or not hasattr(node, "col_offset"):
        return f"a part of {named}"
    start = len(source.encode()[: node.col_offset].decode(errors="ignore"))
    return f"{short_repr(ast.get_source_segment(source, node))[1:-1]} at character {start + 1} of {named}"


def _refuse_twice(call: ast.Call, text: str, named: str) -> None:
    """Raises ConfigError if a keyword stands twice in a call, or values stand in **."""
    names = set()
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in names:
            problem = "** is not allowed" if keyword.arg is None else f"{short_repr(keyword.arg)} is given twice"
            raise ConfigError(f"cannot read {place_of(keyword, text, named)}: {problem}")
        names.add(keyword.arg)


def parts(config: object) -> Iterator[object]:
    """A configuration and those in its fields."""
    if dataclasses.is_dataclass(config):
        yield config
        for item in dataclasses.fields(config):
            yield from parts(getattr(config, item.name))


def _value(node: ast.AST, classes: dict[str, type], text: str) -> Any:
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name):
            raise ConfigError(f"cannot read {place_of(node.func, text)}: it is no name of a mechanism or a projection")
        return _build(node.func.id, node, classes, text)
    if isinstance(node, ast.Name) and node.id in classes:
        return _build(node.id, ast.Call(node, [], []), classes, text)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, classes, text) for item in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        try:
            pairs = zip(node.keys, node.values, strict=True)
            return {_value(k, classes, text): _value(v, classes, text) for k, v in pairs if k is not None}
        except TypeError as error:
            raise ConfigError(f"cannot read {place_of(node, text)}: {error}") from error
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(node, ast.Name):
            unknown = f"unknown name {short_repr(node.id)} in {short_repr(text)}"
            raise ConfigError(f"{unknown}; {nearest(node.id[:100], classes)}{YOUR_OWN}") from error
        raise ConfigError(f"cannot read {place_of(node, text)}: only names and literals are allowed") from error


def _build(name: str, node: ast.Call, classes: dict[str, type], text: str) -> Any:
    if name not in classes:
        hint = f"{nearest(name[:100], classes)}{YOUR_OWN}"
        raise ConfigError(f"unknown name {short_repr(name)} in {short_repr(text)}; {hint}")
    cls = classes[name]
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    for keyword in node.keywords:
        if keyword.arg not in fields:
            raise ConfigError(f"{name} has no {short_repr(keyword.arg)}; it has {', '.join(fields)}")
    values = {str(keyword.arg): _value(keyword.value, classes, text) for keyword in node.keywords}
    positional = [_value(item, classes, text) for item in node.args]
    try:
        return cls(*positional, **values)
    except TypeError as error:
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        expected = ", ".join(f"{label}: {_name_of(kinds[label])}" for label in values)
        expected = f"; expected {expected}" if expected else ""
        raise ConfigError(f"cannot build {short_repr(ast.unparse(node))}: {error}{expected}") from error


def _name_of(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__ if isinstance(kind, type) else str(kind)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
