"""One spelling for Python, the command line and files: `MiTA(m=25, k=25, projection=FSNE(code=8))`."""

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from regard.core import ConfigError, Extra, MixerConfig, nearest
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


def parse(text: str, extra: Extra = (), revisions: Mapping[str, int] | None = None) -> Any:
    """Read what `spell` writes; nothing is evaluated. A bare name such as `Softmax` means `Softmax()`.

    extra: the user's own; its dataclasses, such as a mechanism or a task, may be named. revisions: the revision of each
    class when an older version wrote the text (`MixerConfig.older_revisions`); classes that are not listed are today's.
    Raises: ConfigError for an unknown name or field (with the nearest ones), a wrong value, or anything but literals.
    """
    extra_classes: list[type] = [item for item in extra if isinstance(item, type) and dataclasses.is_dataclass(item)]
    classes: dict[str, type] = {cls.__name__: cls for cls in (*MIXERS, *PROJECTIONS, *extra_classes)}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        quoted = ', and digits such as "0110" stand in quotes' if "leading zeros" in str(error) else ""
        raise ConfigError(f"cannot read {text!r}: expected a spelling such as MiTA(m=25, k=25){quoted}") from error
    _add_fields(tree, classes, revisions or {})
    return _value(ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree, classes, text)


def parse_mixer(text: str, extra: Extra = (), revisions: Mapping[str, int] | None = None) -> MixerConfig | None:
    """`parse`, where the result must be a mechanism; "None" is no mixer at all. Raises: ConfigError."""
    value = parse(text, extra, revisions) if text.strip() != "None" else None
    if value is not None and not isinstance(value, MixerConfig):
        raise ConfigError(f"{text!r} is not a mechanism; known: {', '.join(cls.__name__ for cls in MIXERS)}")
    return value


def parts(config: object) -> Iterator[object]:
    """A configuration and those in its fields."""
    if dataclasses.is_dataclass(config):
        yield config
        for item in dataclasses.fields(config):
            yield from parts(getattr(config, item.name))


def previous_revisions(extra: Extra = ()) -> dict[str, int]:
    """The revision before today's of every mechanism whose spelling has changed its meaning, for `parse`."""
    classes: list[type] = [*MIXERS, *(item for item in extra if isinstance(item, type))]
    return {cls.__name__: max(older) for cls in classes if (older := getattr(cls, "older_revisions", {}))}


def _add_fields(tree: ast.AST, classes: Mapping[str, type], revisions: Mapping[str, int]) -> None:
    """Write into the tree, in place, the fields that texts of these revisions leave out."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in revisions):
            continue
        present = {keyword.arg for keyword in node.keywords}
        for revision, fields in getattr(classes.get(node.func.id), "older_revisions", {}).items():
            if revisions[node.func.id] <= revision:
                missing = [(field, value) for field, value in fields.items() if field not in present]
                node.keywords += [ast.keyword(field, ast.Constant(value)) for field, value in missing]


def _value(node: ast.AST, classes: dict[str, type], text: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _build(node.func.id, node, classes, text)
    if isinstance(node, ast.Name) and node.id in classes:
        return _build(node.id, ast.Call(node, [], []), classes, text)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, classes, text) for item in node.elts)
    if isinstance(node, ast.Dict):
        keys = [_value(key, classes, text) for key in node.keys if key is not None]
        return dict(zip(keys, (_value(item, classes, text) for item in node.values), strict=True))
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        if isinstance(node, ast.Name):
            raise ConfigError(f"unknown name {node.id!r} in {text!r}; {nearest(node.id, classes)}{YOUR_OWN}") from error
        raise ConfigError(
            f"cannot read {ast.unparse(node)!r} in {text!r}: only names and literals are allowed"
        ) from error


def _build(name: str, node: ast.Call, classes: dict[str, type], text: str) -> Any:
    if name not in classes:
        raise ConfigError(f"unknown name {name!r} in {text!r}; {nearest(name, classes)}{YOUR_OWN}")
    cls = classes[name]
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    for keyword in node.keywords:
        if keyword.arg not in fields:
            raise ConfigError(f"{name} has no {keyword.arg!r}; it has {', '.join(fields)}")
    values = {str(keyword.arg): _value(keyword.value, classes, text) for keyword in node.keywords}
    try:
        return cls(*(_value(item, classes, text) for item in node.args), **values)
    except TypeError as error:
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        expected = ", ".join(f"{label}: {_name_of(kinds[label])}" for label in values)
        raise ConfigError(
            f"cannot build {ast.unparse(node)}: {error}" + (f"; expected {expected}" if expected else "")
        ) from error


def _name_of(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__ if isinstance(kind, type) else str(kind)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
