"""What an answer of `regard advise` is not sure of."""

import math

import numpy as np

from regard.swapping.layer_plan import spell_or_none

from .answer import Recommendation
from .layer_costs import OWN
from .search import cost_of
from .user_model import UserModel

KEPT = 90.0
"""Percent of what agrees; below it a plan needs learning."""
NEAR = 0.05
"""Of a budget's share."""


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
    lines += _nowhere(result)
    lines += _no_numbers(result)
    if not result.met:
        lines.append(
            f"no plan of these mechanisms meets {result.budget}; the nearest reaches "
            f"{result.best.share(result.budget.kind):.2f}x"
        )
    lines += _hard_budget(result)
    high = result.best.divergence.high or 0.0
    rivals = [
        plan
        for plan in result.plans
        if plan is not result.best and (plan.divergence.low or 0.0) < high
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


def _hard_budget(result: Recommendation) -> list[str]:
    """What a budget costs that leaves little attention: what it cannot save, and a plan that is nearly within it."""
    kind, share, best = result.budget.kind, result.budget.share, result.best
    lines = []
    attention = sum(cost_of(row[OWN], kind) for row in result.costs.values()) / max(cost_of(result.usage, kind), 1e-12)
    if kind != "memory" and share < 1.1 - attention:
        lines.append(
            f"the attention layers are {100 * attention:.0f} % of the model's {kind}, so {result.budget} leaves little "
            "of them"
        )
    removed = sum(spell_or_none(mixer) == "None" for mixer in best.choice.values())
    if kind != "memory" and removed and (least := _least_with_attention(result)) > share:
        lines.append(
            f"with attention of some kind in every layer this model costs {least:.2f}x at least, so that {removed} "
            f"layers have none within {result.budget}: a budget of {math.ceil(20 * least) / 20:.2f}x or more keeps it"
        )
    if (agreement := best.agreement.mean or 0.0) < KEPT:
        kept = result.judge.sentence.format(f"{agreement:.0f}")
        lines.append(
            f"the recommended plan {kept} only: teach it (regard distill) and fine-tune it before you use it, or ask "
            "for less"
        )
    near = [plan for plan in result.plans if share < plan.share(kind) <= share + NEAR]
    plan = min(near, key=lambda plan: plan.loss, default=None)
    if plan is not None and (plan.divergence.high or 0.0) < (best.divergence.low or 0.0) / 2:
        lines.append(
            f"a plan that misses the budget by little, {plan.share(kind):.2f}x, changes the output much less "
            f"({plan.divergence.mean:.2g}{result.judge.unit}, agreement {plan.agreement.mean:.0f} %): "
            f"{plan.spelling or 'as it was'}"
        )
    return lines


def _least_with_attention(result: Recommendation) -> float:
    """The share of the cheapest plan that removes the attention of no layer, by the costs of its layers."""
    kind = result.budget.kind
    saved = (
        cost_of(row[OWN], kind)
        - min(cost_of(usage, kind) for mixer, usage in row.items() if mixer is OWN or spell_or_none(mixer) != "None")
        for row in result.costs.values()
    )
    return 1 - sum(saved) / max(cost_of(result.usage, kind), 1e-12)


def _nowhere(result: Recommendation) -> list[str]:
    """The mechanisms that fit no layer, with the first reason."""
    lines = []
    for mixer in dict.fromkeys(mixer for _, mixer in result.refused):
        if not any(mixer in row for row in result.costs.values()):
            reason = next(why for (_, other), why in result.refused.items() if other == mixer)
            lines.append(f"{spell_or_none(mixer)} fits no layer: {reason}")
    return lines


def _no_numbers(result: Recommendation) -> list[str]:
    """The number of changes whose outputs are no numbers, with the first of them."""
    lost = [change for change, scores in result.alone.items() if not np.isfinite(scores.distance).all()]
    if not lost:
        return []
    name, mixer = lost[0]
    return [
        f"{len(lost)} changes, first {spell_or_none(mixer)} at {name}, make outputs that are no numbers "
        "(inf or nan), so no plan has them"
    ]


def _never_cheaper(result: Recommendation) -> list[str]:
    """The mechanisms that save nothing at any layer, by what the budget is about."""
    kind = result.budget.kind
    mixers = dict.fromkeys(mixer for row in result.costs.values() for mixer in row if mixer is not OWN)
    return [
        spell_or_none(mixer)
        for mixer in mixers
        if all(
            cost_of(usage[mixer], kind) >= cost_of(usage[OWN], kind)
            for usage in result.costs.values()
            if mixer in usage
        )
    ]
