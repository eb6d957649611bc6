"""`regard report`: the HTML pages of finished studies. Needs no torch."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    name: Annotated[
        str | None, typer.Argument(help="A study or analysis, or NAME-SCALE; all studies in the folder if left out.")
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder with the results.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The folder to write NAME-SCALE.html to.")] = Path("reports"),
) -> None:
    """Write one offline HTML page for each study that has results, and print where they are."""
    from regard.report import write_pages

    for page in write_pages(results, out, name):
        typer.echo(f"{page}  ({page.stat().st_size / 1000:.0f} kB)")
