"""Which options a user gave: one without effect, given twice or empty is refused, and not ignored."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from regard.core import ConfigError

if TYPE_CHECKING:
    Context = typer.Context
else:
    Context = typer.Context.__base__  # what typer passes is not of its own class


def expand_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as the parser reads it: a parameter that is a dataclass becomes an option for each of its fields.

    A field is annotated as the parameter of a verb is, `Annotated[int, typer.Option(...)] = 0`.
    """
    parameters = inspect.signature(verb).parameters.values()
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation for parameter in parameters if is_dataclass(parameter.annotation)
    }
    options = []
    for parameter in parameters:
        if parameter.name in groups:
            options += [
                inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
                for field in fields(groups[parameter.name])
            ]
        else:
            options.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    def command(**values: Any) -> None:
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        verb(**built, **values)

    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    return command


def given_options(context: Context, names: Sequence[str]) -> list[str]:
    """Those of the parameters of a verb that the user gave, as options: "--data-root"."""
    sources = ((name, context.get_parameter_source(name)) for name in names)
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    return [flags[name] for name, source in sources if source is not None and source.name != "DEFAULT"]


def refuse_given(context: Context, names: Sequence[str], reason: str) -> None:
    """names: of parameters of the verb. Raises: ConfigError "--NAME REASON" for the first that the user gave."""
    for option in given_options(context, names):
        raise ConfigError(f"{option} {reason}")


class StrictCommand(TyperCommand):
    """A verb that refuses an option given twice, of which the parser would take the last silently, and an empty value,
    such as that of an unset variable; its help has the names of arguments in capitals, as in `regard eval RUN`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None and parameter.name:
                parameter.metavar = parameter.name.upper()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Without the braces of newer parsers around required arguments, which look like places not filled in."""
        return [re.sub(r"\{(.*?)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in the base class. Raises: ConfigError."""
        if not ctx.resilient_parsing:  # as while a shell completes a command
            values, _, options = self.make_parser(ctx).parse_args(args=list(args))
            for option, number in Counter(options).items():
                is_option = option.param_type_name == "option"
                name, value = option.opts[0] if is_option else option.metavar, values[option.name]
                if is_option and number > 1 and not option.multiple and not option.is_eager:
                    raise ConfigError(f"{name} is given {number} times; give it once")
                texts = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(text, str) and not text.strip() for text in texts):
                    raise ConfigError(f"{name} is empty; give a value, or leave it out")
        return super().parse_args(ctx, args)


def make_strict(app: typer.Typer) -> None:
    """Make every verb of the command line, also in groups, a `StrictCommand`."""
    for verb in app.registered_commands:
        verb.cls = StrictCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            make_strict(group.typer_instance)
