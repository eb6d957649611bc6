"""`regard data`: the user's own data, checked before training."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from regard.core import DataProblems
from regard.files.paths import printable
from regard.pages.phrasing import count

from .run_options import path_option
from .tables import AsJson, show

data_app = typer.Typer(help="Your own data.", no_args_is_help=True)

SHOWN = 20
"""Problems and warnings that are printed; --json has all."""


@data_app.callback()
def _data() -> None:
    pass


@data_app.command("check")
def check(
    data: Annotated[str, typer.Argument(help="A folder, a table or a stream: as for --data of `regard train`.")],
    task: Annotated[str, typer.Option("--task", help="The task. Default: recognised from the files.")] = "",
    source: Annotated[
        str | None, typer.Option(help="Suffix of the source language's files; for translation. [default: en]")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Suffix of the target language's files; for translation. [default: de]")
    ] = None,
    void: Annotated[
        int | None,
        typer.Option(min=0, max=255, help="Label of mask pixels that do not count; for segmentation. [default: 255]"),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=0, help="Number of classes of masks; for segmentation. Default: from the files.")
    ] = None,
    exif: Annotated[
        str | None,
        typer.Option(help="keep: pictures as they are stored; turn: as EXIF says. Default: as they were annotated."),
    ] = None,
    fix: Annotated[
        Path | None,
        path_option("Write a clean copy to this new folder: one layout, upright, without unreadable files.", "OUT"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read all files of your own data: counts, sizes, modes, unreadable files, copies in several splits.

    With --fix those of the copy. Exit code 1 if there are problems that would stop a training, 2 if the data cannot be
    read at all.
    """
    from regard.lab.tasks.check_data import check_data
    from regard.lab.tasks.clean_copy import write_clean_copy
    from regard.lab.tasks.data_report import DataReport

    if fix is not None:
        lines = write_clean_copy(data, fix, task, void, classes, exif)
        print("\n".join(map(printable, lines[: SHOWN + 1])), file=sys.stderr)
        data, task, void, classes, exif = str(fix), task, None, None, None
    try:
        report = check_data(data, task, source, target, void, classes, exif)
    except DataProblems as error:
        report = DataReport("its files do not fit together", problems=list(map(str, error.args)))
    if as_json:
        print(json.dumps(asdict(report), indent=1))
    else:
        notes = []
        for kind, found in (("problem", report.problems), ("warning", report.warnings)):
            notes += [f"{kind}: {text}" for text in found[:SHOWN]]
            notes += [f"{len(found) - SHOWN} further {kind}s; --json has all"] if len(found) > SHOWN else []
        show(report.rows, title=f"{data}: {report.kind}", notes=[*(notes or ["no problems"]), *report.hints])
    if report.problems:
        number = count(len(report.problems), "problem")
        print(f"regard: {number} would stop a training, the first: {printable(report.problems[0])}", file=sys.stderr)
        raise typer.Exit(1)
