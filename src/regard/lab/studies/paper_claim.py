"""PaperClaim: what a paper says, and which claims of studies, counts or analyses judge it. Needs no torch.

The papers' entries are in `<paper>/claims.json`; verdicts are not stored, but read from evidence.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from regard.core import ConfigError
from regard.lab.engine.claims import claim_text

if TYPE_CHECKING:
    from regard.lab.engine.study import Claim

Kind = Literal["arithmetic", "time", "accuracy"]
KINDS: Mapping[Kind, str] = {
    "arithmetic": "parameters, MACs", "time": "measured time and memory", "accuracy": "trained accuracy",
}  # fmt: skip
COUNTED = ("params", "macs")
"""Metrics of a row's printed values that are counts, not measurements."""


@dataclass(frozen=True)
class PaperClaim:
    """A claim of a paper in our words. id: unique in the paper. place: section, table or figure.

    - printed: the numbers, "" for a sentence without any.
    - judges: pairs (study, claim's text), both may be globs, as in ("mita_table2", "MiTA is above Linear *").
    - counts: studies whose printed counts are compared with ours.
    - analysis: one whose sheets have the answer.
    - study: the study with the rows, where none of its claims says it.
    - reason: why nothing judges it.

    Raises: ConfigError for an entry with neither a judge nor a reason.
    """

    id: str
    place: str
    says: str
    printed: str = ""
    kind: Kind = "accuracy"
    judges: tuple[tuple[str, str], ...] = ()
    counts: tuple[str, ...] = ()
    analysis: str = ""
    study: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        if not (self.judges or self.counts or self.analysis or self.reason):
            raise ConfigError(f"claim {self.id!r} needs a judge, counts, an analysis or a reason why there is none")

    def judged_by(self, study: str, claim: "Claim") -> bool:
        """Whether a claim of a study judges this one."""
        text = text_of(claim)
        return any(fnmatchcase(study, name) and fnmatchcase(text, pattern) for name, pattern in self.judges)


def text_of(claim: "Claim") -> str:
    """A study's claim as its tables at desk scale have it, without the size that only the paper's scale judges."""
    return claim_text(asdict(claim) | {"by": None}, "desk")
