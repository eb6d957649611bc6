"""SNE paper, Table 6 and Figures 4 and 5: what the codes become, and how accuracies before and after transfer go
together. Read from the runs of `sne_table4`."""

from collections.abc import Sequence
from statistics import fmean

from regard.explain.codes import Book, codes_of, compare, transfer
from regard.lab.analysis import Analysis, Cell, Chart, Picture, Sheet, Source, trained_runs
from regard.projections.sne import FSNE
from regard.studies.controls import CONTROLS
from regard.tasks.base import Task
from regard.train.run import Run

from .variants import NANO, SOURCE, TINY

_STUDY = "sne_table4"
_SIZES = {NANO: "N12", TINY: "T12"}


def _pairs(source: Source) -> list[tuple[str, Run, Run]]:
    """(row, run, the run that it started from) of finished runs. Raises: ConfigError or StoreError without any."""
    found = [(label, source.run(key)) for label, _, key in trained_runs(source, _STUDY)]
    return [(label, run, run.start) for label, run in found if isinstance(run.start, Run)]


def _book(source: Source, run: Run) -> Book:
    return codes_of(source.store.folder(run.key) / "last.ckpt")[0]


def codes(source: Source) -> Sequence[Sheet | Picture]:
    """Norms before and after transfer, and cosines within and between them, of each row with codes (first seed)."""
    norms: list[tuple[Cell, ...]] = []
    sheets: list[Sheet | Picture] = []
    seen = set()
    for label, run, start in _pairs(source):
        if label in seen or not isinstance(getattr(run.mixer, "projection", None), FSNE):
            continue
        seen.add(label)
        found = compare({"before": _book(source, start), "after": _book(source, run)})
        norms += [(label, model["label"], *model["norms"].values()) for model in found["models"]]
        between = found["between"][0]
        roles = between["row_roles"], between["column_roles"]
        sheets.append(_matrix(f"{label}: codes before and after", ("before", "after"), roles, between["cosines"]))
        for model in found["models"]:
            roles, when = (model["roles"],) * 2, model["label"]
            sheets.append(_matrix(f"{label}: codes {when} transfer", ("code", "other code"), roles, model["within"]))
    published = Sheet(
        title="Norms that the paper prints (N12, F-SNE 8)",
        columns=("data", "query", "key", "value"),
        rows=(("ImageNet", 8.86, 8.13, 8.53), ("CIFAR-10", 9.05, 8.34, 8.74), ("CIFAR-100", 9.06, 8.35, 8.77),
              ("Cars", 8.84, 8.13, 8.53), ("STL-10", 8.86, 8.14, 8.56)),
        published=("query", "key", "value"),
    )  # fmt: skip
    own = Sheet(title="Norms of the codes", columns=("row", "when", "query", "key", "value"), rows=tuple(norms))
    return [own, published, *sheets]


def _matrix(
    title: str, names: tuple[str, str], roles: tuple[str, str], cosines: Sequence[Sequence[float | None]]
) -> Sheet:
    """Cosines of codes as a heat map. names: of its rows and columns; roles: what they stand for."""
    cells = tuple(
        (one, other, value)
        for one, line in zip(roles[0], cosines, strict=True)
        for other, value in zip(roles[1], line, strict=True)
    )
    chart = Chart(kind="heat", x=names[1], y=names[0], value="cosine")
    return Sheet(title=title, columns=(*names, "cosine"), rows=cells, chart=chart)


def _series(task: Task) -> str:
    """The data set, and the size of the network where the paper has two: sizes are never mixed in one regression."""
    size = _SIZES.get(task.host)
    return f"{size}, {task.data}" if size else task.data


def accuracies(source: Source) -> Sequence[Sheet | Picture]:
    """Accuracy before transfer against accuracy after it, a point a row (mean over seeds), a line a size and set."""
    found: dict[str, dict[str, list[float]]] = {}
    controls = {row.label for row in CONTROLS}
    for label, run, start in _pairs(source):
        if label in controls:
            continue
        for name, key in (("before", start.key), (_series(run.task), run.key)):
            value = source.outcome(key).get("metrics", {}).get("top1")
            if isinstance(value, int | float):
                found.setdefault(label, {}).setdefault(name, []).append(float(value))
    means = {label: {name: fmean(values) for name, values in sets.items()} for label, sets in found.items()}
    line = transfer(means, "before")
    rows = tuple((label, part["name"], x, y) for part in line["sets"]
                 for label, x, y in zip(part["models"], part["x"], part["y"], strict=True))  # fmt: skip
    fits = tuple((part["name"], part["n"], part["r"], part["slope"]) for part in line["sets"])
    return [
        Sheet(title="Accuracy before and after transfer", columns=("row", "data", "before", "after"), rows=rows,
              chart=Chart(kind="points", x="before", y="after", series="data")),
        Sheet(title="Regression", columns=("data", "rows", "r", "slope"), rows=fits,
              note="The paper's figure has the rows of N12; T12 is fitted apart."),
    ]  # fmt: skip


CODES = Analysis(
    name="sne_fig4",
    title="What the codes of F-SNE become",
    source=f"{SOURCE}, Table 6 and Figure 4",
    question="Do codes keep their length and direction when a network is trained on?",
    compute=codes,
    of=_STUDY,
)
ACCURACIES = Analysis(
    name="sne_fig5",
    title="Accuracy before and after transfer",
    source=f"{SOURCE}, Figure 5",
    question="Does the better network of the first set transfer better?",
    compute=accuracies,
    of=_STUDY,
)
