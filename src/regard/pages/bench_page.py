"""The page of `regard bench`: tables of time and memory by grid, curves over the number of tokens, and all numbers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from regard.files.atomic import write_atomically
from regard.measure.bench import Timing
from regard.mixers.table import FAMILIES
from regard.pages.analysis_page import render_sheets
from regard.pages.sheets import Cell, Chart, Sheet

MOST_CURVES = 8
"""In one chart; more mechanisms are drawn by family."""
WIDE_RANGE = 4
"""A factor: a chart whose values differ by more has a logarithmic axis."""
PASSES = {False: "forward", True: "training"}


def write_bench(path: Path | str, timings: Sequence[Timing], model: str, notes: Sequence[str]) -> Path:
    """Write the page of timings. model: the host, "" for mechanisms. Returns the file. Raises: StoreError.

    Training is a forward and a backward pass.
    """
    sheets = [sheet for kind in PASSES for sheet in _pass(kind, [t for t in timings if t.backward == kind], model)]
    title = f"{model}: its own attention and others" if model else "Attention mechanisms: time and memory"
    question = f"What does each cost on this machine, beside {_label(timings[0])}?"
    shown, said = [*sheets, _numbers(timings)], [*notes, *_not_run(timings)]
    write_atomically(path, render_sheets("regard bench", title, question, shown, said))
    return Path(path)


def _label(timing: Timing) -> str:
    return "its own attention" if timing.mixer == "host" else timing.mixer.removesuffix("()")


def _pass(kind: bool, timings: Sequence[Timing], model: str) -> Iterable[Sheet]:
    """For forward or training: tables of time and memory by grid, and curves."""
    if not timings:
        return
    name, first = PASSES[kind].capitalize(), _label(timings[0])
    note = f"Below 1 is faster than {first}."
    yield _by_grid(f"{name}: time, divided by that of {first}", note, timings, _ratio)
    if any(timing.memory for timing in timings):
        note = "What one pass adds at its peak to weights and inputs."
        yield _by_grid(f"{name}: peak memory in MB", note, timings, _megabytes)
    run = [timing for timing in timings if not timing.estimated]
    if len({timing.grid for timing in run}) > 1:
        for family, names in _groups(timings):
            members = [timing for timing in run if timing.mixer in names]
            title = f"{name}, {family}" if family else name
            beside = [timing for timing in members if timing.ratio is not None]
            yield _curves(f"{title}: time", "time divided by that of " + first, beside, model, lambda t: t.ratio or 0)
            if kind and any(timing.memory for timing in members):
                yield _curves(f"{title}: memory", "peak memory, MB", members, model, lambda t: (t.memory or 0) / 1e6)


def _ratio(timing: Timing) -> float | None:
    return None if timing.ratio is None else round(timing.ratio, 3)


def _megabytes(timing: Timing) -> float | None:
    return None if timing.memory is None else round(timing.memory / 1e6, 1)


def _by_grid(title: str, note: str, timings: Sequence[Timing], value: Callable[[Timing], Cell]) -> Sheet:
    """A row for each mechanism, a column for each grid."""
    grids = list(dict.fromkeys(timing.grid for timing in timings))
    names = list(dict.fromkeys(map(_label, timings)))
    values = {(_label(t), t.grid): "not run" if t.estimated else value(t) for t in timings}
    rows = tuple((name, *(values.get((name, grid)) for grid in grids)) for name in names)
    return Sheet(title=title, columns=("mechanism", *grids), rows=rows, note=note)


def _groups(timings: Sequence[Timing]) -> Iterable[tuple[str, list[str]]]:
    """(family, mechanisms): all in one where they are few, else the first mechanism in each family."""
    names = list(dict.fromkeys(timing.mixer for timing in timings))
    if len(names) <= MOST_CURVES:
        return [("", names)]
    families = {name: family for family, members in FAMILIES.items() for name in members}
    groups: dict[str, list[str]] = {}
    for name in names[1:]:
        groups.setdefault(families.get(name.partition("(")[0], "others").replace("*", ""), []).append(name)
    return [(family, [names[0], *members]) for family, members in groups.items()]


def _curves(title: str, y: str, timings: Sequence[Timing], model: str, value: Callable[[Timing], float]) -> Sheet:
    """Over the tokens, or the height of images of a model."""
    x = "image height" if model else "tokens"
    rows = tuple((_label(t), int(t.grid.partition("x")[0]) if model else t.tokens, round(value(t), 4)) for t in timings)
    values = [row[2] for row in rows if row[2] > 0]
    wide = max(values, default=1) > WIDE_RANGE * min(values, default=1)
    chart = Chart(x=x, y=y, series="mechanism", logs=("" if model else "x") + ("y" if wide else ""))
    return Sheet(title=title, columns=("mechanism", x, y), rows=rows, chart=chart, folded=True)


def _numbers(timings: Sequence[Timing]) -> Sheet:
    note = (
        "Passes in turn in one process; medians. ratio: to the first row of the grid. % of bound: the time of the "
        "products (in training three times those of the forward pass, also where fewer keys have a gradient) at this "
        "machine's speed for a large matrix product, or of reading and writing once, divided by the time. growth: e, "
        "where time grew with tokens to the power e since the grid before."
    )
    rows = tuple(
        (_label(timing), timing.grid, PASSES[timing.backward], round(timing.seconds * 1e3, 3), _ratio(timing),
         round(100 * timing.bound / timing.seconds, 1) if timing.seconds else None, _megabytes(timing),
         None if timing.exponent is None else round(timing.exponent, 2))
        for timing in timings
        if not timing.estimated
    )  # fmt: skip
    columns = ("mechanism", "grid", "pass", "ms", "ratio", "% of bound", "peak MB", "growth")
    return Sheet(title="All numbers", columns=columns, rows=rows, note=note)


def _not_run(timings: Sequence[Timing]) -> list[str]:
    """A sentence for each row that was estimated."""
    return [
        f"Not run: {_label(timing)} on {timing.grid}, {PASSES[timing.backward]}: about {timing.seconds:.3g} s a pass"
        + (f" and {timing.memory / 1e9:.3g} GB" if timing.memory else "")
        for timing in timings
        if timing.estimated
    ]
