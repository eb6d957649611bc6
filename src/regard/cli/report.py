"""`regard report`: HTML pages of studies. Does not load torch."""

from pathlib import Path
from typing import Annotated

import typer

from regard.files.paths import user_path

from .run_options import ResultsOption, check_results


def report(
    name: Annotated[
        str | None, typer.Argument(help="A study or analysis, or NAME-SCALE. Default: all in the folder.")
    ] = None,
    results: ResultsOption = Path("results"),
    out: Annotated[
        Path, typer.Option(help="The folder for the pages NAME-SCALE.html.", parser=user_path, metavar="PATH")
    ] = Path("reports"),
) -> None:
    """Write one offline HTML page for each study with results, and print the files."""
    from regard.lab.report import write_pages

    check_results(results)
    for page in write_pages(results, out, name):
        typer.echo(f"{page}  ({page.stat().st_size / 1000:.0f} kB)")
