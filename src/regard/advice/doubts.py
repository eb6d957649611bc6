"""What an answer of `regard advise` is not sure of."""

from regard.swapping.layer_plan import spell_or_none

from .answer import Recommendation
from .layer_costs import OWN
from .search import cost_of
from .user_model import UserModel


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
