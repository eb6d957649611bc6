"""`regard report`: HTML pages of studies. Does not load torch."""

from pathlib import Path
from typing import Annotated

import typer

from .run_options import ResultsOption, check_results, path_option


def report(
    name: Annotated[
        str | None, typer.Argument(help="A study or analysis, or NAME-SCALE. Default: all in the folder.")
    ] = None,
    results: ResultsOption = Path("results"),
    out: Annotated[Path, path_option("The folder for the pages NAME-SCALE.html.")] = Path("reports"),
) -> None:
    """Write one offline HTML page for each study with results, and print the files."""
    from regard.lab.report import write_pages

    check_results(results)
    for page in write_pages(results, out, name):
        typer.echo(f"{page}  ({page.stat().st_size / 1000:.0f} kB)")
