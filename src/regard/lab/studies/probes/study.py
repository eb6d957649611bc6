"""Seven ordinary studies, one for each ability of `regard.lab.data.boards`, with the same rows and recipe.

Each asks which mechanisms have the ability: softmax attention must (the gate), no mixing and a uniform average must
not.
"""

from dataclasses import dataclass, replace

from regard.lab.data.boards import PROBED
from regard.lab.data.generated import REVISIONS
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.tasks.cells import Cells
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import canonical
from regard.mixers import SKA, Agent, Factors, Linear, Linformer, MiTA, Softmax
from regard.mixers.spelling import parse_mixer

from .names import AVERAGE, BASELINE, NONE

METRIC = Cells.metric
SEEDS = 4
"""Of the studies; `regard probe` trains fewer."""

CONTROLS = (
    Row(BASELINE, Softmax()),
    Row(AVERAGE, Factors(terms="0000"), control=True, notes=("every token gets the mean of all values",)),
    Row(NONE, None, control=True, removed=True, notes=("every attention is removed; only the MLPs are left",)),
)
"""What the profile of a mechanism is shown beside."""
ROWS = (
    *CONTROLS,
    Row("SKA", SKA()),
    *(Row(f"Factors {terms}", Factors(terms=terms)) for terms in ("0110", "0100", "1000")),
    *(Row("Linear", Linear()), Row("Agent", Agent(m=9)), Row("Linformer", Linformer(m=9))),
    Row("MiTA", MiTA(m=9, k=9)),
)
"""The rows of the hypotheses."""
FURTHER = tuple(
    Row(text.removesuffix("()"), parse_mixer(text))
    for text in (
        "Factors(terms='0010')", "Factors(terms='0001')", "CSKA()", "XCA()", "FLatten()", "PolaFormer()", "MHLA()",
        "InLine()", "Performer()", "ViT3()", "Nystrom(m=9)", "PVT(ratio=2)", "TopK(k=4)", "BRA(regions=(3, 3), k=2)",
        "MoBA(block=(2, 2), k=3)", "Reformer()", "DAT()", "Window(size=3)", "NSA()", "Conv()", "DeformableConv()",
        "DynamicConv()",
    )
)  # fmt: skip
"""The other mechanisms."""

_PLACES = tuple(Claim(row, BASELINE, METRIC, within=2) for row in ("SKA", "Factors 0110", "Factors 0100", "MiTA"))
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "content": (
        *(Claim(row, AVERAGE, METRIC, within=2) for row in ("SKA", "Factors 0110")),
        Claim("Factors 1000", BASELINE, METRIC, within=2),
        *(Claim(row, BASELINE, METRIC, within=3) for row in ("Linear", "Agent", "Linformer")),
        Claim("MiTA", BASELINE, METRIC, within=2),
    ),
    "place": _PLACES,
    "offset": _PLACES,
}
"""All are claims of equivalence; which ones a hypothesis expects to be contradicted stands in `HYPOTHESES`."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A sentence about mechanisms, and the claims that decide it: (ability, row, whether it has to be supported)."""

    name: str
    sentence: str
    claims: tuple[tuple[str, str, bool], ...]


HYPOTHESES = (
    Hypothesis(
        name="H1",
        sentence="SKA, Factors 0110 and 0100 are within 2 points of softmax attention by place and by offset",
        claims=tuple((a, row, True) for a in ("place", "offset") for row in ("SKA", "Factors 0110", "Factors 0100")),
    ),
    Hypothesis(
        name="H2",
        sentence="SKA and Factors 0110 are within 2 points of the uniform average by content",
        claims=(("content", "SKA", True), ("content", "Factors 0110", True)),
    ),
    Hypothesis(
        name="H3",
        sentence="Factors 1000, content alone, is within 2 points of softmax attention by content",
        claims=(("content", "Factors 1000", True),),
    ),
    Hypothesis(
        name="H4",
        sentence="Linear, Agent and Linformer are more than 3 points below softmax attention by content",
        claims=tuple(("content", row, False) for row in ("Linear", "Agent", "Linformer")),
    ),
    Hypothesis(
        name="H5",
        sentence="MiTA is within 2 points of softmax attention by content and by place, and not by offset",
        claims=(("content", "MiTA", True), ("place", "MiTA", True), ("offset", "MiTA", False)),
    ),
)


def task_of(ability: str, boards: str = "boards") -> Cells:
    """The task of a probe. boards: "boards" or "digit_boards". Raises: ConfigError."""
    data = f"{boards}(ability={ability})"
    return Cells(data=data, **Cells.defaults(data)["task"])


def recipe_of(task: Cells) -> Recipe:
    """How networks of a probe are trained: as `regard train` does it."""
    return Recipe(**Cells.defaults(task.data)["recipe"])


def setting_on(data: str, rows: tuple[Row, ...], seeds: int, **small: int | str) -> Setting:
    """The setting of rows on boards that are no probe's. small: fields of the task that make it smaller."""
    task = Cells(data=data, **{**Cells.defaults(data)["task"], **small})
    return Setting(task, recipe_of(task), rows, seeds)


def setting_of(task: Cells, rows: tuple[Row, ...], scale: str) -> Setting:
    """The setting of rows at desk scale, or at smoke scale, which tests in seconds that everything runs."""
    if scale == "desk":
        return Setting(task, recipe_of(task), rows, SEEDS)
    small = replace(task, host="vit_desk(patch=14, dim=16, depth=1, heads=2)", limit=64)
    return Setting(small, replace(recipe_of(task), epochs=1, batch=32), rows, seeds=2)


def study_of(ability: str) -> Study:
    """The study of an ability, with all rows. Raises: ConfigError."""
    task, facts = task_of(ability), PROBED[ability]
    return Study(
        name=f"probes_{ability}",
        title=f"Which mechanisms can do it: {facts.needs}",
        source="Regard",
        question=f"{facts.question} Which mechanisms learn to answer?",
        baseline=BASELINE,
        metric=METRIC,
        settings={
            "smoke": setting_of(task_of(ability, "digit_boards"), ROWS, "smoke"),
            "desk": setting_of(task, (*ROWS, *FURTHER), "desk"),
        },
        claims=CLAIMS.get(ability, ()),
        notes=(
            "A probe says what a mechanism can learn in a small network; it judges no claim about accuracy on images.",
            f"Each step has new boards; the test has {task.sample_counts()[1]} boards of other garments and digits.",
            "The last weights are tested; nothing is chosen on the test boards.",
            *(f"{h.name}: {h.sentence}." for h in HYPOTHESES if any(claim[0] == ability for claim in h.claims)),
        ),
    )


CONTENT, PLACE, OFFSET, SALIENCE, COMPARE, COUNT, HOPS = map(study_of, PROBED)


def protocol(boards: str) -> str:
    """What has to be equal for scores to be compared, as text. boards: "boards" or "digit_boards"."""
    tasks = [task_of(ability, boards) for ability in PROBED]
    recipes = tuple(recipe_of(task) for task in tasks)
    return canonical((REVISIONS[boards], tasks[0].host, tasks[0].init, tasks[0].sample_counts(), recipes))
