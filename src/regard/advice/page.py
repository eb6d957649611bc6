"""The page of `regard advise --data`: the recommended plan, the verified plans, each layer, and the doubts."""

from collections import Counter
from collections.abc import Iterable, Mapping

from regard.core import MixerConfig
from regard.pages.analysis_page import render_sheets
from regard.pages.sheets import Cell, Chart, Sheet
from regard.swapping.removed import Removed

from .answer import Recommendation, answer, label, short_plan
from .attention_use import summary

LABELS = "ABCDEFGHIJKLMNOP"


def render_advice(result: Recommendation) -> str:
    """The page as HTML."""
    learned, judged = result.images
    return render_sheets(
        "regard advise",
        f"{result.model}: which attention at which layer",
        " ".join(answer(result)),
        list(_sheets(result)),
        [
            f"{learned} images to learn from ({result.steps} steps), {judged} others to judge by; no label was read. "
            f"Times: {result.clock}, batches of {result.batch}, in turns; {result.seconds / 60:.1f} minutes in all.",
            f"The output is judged as {result.judge}. Divergence of a plan from the model as it was: "
            f"{result.judge.distance}; with 95 % intervals over images, 0 is no change. Agreement: "
            f"{result.judge.kept}.",
        ],
    )


def _sheets(result: Recommendation) -> Iterable[Sheet]:
    if result.doubts:
        yield Sheet(title="What this is not sure of", columns=("doubt",), rows=tuple((line,) for line in result.doubts))
    yield _plans(result)
    yield _assignments(result)
    yield _alone(result)
    if isinstance(result.use, Mapping):
        yield _use(result)
    yield _costs(result)


def _plans(result: Recommendation) -> Sheet:
    """The verified plans, with a chart of divergence over the budget's kind."""
    kind = {"latency": "time", "memory": "peak memory", "macs": "multiply-accumulates"}[result.budget.kind]
    columns = ("plan", kind, "divergence", "low", "high", "agreement %", "expected", "role")
    rows = tuple(
        (
            f"{letter}: {short_plan(plan, result.costs)}", round(plan.share(result.budget.kind), 3),
            round(plan.divergence.mean or 0.0, 5),
            None if plan.divergence.low is None else round(max(plan.divergence.low, 0.0), 5),
            None if plan.divergence.high is None else round(plan.divergence.high, 5),
            round(plan.agreement.mean or 0.0, 1), round(plan.predicted, 5),
            "recommended" if plan is result.best else "others",
        )
        for letter, plan in zip(LABELS, result.plans, strict=False)
    )  # fmt: skip
    note = (
        "Each plan was run end to end. low, high: of the divergence, its 95 % interval. expected: the sum of the "
        "divergences of its changes alone."
    )
    chart = Chart(x=kind, y="divergence", series="role")
    return Sheet(title="Plans", columns=columns, rows=rows, note=note, chart=chart)


def _assignments(result: Recommendation) -> Sheet:
    labels = LABELS[: len(result.plans)]
    rows = tuple(
        (name, *(label(plan.choice.get(name)) for plan in result.plans[: len(labels)])) for name in result.costs
    )
    return Sheet(title="What each plan has at each layer", columns=("layer", *labels), rows=rows)


def _alone(result: Recommendation) -> Sheet:
    mixers = list(dict.fromkeys(mixer for row in result.costs.values() for mixer in row if mixer is not None))
    images = len(next(iter(result.alone.values())).distance) if result.alone else 0

    def value(name: str, mixer: MixerConfig) -> Cell:
        change = result.alone.get((name, mixer))
        if change is None:
            return "refused" if (name, mixer) in result.refused else "saves nothing"
        return round(float(change.distance.mean()), 5)

    rows = tuple((name, *(value(name, mixer) for mixer in mixers)) for name in result.costs)
    note = (
        f"Divergence of the output with one change alone, after learning, on {images} images. none: without "
        f"attention. saves nothing: it costs no less than the layer's own attention, by what {result.budget.kind} "
        "counts, and was left out."
    )
    if result.refused:
        reasons = Counter((mixer, why.replace(name, "it")) for (name, mixer), why in result.refused.items())
        texts = [f"{label(mixer)} at {number} layers ({why})" for (mixer, why), number in reasons.items()]
        note = f"{note} Refused: {'; '.join(texts)}."
    return Sheet(title="Each layer alone", columns=("layer", *map(label, mixers)), rows=rows, note=note)


def _use(result: Recommendation) -> Sheet:
    assert isinstance(result.use, Mapping)
    rows = tuple(
        (name, use.word, round(use.distance, 3), round(use.tokens, 3), round(use.prefix, 3))
        for name, use in result.use.items()
    )
    note = (
        f"Of the model as it was, means over {result.looked_at} images, heads and queries. "
        "distance: of the attended tokens, 1 is that "
        "under equal weights. tokens: share that a query takes in; where attention is in windows both are inside a "
        "window. prefix: weight on class tokens and registers."
    )
    removed = {name: float(one.distance.mean()) for (name, mixer), one in result.alone.items() if mixer == Removed()}
    note = " ".join([note, *(f"{line[0].upper()}{line[1:]}." for line in summary(result.use, removed))])
    return Sheet(
        title="Where attention looks", columns=("layer", "attention", "distance", "tokens", "prefix"), rows=rows,
        note=note,
    )  # fmt: skip


def _costs(result: Recommendation) -> Sheet:
    rows: list[tuple[Cell, ...]] = []
    seen = []
    for name, usage in result.costs.items():
        if usage in seen:
            continue
        seen.append(usage)
        own = usage[None]
        for mixer, used in usage.items():
            rows.append(
                (
                    name, label(mixer), round(used.seconds * 1e3, 3),
                    round(used.seconds / own.seconds, 3), None if used.memory is None else round(used.memory / 1e6, 2),
                    round(used.macs / max(own.macs, 1), 3),
                )
            )  # fmt: skip
    columns = ("layer", "mechanism", "ms", "time", "peak MB", "multiply-accumulates")
    note = "One layer of each kind; time and multiply-accumulates also as shares of its own attention."
    return Sheet(title="Costs of a layer", columns=columns, rows=tuple(rows), note=note, folded=False)
