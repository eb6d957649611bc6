"""What a user asks of `regard advise`, and the answer, as data."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from regard.core import ConfigError, MixerConfig
from regard.core.validation import check_fields
from regard.measure.intervals import Interval
from regard.swapping.layer_plan import LayerPlan, spell_layer_plan, spell_or_none
from regard.swapping.removed import Removed

from .attention_use import AttentionUse
from .fidelity import AnswerChange
from .judges import Judge
from .layer_costs import Costs, Usage
from .search import Budget

OWN = "its own"


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

    def __repr__(self) -> str:
        """The plans, the recommended one and the doubts, as lines of text."""
        plans = [
            f"{'*' if plan is self.best else ' '} {short_plan(plan, self.costs)}: {plan.latency:.2f}x the time, "
            f"{plan.macs:.2f}x the multiply-accumulates, divergence {interval_text(plan.divergence)}"
            f"{self.judge.unit}, agreement {plan.agreement.mean:.1f} %"
            for plan in self.plans
        ]
        return "\n".join([*plans, *answer(self), *(f"not sure: {line}" for line in self.doubts)])


def answer(result: Recommendation) -> list[str]:
    """The recommendation as sentences."""
    best = result.best
    memory = "" if best.memory is None else f", {best.memory:.2f}x the peak memory"
    costs = f"{best.latency:.2f}x the time{memory}, {best.macs:.2f}x the multiply-accumulates"
    if not best.spelling:
        return [f"Keep the model as it is: no plan within {result.budget} was found."]
    plan = _describe(best, len(result.costs))
    return [
        f"Recommended {'within' if result.met else 'as the nearest to'} {result.budget}: {plan}.",
        f"It needs {costs}, and {result.judge.sentence.format(interval_text(best.agreement))} "
        f"(divergence {interval_text(best.divergence)}{result.judge.unit}).",
    ]


def _describe(plan: VerifiedPlan, number: int) -> str:
    """The mechanisms of a plan of so many layers, each with its own."""
    layers: dict[str, list[str]] = {}
    for name, mixer in plan.choice.items():
        layers.setdefault("no attention" if mixer == Removed() else spell_or_none(mixer), []).append(name)
    return "; ".join(
        f"{mixer} at {f'all {len(names)} layers' if len(names) == number else ', '.join(names)}"
        for mixer, names in layers.items()
    )


def interval_text(value: Interval) -> str:
    """Mean with its interval."""
    if value.low is None or value.high is None:
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} [{max(value.low, 0.0):.3g}, {value.high:.3g}]"


def short_plan(plan: VerifiedPlan, layers: Iterable[str]) -> str:
    """The mechanisms of a plan with their numbers of layers."""
    counts = Counter(label(plan.choice.get(name)) for name in layers)
    return ", ".join(f"{number} x {label}" for label, number in counts.items())


def label(mixer: MixerConfig | None) -> str:
    """A mechanism in a short text."""
    if mixer is None:
        return OWN
    spelling = spell_or_none(mixer)
    return "none" if spelling == "None" else spelling.removesuffix("()")
