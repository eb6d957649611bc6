"""What a user asks of `regard advise`, and the answer, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from regard.core import ConfigError, MixerConfig
from regard.core.validation import check_fields
from regard.measure.intervals import Interval
from regard.swapping.layer_plan import LayerPlan, spell_layer_plan

from .attention_use import AttentionUse
from .fidelity import AnswerChange
from .judges import Judge
from .layer_costs import Costs, Usage
from .search import Budget


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user asks. mixers: to try, () = `candidates` of the model. minutes: to spend. batch: images of a pass
    whose time and memory are measured. steps: of learning at most. where: a glob on layer names. reinitialise: as for
    `swap`. Raises: ConfigError.
    """

    budget: Budget = Budget()
    mixers: tuple[MixerConfig, ...] = ()
    minutes: float = 15.0
    batch: int = 4
    steps: int = 200
    where: str = "*"
    reinitialise: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.minutes <= 100_000 or self.batch < 1 or self.steps < 0:
            raise ConfigError(
                f"minutes and batch are positive, steps 0 or more, not {self.minutes}, {self.batch}, {self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class VerifiedPlan:
    """A plan with what was measured of the whole model.

    choice: the plan, which `regard.swap` takes, as it takes its `spelling`: layers that it does not name keep their
    attention, and Removed() takes it away. predicted: the sum of the divergences of its changes alone. divergence,
    agreement: of the output from that of the model as it was, by the judge, and percent. latency, memory, macs: shares
    of what the model needs with its own attention; memory is None where the system does not tell. expected: its share
    of the budget's kind before it was measured.
    """

    choice: LayerPlan
    predicted: float
    divergence: Interval
    agreement: Interval
    latency: float
    memory: float | None
    macs: float
    expected: float

    def share(self, kind: str) -> float:
        """The measured share of a budget's kind."""
        return {"latency": self.latency, "memory": self.memory or 1.0, "macs": self.macs}[kind]

    @property
    def loss(self) -> float:
        """The mean divergence; infinite where the output of an image is no number."""
        return self.divergence.mean or 0.0

    @property
    def spelling(self) -> str:
        return spell_layer_plan(self.choice)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer. plans: verified, from the model as it was to the cheapest. best: the recommended one among them.

    met: whether it is within the budget. alone: the change of the output by each mechanism at each layer alone; costs:
    of each; use: of the model's attention, or why it is not known. steps: of learning. usage: of the model as it was.
    doubts: what the answer is not sure of. correlation: of predicted and measured divergence over the plans. judge: of
    the output. clock: what measured the times, of what. looked_at: images that `use` is of.
    """

    model: str
    budget: Budget
    plans: tuple[VerifiedPlan, ...]
    best: VerifiedPlan
    met: bool
    judge: Judge
    alone: Mapping[tuple[str, MixerConfig], AnswerChange]
    costs: Costs
    usage: Usage
    use: Mapping[str, AttentionUse] | str
    refused: Mapping[tuple[str, MixerConfig], str]
    steps: int
    images: tuple[int, int]
    batch: int
    seconds: float
    correlation: float | None = None
    clock: str = ""
    looked_at: int = 0
    doubts: tuple[str, ...] = field(default=())


def agreement_text(result: Recommendation, agreement: str) -> str:
    """What a plan keeps of the model's answers, as text. agreement: in percent."""
    return result.judge.sentence.format(agreement)
