"""The command `regard`: its verbs, its exit codes and its error messages.

Exit codes: 0 done; 1 the work failed (finished parts are kept); 2 wrong use; 130 interrupted.
"""

import re
import sys
import traceback
import warnings
from collections.abc import Sequence

import typer

from regard.core import RegardError
from regard.files.paths import printable_lines

from . import bugs
from .advise import advise
from .bench import bench
from .card import card
from .check import check
from .cost import cost
from .data import data_app
from .distill import distill
from .eval import evaluate
from .exit_codes import INTERRUPTED, MESSAGE
from .explore import explore
from .export import export
from .finetune import finetune
from .given import make_strict
from .list import list_names
from .maps import maps
from .predict import predict
from .probe import probe
from .report import report
from .results import results_app
from .study import study_app
from .swap_check import swap_check
from .taxonomy import taxonomy
from .train import train

TRACEBACK = "--traceback"

app = typer.Typer(
    name="regard",
    help="Attention in vision: every mechanism in every model, compared fairly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> bool:
    if requested:
        from regard import __version__

        print(f"regard {__version__}")
        raise typer.Exit
    return requested


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    show: bool = typer.Option(False, "--traceback", help="Show the traceback of an error; anywhere in a command."),
) -> None:
    pass


NAMES: dict[object, str] = {list_names: "list", evaluate: "eval"}
"""Verbs that are not called as their functions are."""
for verb in (list_names, card, check, taxonomy, cost, bench, swap_check, probe, advise, distill, train, evaluate,
             finetune, predict, export, maps, explore, report):  # fmt: skip
    app.command(NAMES.get(verb, verb.__name__.replace("_", "-")))(verb)
for name, group in (("study", study_app), ("results", results_app), ("data", data_app)):
    app.add_typer(group, name=name)
make_strict(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; messages about errors go to standard error.

    Other exceptions than `RegardError` (bugs, too little memory) are raised; `main` reports them.
    """
    shown = TRACEBACK in arguments
    arguments = [argument for argument in arguments if argument != TRACEBACK]
    try:
        code = app(arguments, standalone_mode=False, prog_name="regard")
        sys.stdout.flush()
        if code == INTERRUPTED:  # newer versions of the parser turn Ctrl-C into an exit code
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        print(MESSAGE, file=sys.stderr)
        return INTERRUPTED
    except RegardError as error:
        if shown:
            traceback.print_exception(error)
        print(f"regard: {printable_lines(_with_options(str(error)))}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, NotImplementedError, ImportError)) else 1
    except Exception as error:
        # an error of the parser: an unknown verb or option, a missing argument
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


def _with_options(message: str) -> str:
    """The message with fields of the task written as options, `--set task.init=host` for init="host", and without the
    middle of words that no screen holds."""
    message = re.sub(r"(\S{100})\S{800,}(\S{100})", r"\1 ... \2", message)
    return re.sub(r"""\b(init|corrupt)=(["'])(zero|fan_in|host|skip|stop)\2""", r"--set task.\1=\3", message)


def main(interrupts: Sequence[int] = ()) -> int:
    """Run the command line of `sys.argv` and return its exit code; a bug is reported in one line.

    interrupts: grows with each Ctrl-C. An error that follows one is its consequence: libraries turn it into other
    errors while they are imported.
    """
    arguments = sys.argv[1:]
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")  # `regard data check` counts such images
    try:
        return run(arguments)
    except Exception as error:
        if interrupts:
            print(MESSAGE, file=sys.stderr)
            return INTERRUPTED
        print(f"regard: {bugs.report(error, arguments, shown=TRACEBACK in arguments)}", file=sys.stderr)
        return 1
