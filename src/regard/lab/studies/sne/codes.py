"""SNE paper, Table 6 and Figures 4 and 5, from runs of `sne_table4`: codes and accuracies before and after transfer."""

from collections.abc import Sequence
from statistics import fmean

from regard.explain.codes import Book, code_books, compare, transfer
from regard.lab.engine.analysis import Analysis, Source, trained_runs
from regard.lab.engine.claims import metric_of
from regard.lab.studies.controls import CONTROLS
from regard.lab.studies.papers import SNE_PAPER
from regard.lab.tasks.base import Task
from regard.lab.train.run import Run
from regard.pages.sheets import Cell, Chart, Picture, Sheet
from regard.projections import FSNE

from .models import HOSTS

_STUDY = "sne_table4"
_SIZES = {host: size for size, host in HOSTS.items()}


def _pairs(source: Source) -> list[tuple[str, Run, Run]]:
    """(row, run, the run that it starts from) of finished runs. Raises: ConfigError or StoreError if there are none."""
    runs = [(label, source.run(key)) for label, _, key in trained_runs(source, _STUDY)]
    return [(label, run, run.start) for label, run in runs if isinstance(run.start, Run)]


def _book(source: Source, run: Run) -> Book:
    return code_books(source.store.folder(run.key) / "last.ckpt")[0]


def codes(source: Source) -> Sequence[Sheet | Picture]:
    """Norms before and after transfer, and cosines within and between them, of each row with codes (first seed)."""
    norms: list[tuple[Cell, ...]] = []
    sheets: list[Sheet | Picture] = []
    labels = set()
    for label, run, start in _pairs(source):
        if label in labels or not isinstance(getattr(run.mixer, "projection", None), FSNE):
            continue
        labels.add(label)
        books = compare({"before": _book(source, start), "after": _book(source, run)})
        norms += [(label, model["label"], *model["norms"].values()) for model in books["models"]]
        between = books["between"][0]
        roles = between["row_roles"], between["column_roles"]
        sheets.append(_matrix(f"{label}: codes before and after", ("before", "after"), roles, between["cosines"]))
        for model in books["models"]:
            roles, when = (model["roles"],) * 2, model["label"]
            sheets.append(_matrix(f"{label}: codes {when} transfer", ("code", "other code"), roles, model["within"]))
    published = Sheet(
        title="Norms that the paper prints (N12, F-SNE 8)",
        columns=("data", "query", "key", "value"),
        rows=(("ImageNet", 8.86, 8.13, 8.53), ("CIFAR-10", 9.05, 8.34, 8.74), ("CIFAR-100", 9.06, 8.35, 8.77),
              ("Cars", 8.84, 8.13, 8.53), ("STL-10", 8.86, 8.14, 8.56)),
        published=("query", "key", "value"),
    )  # fmt: skip
    measured = Sheet(title="Norms of the codes", columns=("row", "when", "query", "key", "value"), rows=tuple(norms))
    return [measured, published, *sheets]


def _matrix(
    title: str, names: tuple[str, str], roles: tuple[str, str], cosines: Sequence[Sequence[float | None]]
) -> Sheet:
    """Cosines of codes as a heat map. names: of its two axes; roles: of the codes along each."""
    cells = tuple(
        (row, column, value)
        for row, line in zip(roles[0], cosines, strict=True)
        for column, value in zip(roles[1], line, strict=True)
    )
    chart = Chart(kind="heat", x=names[1], y=names[0], value="cosine")
    return Sheet(title=title, columns=(*names, "cosine"), rows=cells, chart=chart)


def _series(task: Task) -> str:
    """The data set, and the size of the network where the paper has two: a regression never mixes sizes."""
    size = _SIZES.get(task.host)
    return f"{size}, {task.data}" if size else task.data


def accuracies(source: Source) -> Sequence[Sheet | Picture]:
    """Accuracy before and after transfer: a point per row (mean over seeds), a line per network size and data set."""
    values: dict[str, dict[str, list[float]]] = {}
    controls = {row.label for row in CONTROLS}
    for label, run, start in _pairs(source):
        if label in controls or run.mixer is None:  # networks of others
            continue
        for name, key in (("before", start.key), (_series(run.task), run.key)):
            if (value := metric_of(source.outcome(key), "top1")) is not None:
                values.setdefault(label, {}).setdefault(name, []).append(value)
    means = {label: {name: fmean(seeds) for name, seeds in sets.items()} for label, sets in values.items()}
    line = transfer(means, "before")
    rows = tuple((label, part["name"], x, y) for part in line["sets"]
                 for label, x, y in zip(part["models"], part["x"], part["y"], strict=True))  # fmt: skip
    fits = tuple((part["name"], part["n"], part["r"], part["slope"]) for part in line["sets"])
    return [
        Sheet(title="Accuracy before and after transfer", columns=("row", "data", "before", "after"), rows=rows,
              chart=Chart(kind="points", x="before", y="after", series="data")),
        Sheet(title="Regression", columns=("data", "rows", "r", "slope"), rows=fits,
              note="The paper's figure has the rows of N12; T12 is fitted separately."),
    ]  # fmt: skip


CODES = Analysis(
    name="sne_fig4", title="Codes of F-SNE before and after transfer", source=f"{SNE_PAPER}, Table 6 and Figure 4",
    question="Do codes keep their length and direction when a network is trained further?", compute=codes, of=_STUDY,
)  # fmt: skip
ACCURACIES = Analysis(
    name="sne_fig5", title="Accuracy before and after transfer", source=f"{SNE_PAPER}, Figure 5",
    question="Does a better network on the first set transfer better?", compute=accuracies, of=_STUDY,
)  # fmt: skip
