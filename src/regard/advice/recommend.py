"""Recommending a plan of layers for a user's model, images, machine and budget, and saying how sure that is.

The steps: measure what each mechanism costs at each layer; let all of them learn the outputs of the layers that they
would replace; measure how far each alone changes the class scores; search plans within budgets by the sum of these;
verify the best end to end, on images that nothing has learned from. What predicts the accuracy after fine-tuning is the
divergence of the class scores of the whole plan after that learning (docs/results/advice.md).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.core import ConfigError, MixerConfig, require
from regard.core.validation import check_fields
from regard.measure.statistics import Interval, rank_correlation
from regard.mixers.agent import Agent
from regard.mixers.linear import Linear
from regard.mixers.mita.mita import MiTA
from regard.mixers.static_keys.ska import SKA
from regard.mixers.window import Window
from regard.store.tensor_files import read_state, write_state
from regard.swapping.layer_plan import spell_layer_plan, spell_or_none
from regard.swapping.removed import Removed
from regard.swapping.swap import plan_swap
from regard.tasks.data.images import Images

from .attention_use import AttentionUse, attention_use
from .distill import BETWEEN_SAVES, digest
from .fidelity import Fidelity, ScoreChange, means
from .layer_costs import Costs, ModelUsage, layer_costs, measured_usage
from .learning import Distillation, LayerDistillation
from .search import Budget, Choice, added, additive_loss, as_plan, cost_of, front, spread_out
from .substitutes import Substitutes
from .user_model import UserModel, split_images, tensors

VERIFIED = 8
"""Plans that are verified end to end."""
LEARNING, ALONE = 0.5, 0.3
"""Shares of the time for learning, and for each change alone."""
STATE = "advice.state"

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user asks. mixers: to try, () = `candidates` of the model. minutes: to spend. batch: images of a pass
    whose time and memory are measured. steps: of learning at most. where: a glob on layer names. Raises: ConfigError.
    """

    budget: Budget = Budget()
    mixers: tuple[MixerConfig, ...] = ()
    minutes: float = 15.0
    batch: int = 4
    steps: int = 200
    where: str = "*"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.minutes <= 100_000 or self.batch < 1 or self.steps < 0:
            raise ConfigError(
                f"minutes and batch are positive, steps 0 or more, not {self.minutes}, {self.batch}, {self.steps}"
            )


def candidates(model: UserModel, where: str = "*") -> tuple[MixerConfig, ...]:
    """Mechanisms that are tried unless the user names others: each of another kind, and no attention at all.

    Their numbers suit the layer with the fewest tokens: a landmark for about nine tokens, 64 at most (25 at 14 x 14, as
    in the paper of MiTA). Raises: SwapError if the model has no attention that can be replaced.
    """
    sites = plan_swap(model.network, Removed(), where, model.example, model.ports).sites
    grids = [site.layer.mixer.site.grid for site in sites]
    landmarks = min(max(1, min(8, round(math.sqrt(grid.cells) / 3))) ** 2 for grid in grids)
    window = min(7, *(side - 1 + side % 2 for grid in grids for side in (grid.height, grid.width)))
    return (MiTA(m=landmarks, k=landmarks), Agent(m=landmarks), Linear(), SKA(), Window(size=window), Removed())


@dataclass(frozen=True, kw_only=True)
class VerifiedPlan:
    """A plan with what was measured of the whole model.

    predicted: the sum of the divergences of its changes alone. divergence, agreement: of the class scores with the
    model as it was, nats and percent. latency, memory, macs: shares of what the model needs with its own attention;
    memory is None where the system does not tell. expected: its share of the budget's kind before it was measured.
    """

    choice: Choice
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
    def spelling(self) -> str:
        return spell_layer_plan(as_plan(self.choice))


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer. plans: verified, from the model as it was to the cheapest. best: the recommended one among them.

    met: whether it is within the budget. alone: the change of the scores by each mechanism at each layer alone; costs:
    of each; use: of the model's attention, or why it is not known. steps: of learning. usage: of the model as it was.
    doubts: what the answer is not sure of. correlation: of predicted and measured divergence over the plans.
    """

    model: str
    budget: Budget
    plans: tuple[VerifiedPlan, ...]
    best: VerifiedPlan
    met: bool
    alone: Mapping[tuple[str, MixerConfig], ScoreChange]
    costs: Costs
    usage: ModelUsage
    use: Mapping[str, AttentionUse] | str
    refused: Mapping[tuple[str, MixerConfig], str]
    steps: int
    images: tuple[int, int]
    batch: int
    seconds: float
    correlation: float | None = None
    doubts: tuple[str, ...] = field(default=())


def recommend(
    model: UserModel, images: Images, question: Question, *, folder: Path | None = None, report: Report | None = None
) -> Recommendation:
    """The plan that changes the class scores of a model least within a budget, found in about `question.minutes`.

    folder: where what was learned and measured is kept, so that the same question goes on after an interruption; None
    keeps nothing. report: called with a line of text at each step. The model is not changed.
    Raises: SwapError if nothing can be replaced, UnsupportedError without class scores, StoreError for a damaged state,
    ConfigError, MissingExtra.
    """
    require("scipy")
    work = _Work(model, images, question, folder, report or (lambda text: None))
    try:
        return work.answer()
    finally:
        work.substitutes.close()


class _Work:
    """The steps of one question, with what is known so far in `state`."""

    def __init__(
        self, model: UserModel, images: Images, question: Question, folder: Path | None, report: Report
    ) -> None:
        if not question.mixers:
            question = replace(question, mixers=candidates(model, question.where))
        self.model, self.question, self.report = model, question, report
        self.start = time.monotonic()
        self.learned, self.judged = split_images(images)
        self.substitutes = Substitutes(model.network, question.mixers, model.example, question.where, model.ports)
        self.file = None if folder is None else folder / STATE
        self.key = _key(model, images, question)
        self.state = self._read()
        if self.state:
            self.report(f"continuing what {self.file} holds")

    # state on disk

    def _read(self) -> dict[str, Any]:
        state = (None if self.file is None else read_state(self.file)) or {}
        if state.get("key", self.key) != self.key:
            self.report(f"{self.file} is of another question (model, images or options), and is replaced")
            return {}
        return state

    def _write(self) -> None:
        if self.file is not None:
            write_state(self.file, {"key": self.key, **self.state})

    def _left(self) -> float:
        """Seconds of the time that the user gave."""
        return max(0.0, 60 * self.question.minutes - (time.monotonic() - self.start))

    # the steps

    def answer(self) -> Recommendation:
        device = next(self.model.network.parameters()).device
        judged = self.model.prepared(tensors(self.judged), device)
        fidelity = Fidelity(self.substitutes, judged)
        self.report(f"{len(self.substitutes.names)} layers, {len(self.question.mixers)} mechanisms")
        costs = self._costs(judged)
        use = attention_use(self.model, judged[:4])
        steps = self._learn()
        alone = self._alone(fidelity)
        plans, usage = self._verified(fidelity, judged, costs, means(alone))
        best, met = self._best(plans)
        result = Recommendation(
            model=self.model.label, budget=self.question.budget, plans=tuple(plans), best=best, met=met, alone=alone,
            costs=costs, usage=usage, use=use, refused=self.substitutes.refused, steps=steps,
            images=(len(self.learned), len(self.judged)), batch=self.question.batch,
            seconds=time.monotonic() - self.start,
            correlation=rank_correlation(
                [plan.predicted for plan in plans[1:]], [plan.divergence.mean or 0.0 for plan in plans[1:]]
            ),
        )  # fmt: skip
        return replace(result, doubts=tuple(doubts(result, self.model)))

    def _costs(self, judged: Tensor) -> Costs:
        self.report("measuring time and memory of each mechanism at each kind of layer")
        batch = judged[:1].expand(self.question.batch, -1, -1, -1) if len(judged) < self.question.batch else judged
        seconds = min(0.3, 0.1 * self._left() / (10 * (1 + len(self.question.mixers))))
        return layer_costs(self.substitutes, batch[: self.question.batch], seconds)

    def _learn(self) -> int:
        """Learn the outputs of the original's layers; returns the number of steps."""
        how = Distillation(steps=self.state.get("learning", {}).get("steps", self.question.steps))
        distillation = LayerDistillation(self.substitutes, self.model, self.learned, how)
        if learning := self.state.get("learning"):
            distillation.resume(learning)
        elif how.steps:
            seconds = self._seconds_of_a_step(how)
            steps = max(10, min(how.steps, int(LEARNING * self._left() / seconds)))
            distillation = LayerDistillation(self.substitutes, self.model, self.learned, replace(how, steps=steps))
        while not distillation.run(BETWEEN_SAVES):
            self.report(f"learning: step {distillation.step} of {distillation.how.steps}")
            self.state["learning"] = distillation.state()
            self._write()
        self.state["learning"] = distillation.state()
        self._write()
        return distillation.how.steps

    def _seconds_of_a_step(self, how: Distillation) -> float:
        """Of a step of learning, after which the substitutes are as before."""
        before = {key: value.clone() for key, value in self.substitutes.weights().items()}
        trial = LayerDistillation(self.substitutes, self.model, self.learned, replace(how, steps=2))
        start = time.monotonic()
        trial.run()
        self.substitutes.load_weights(before)
        return (time.monotonic() - start) / 2

    def _alone(self, fidelity: Fidelity) -> dict[tuple[str, MixerConfig], ScoreChange]:
        """Each change alone; on fewer images where the time is short. Kept in the state one by one."""
        pairs = [(name, mixer) for name, layers in self.substitutes.layers.items() for mixer in layers]
        known = self.state.setdefault("alone", {})
        start = time.monotonic()
        fidelity.scores({})
        once = time.monotonic() - start
        share = min(1.0, max(ALONE * 60 * self.question.minutes, 0.5 * self._left()) / max(once * len(pairs), 1e-9))
        number = max(1, round(share * len(fidelity.batches)))
        part = fidelity.part(number)
        self.report(f"each change alone: {len(pairs)} passes over {sum(map(len, part.batches))} images")
        changes = {}
        for row, (name, mixer) in enumerate(pairs):
            label = f"{name}|{spell_or_none(mixer)}|{number}"
            if label not in known:
                change = part.scores({name: mixer})
                known[label] = {"kl": change.kl.tolist(), "agrees": change.agrees.tolist()}
                if row % 20 == 19:
                    self._write()
            changes[name, mixer] = ScoreChange.of(known[label]["kl"], known[label]["agrees"])
        self._write()
        return changes

    def _verified(
        self, fidelity: Fidelity, judged: Tensor, costs: Costs, losses: dict[str, dict[MixerConfig, float]]
    ) -> tuple[list[VerifiedPlan], ModelUsage]:
        kind, batch = self.question.budget.kind, judged[: self.question.batch]
        seconds = min(1.0, 0.05 * 60 * self.question.minutes / VERIFIED)
        own = measured_usage(self.substitutes, {"own": {}}, batch, seconds)["own"]
        total = {"latency": own.seconds, "memory": float(own.memory or 0), "macs": float(own.macs)}[kind]
        choices = front(losses, costs, kind)
        target = (self.question.budget.share - 1) * total
        chosen = spread_out(choices, costs, kind, VERIFIED, target)
        self.report(f"verifying {len(chosen)} of {len(choices)} plans end to end")
        plans = {str(row): as_plan(choice) for row, choice in enumerate(chosen)}
        usage = measured_usage(self.substitutes, plans, batch, seconds)
        first = usage["0"]
        results = []
        for row, choice in enumerate(chosen):
            change, used = fidelity.scores(plans[str(row)]), usage[str(row)]
            results.append(
                VerifiedPlan(
                    choice=choice,
                    predicted=additive_loss(choice, losses),
                    divergence=change.divergence,
                    agreement=change.agreement,
                    latency=used.seconds / first.seconds,
                    memory=used.memory / first.memory if used.memory is not None and first.memory else None,
                    macs=used.macs / first.macs,
                    expected=1 + added(choice, costs, kind) / max(total, 1e-12),
                )
            )
        return results, first

    def _best(self, plans: Sequence[VerifiedPlan]) -> tuple[VerifiedPlan, bool]:
        """The plan within the budget whose scores change least; else the cheapest. And whether it is within."""
        kind, share = self.question.budget.kind, self.question.budget.share
        within = [plan for plan in plans if plan.share(kind) <= share]
        if within:
            return min(within, key=lambda plan: plan.divergence.mean or 0.0), True
        return min(plans, key=lambda plan: plan.share(kind)), False


def doubts(result: Recommendation, model: UserModel) -> list[str]:
    """What the answer is not sure of, as sentences."""
    lines = []
    if not model.trained:
        lines.append(
            f"the weights of {model.label} are random, so nothing here says what a trained model would lose: give "
            "--pretrained, a saved folder or a run"
        )
    if slower := _never_cheaper(result):
        lines.append(
            f"{', '.join(slower)} cost no less than the model's own attention at any layer, so no plan has them"
        )
    if not result.met:
        lines.append(
            f"no plan of these mechanisms meets {result.budget}; the nearest reaches "
            f"{result.best.share(result.budget.kind):.2f}x"
        )
    high = result.best.divergence.high or 0.0
    rivals = [
        plan
        for plan in result.plans
        if plan is not result.best and plan.choice and (plan.divergence.low or 0.0) < high
        and plan.share(result.budget.kind) < result.best.share(result.budget.kind)
    ]  # fmt: skip
    if rivals:
        lines.append(f"{len(rivals)} cheaper plan(s) are not clearly worse on {result.images[1]} images")
    if result.correlation is not None and result.correlation < 0.7:
        lines.append(
            f"the sum of single changes ranks the plans differently than the measured ones (rank correlation "
            f"{result.correlation:.2f}): layers interact, and better plans may exist"
        )
    if result.steps < 60:
        lines.append(f"the mechanisms learned for {result.steps} steps only; more minutes make them more faithful")
    if result.images[1] < 50:
        lines.append(f"{result.images[1]} images judge the plans; 200 or more make the intervals narrower")
    return lines


def _never_cheaper(result: Recommendation) -> list[str]:
    """The mechanisms that save nothing at any layer, by what the budget is about."""
    kind = result.budget.kind
    mixers = dict.fromkeys(mixer for _, mixer in result.alone)
    return [
        spell_or_none(mixer)
        for mixer in mixers
        if all(
            cost_of(usage[mixer], kind) >= cost_of(usage[None], kind)
            for usage in result.costs.values()
            if mixer in usage
        )
    ]


def _key(model: UserModel, images: Images, question: Question) -> str:
    """Of all that the answer depends on, except the time that it may take."""
    mixers = ";".join(map(spell_or_none, question.mixers))
    asked = f"{question.budget}|{mixers}|{question.where}|{question.batch}|{question.steps}"
    return f"{digest(model.network, images)}|{model.label}|{model.size}|{asked}"
