"""`regard probe`: what a mechanism can do, by small networks on boards that ask for one ability each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra, check_known
from regard.lab.engine.study import MOST_SEEDS
from regard.lab.results.results import Results

from .imports import Imports, imported_items, read_mixer
from .run_options import Download, ResultsOption, RootOption, check_page, path_option, use_data
from .study_display import Display
from .tables import AsJson, show
from .user_model import progress

if TYPE_CHECKING:
    from regard.lab.engine.study import Row
    from regard.lab.studies.probes.profile import Scores
    from regard.lab.studies.probes.run import Probe

ALL = "all"
SCALES = ("desk", "smoke")


def probe(
    mixers: Annotated[
        list[str],
        typer.Argument(
            metavar="MECHANISM", help='Mechanisms, such as "MiTA(m=9, k=9)"; "all": every row of the studies probes_*.'
        ),
    ],
    abilities: Annotated[
        str, typer.Option(help="Only these, separated by commas: content, place, ... Default: all seven.")
    ] = "",
    boards: Annotated[
        str,
        typer.Option(help="boards (of Fashion-MNIST) or digit_boards. Default: boards where there is a data folder."),
    ] = "",
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEEDS, help="Of each run. Default: 2, and 4 of all.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Find where recall by content breaks: more pairs, more tokens.")
    ] = False,
    train_controls: Annotated[
        bool, typer.Option("--train-controls", help="Train the controls here instead of reading their shipped scores.")
    ] = False,
    page: Annotated[Path | None, path_option("Also write an HTML page to this file.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")] = False,
    scale: Annotated[
        str, typer.Option(help="desk (minutes), or smoke: seconds, which only test that it runs.")
    ] = "desk",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes. Default: one for each GPU, or core; 0: none.")
    ] = None,
    results: ResultsOption = Path("results"),
    data_root: RootOption = None,
    download: Download = False,
    as_json: AsJson = False,
    modules: Imports = None,
) -> None:
    """Draw the profile of mechanisms: seven abilities, beside controls. The same command continues what was stopped."""
    if page is not None:
        check_page(page)
        import regard.lab.report.probe_page  # noqa: F401  (a missing extra is said before minutes of training)
    if scale not in SCALES:
        raise ConfigError(f"--scale of probe is {' or '.join(SCALES)}, not {scale!r}")
    if sweep and (abilities or train_controls):
        raise ConfigError("--sweep is about recall by content: leave out --abilities and --train-controls")
    use_data(data_root)
    extra = imported_items(modules)
    everything = mixers == [ALL]
    train_controls = train_controls or everything
    rows, boards, names = _rows(mixers, extra, sweep, train_controls), _boards(boards, download), _abilities(abilities)
    from regard.lab.studies.probes import run as probes
    from regard.lab.studies.probes.study import CONTROLS, SEEDS

    number = seeds or (SEEDS if everything else 2)
    common: dict[str, Any] = {"seeds": number, "scale": scale, "download": download, "extra": extra}
    if sweep:
        planned = probes.sweep_runs(rows, boards, **common)
        _print_hours(planned, results, workers)
    else:
        trained = [row for row in CONTROLS if train_controls and row.mixer not in {other.mixer for other in rows}]
        planned = probes.profile_runs((*trained, *rows), names, boards, **common)
    probes.check_data(planned)
    if everything and boards == "boards" and scale == "desk":
        probes.write_snapshots(Results(results), number)
    counts = _execute(planned, results, workers, retry)
    if sweep:
        _show_sweep(planned, boards, results, page, as_json)
    else:
        chosen = _Shown(planned, [row.label for row in rows], names, boards, results, scale, train_controls)
        _show_profile(chosen, page, as_json)
    failed, missing = counts["failed"], len(planned) - counts["done"] - counts["failed"]
    if failed:
        progress(f"{failed} of {len(planned)} runs failed; --retry repeats them")
    if missing:
        progress(f"{missing} of {len(planned)} runs have not ended; the same command continues them")
    raise typer.Exit(1 if failed or missing else 0)


def _rows(mixers: Sequence[str], extra: Extra, sweep: bool, trained: bool) -> "tuple[Row, ...]":
    """The rows of the user's mechanisms, each once. trained: the controls are trained too, and one of them is named so.

    Raises: ConfigError.
    """
    from regard.lab.engine.study import Row
    from regard.lab.studies.probes.study import CONTROLS, FURTHER, ROWS
    from regard.mixers.spelling import spell

    if ALL in mixers:
        if len(mixers) > 1 or sweep:
            raise ConfigError(f"{ALL} stands alone: leave out the other mechanisms and --sweep")
        return (*ROWS, *FURTHER)
    configs = dict.fromkeys(read_mixer(text, extra) for text in mixers)
    known = {row.mixer: row.label for row in CONTROLS if trained}
    return tuple(Row(known.get(config) or spell(config).removesuffix("()"), config) for config in configs)


def _print_hours(planned: "Sequence[Probe]", results: Path, workers: int | None) -> None:
    from regard.lab.engine.executors.local import usual_workers
    from regard.lab.studies.probes.run import hours

    number = max(usual_workers() if workers is None else workers, 1)
    total = hours(planned, Results(results), number)
    progress(f"{len(planned)} runs, about {total:.1f} hours with {number} workers on this machine")


def _execute(planned: "Sequence[Probe]", results: Path, workers: int | None, retry: bool) -> dict[str, int]:
    """Execute the missing runs; the number of all runs by state."""
    from regard.lab.studies.probes.run import execute

    with Display(", and the same command continues it") as display:
        return execute(planned, Results(results), workers, display.show_event, retry)


def _boards(boards: str, download: bool) -> str:
    """The set of boards: the user's choice, else the one whose images are here. Raises: ConfigError."""
    from regard.lab.data.board_images import garments_here
    from regard.lab.data.boards import NAMES

    if boards:
        check_known(boards, NAMES, f"there are no {boards!r}")
        return boards
    return NAMES[0] if download or garments_here() else NAMES[1]


def _abilities(text: str) -> tuple[str, ...]:
    """The chosen abilities. Raises: ConfigError."""
    from regard.lab.data.boards import PROBED

    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        check_known(name, PROBED, f"there is no ability {name!r}")
    return tuple(name for name in PROBED if not chosen or name in chosen)


@dataclass(frozen=True)
class _Shown:
    """What a profile is drawn of. own: labels of the user's rows; trained: whether the controls were trained here."""

    planned: "Sequence[Probe]"
    own: Sequence[str]
    names: tuple[str, ...]
    boards: str
    results: Path
    scale: str
    trained: bool

    def controls(self, found: "Scores") -> "tuple[Scores, str]":
        """The scores of the controls, and where they are from. Raises: ConfigError; StoreError."""
        from regard.lab.studies.probes.profile import shipped_controls
        from regard.lab.studies.probes.study import protocol

        if self.scale == "smoke":
            return {}, "smoke scale only tests that everything runs: nothing is compared"
        if self.trained:
            return found, f"controls: trained here, on {self.boards}"
        controls = shipped_controls(self.boards, protocol(self.boards))
        return controls, f"controls: shipped scores on {self.boards}; --train-controls trains them here"


def _show_profile(chosen: _Shown, page: Path | None, as_json: bool) -> None:
    from regard.lab.studies.probes.profile import profiles
    from regard.lab.studies.probes.run import scores

    found = scores(chosen.planned, Results(chosen.results))
    controls, note = chosen.controls(found)
    shown = {**{row: values for row, values in controls.items() if values and row not in found}, **found}
    cells = profiles(shown, controls, chosen.names)
    if as_json:
        named = {row: {name: of[name] for name in chosen.names if name in of} for row, of in shown.items()}
        value = {"boards": chosen.boards, "abilities": chosen.names, "controls": note, "scores": named}
        print(json.dumps(value, indent=2))
    else:
        lines = [
            {"mechanism": row, **{name: str(of_row[name]) for name in chosen.names}} for row, of_row in cells.items()
        ]
        title = f"Asking cells answered right, in percent ({chosen.boards})"
        mixed = [cell for of_row in cells.values() for cell in of_row.values() if cell.mixed]
        some = [f"{mixed[0]}: only so many seeds learned, and the mean is theirs; see docs/probes.md"] if mixed else []
        show(lines, False, title, [note, *some])
    if page is None:
        return
    from regard.lab.report.probe_page import hypotheses_sheet, write_probes
    from regard.lab.studies.probes.study import ROWS

    judged = chosen.trained and {row.label for row in ROWS} <= set(found) and chosen.scale == "desk"
    sheets = [hypotheses_sheet(chosen.results)] if judged and chosen.boards == "boards" else []
    progress(f"page: {write_probes(page, cells, chosen.own, chosen.boards, [note], sheets)}")


def _show_sweep(planned: "Sequence[Probe]", boards: str, results: Path, page: Path | None, as_json: bool) -> None:
    from regard.lab.studies.probes.run import sweep_scores

    rows = sweep_scores(planned, Results(results))
    lines = [dict(zip(("mechanism", "tokens", "pairs", "right, %", "seeds"), row, strict=True)) for row in rows]
    show(lines, as_json, f"Recall by content ({boards})")
    if page is None:
        return
    from regard.lab.report.probe_page import sweep_sheet, write_sheets

    progress(f"page: {write_sheets(page, [sweep_sheet(rows)], boards)}")
