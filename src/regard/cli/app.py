"""The command `regard`: every verb, and what becomes of errors.

Exit codes: 0 done; 1 the work failed (what was done is kept); 2 wrong use; 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence

import typer

from regard.core import RegardError
from regard.core.allocator import ALLOCATOR

from .advise import advise
from .bench import bench
from .card import card
from .check import check
from .cost import cost
from .finetune import finetune
from .list import list_names
from .maps import maps
from .report import report
from .study import study_app
from .swap_check import swap_check
from .taxonomy import taxonomy
from .train import evaluate, train

INTERRUPTED = 130

app = typer.Typer(
    name="regard",
    help="Attention in vision: every mechanism in every model, compared fairly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> bool:
    if asked:
        from regard import __version__

        print(f"regard {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


app.command("list")(list_names)
app.command("card")(card)
app.command("check")(check)
app.command("taxonomy")(taxonomy)
app.command("cost")(cost)
app.command("bench")(bench)
app.command("swap-check")(swap_check)
app.command("advise")(advise)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("finetune")(finetune)
app.command("maps")(maps)
app.add_typer(study_app, name="study")
app.command("report")(report)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; messages about errors go to standard error."""
    try:
        code = app(list(arguments), standalone_mode=False, prog_name="regard")
        if code == INTERRUPTED:  # newer parsers turn Ctrl-C into an exit code
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        print("regard: interrupted; what was finished is kept", file=sys.stderr)
        return INTERRUPTED
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, NotImplementedError, ImportError)) else 1
    except BrokenPipeError:  # `regard list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # the parser's own errors: an unknown verb or option, a missing argument
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of the `regard` command."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["bench"], ["advise"]):
        _fix_allocator(arguments)
    sys.exit(run(arguments))


def _fix_allocator(arguments: list[str]) -> None:
    """Start again with `ALLOCATOR`, which is read when a process starts."""
    if sys.platform != "linux" or all(name in os.environ for name in ALLOCATOR):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "regard.cli.app", *arguments], os.environ | ALLOCATOR)


if __name__ == "__main__":
    main()
