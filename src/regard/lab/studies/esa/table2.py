"""An Empirical Study of Spatial Attention Mechanisms, Table 2: deformable convolution in the place of E2."""

from regard.lab.engine.study import Claim, Row, Study
from regard.lab.studies.papers import ESA_PAPER

from .attended_resnets import NOTES, controls, deformable, settings
from .costs import factors
from .rows import PAIRS


def rows(host: str, start: Row) -> tuple[Row, ...]:
    """Both sides of every pair, and the controls."""
    attention = (Row(terms, factors(terms), start=start) for terms, _ in PAIRS if terms != "w/o")
    convolution = (
        Row(f"{terms} + deformable", factors(terms), host=deformable(host), removed=terms == "w/o", start=start,
            notes=(f"In the place of {before}.",))
        for before, terms in PAIRS
    )  # fmt: skip
    return (*attention, *convolution, *controls(start))


STUDY = Study(
    name="esa_table2",
    title="Deformable convolution, or query content and relative position",
    source=f"{ESA_PAPER}, Table 2",
    question="Does deformable convolution do the work of query content and relative position (E2), and more?",
    baseline="1111",
    settings=settings(rows),
    claims=(
        *(Claim(f"{after} + deformable", before, "top1") for before, after in PAIRS),
        Claim("0010 + deformable", "1111 + deformable", "top1", within=1.0),
    ),
    notes=(
        "The last claim is the paper's recommendation: key content alone with deformable convolution is nearly as good "
        "as all factors with it.",
        "The offsets start at zero and learn at a tenth of the learning rate.",
        *NOTES,
    ),
)
