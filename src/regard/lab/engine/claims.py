"""The gate and the claims of a study, judged from the outcomes of its runs. Needs no torch."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core import StoreError
from regard.lab.statistics.sequential import Differences, Looks, analyse, gate_passed, judge_analyses
from regard.lab.statistics.verdicts import WORDS, Verdict, correct, judge
from regard.measure.intervals import Pooled, interval, paired_interval, sampling_error, seed_pairs
from regard.pages.phrasing import count, join_with_and


@dataclass(frozen=True)
class Judged:
    """A claim as a sentence, with its verdict. share: its mean difference as a share of the gate's gain, None for
    another metric than the study's main one, or without a passed gate."""

    a: str
    b: str
    metric: str
    text: str
    verdict: Verdict
    share: float | None = None

    @property
    def sentence(self) -> str:
        """The claim, its verdict, and its size beside what attention brings."""
        return "; ".join(filter(None, (f"{self.text}: {self.verdict.sentence}", share_text(self.share))))


@dataclass(frozen=True)
class Gate:
    """Whether the baseline is better than every control: True, False, or None if that is undecided.

    gain: what the baseline brings over the better control (by mean), in the metric; None without both.
    """

    passed: bool | None
    sentence: str
    gain: float | None = None

    @property
    def word(self) -> str:
        """ "passed", "not passed" or "undecided"."""
        return "undecided" if self.passed is None else "passed" if self.passed else "not passed"

    def share(self, difference: float | None) -> float | None:
        """A difference as a share of the gain, None unless the gate is passed."""
        return difference / self.gain if self.passed and self.gain and difference is not None else None


def judge_gate(
    values: Mapping[str, Mapping[int, float]], controls: Sequence[str], baseline: str, metric: str,
    looks: Looks | None = None, first: Mapping[str, Mapping[int, float]] | None = None,
) -> Gate:  # fmt: skip
    """Passed if the baseline is better than every control, with the whole interval of each difference above zero.

    values: the metric by row and seed. Not passed if a control is as good or better on average: the seeds that would
    pass it are then not known. If the interval of a better baseline contains zero the gate is undecided, and the
    sentence has the number of seeds that would decide it.
    looks: of a study whose seeds are added until it is decided; then each difference has to be above zero in one of its
    interim analyses, which the sentence names. first: of these the values, those of `analysed_runs`.
    """
    if not controls:
        return Gate(None, "The study has no controls, so it cannot show that mixing tokens helps here.")
    parts: list[str] = []
    states: list[bool | None] = []
    found = [paired_interval(values.get(baseline, {}), values[label]) for label in controls]
    analysed = None if looks is None else _by_analyses(looks, gate_differences(first or values, controls, baseline))
    for index, (label, difference) in enumerate(zip(controls, found, strict=True)):
        verdict = judge(difference)
        worse = verdict.side < 0 or (verdict.word == "undecided" and (difference.mean or 0.0) <= 0)
        states.append(False if worse else True if verdict.side > 0 else None)
        if difference.low is None or difference.high is None:
            parts.append(f"{label}: {seed_pairs(difference.n)}, too few")
        else:
            note = "" if states[-1] is not None else f" ({verdict.reason or verdict.remedy})"
            note = note if analysed is None else analysed[1][index]
            parts.append(f"{label}: {difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]{note}")
    passed = False if False in states else None if None in states else True
    gains = [difference.mean for difference in found if difference.mean is not None]
    gain = min(gains) if len(gains) == len(controls) else None
    gate = Gate(passed if analysed is None else analysed[0], "", gain)
    return replace(gate, sentence=f"Gate {gate.word}: {baseline} minus each control in {metric}: {'; '.join(parts)}.")


def _by_analyses(looks: Looks, gate: Differences) -> tuple[bool | None, list[str]]:
    """(`Gate.passed`, what is said of each control) by interim analyses."""
    analysis = analyse(looks, gate)
    shown = analysis.p <= looks.level
    lost = shown & (analysis.side < 0)
    notes = [
        f" (by the interim analysis at {at})" if done else f" (not decided; the last analysis is at {looks.pairs[-1]})"
        for at, done in zip(analysis.at.tolist(), shown.tolist(), strict=True)
    ]
    return True if gate_passed(looks, gate) else False if lost.any() else None, notes


def judge_claims(
    snapshot: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], gate: Gate, failed: Mapping[str, int],
    residual: Pooled, first: Sequence[Mapping[str, Any]],
) -> tuple[Judged, ...]:  # fmt: skip
    """The claims of a snapshot whose rows it has, with verdicts corrected over all of them.

    runs: with their outcomes. failed: number of failed runs by row. residual: of the table, for pooled intervals.
    first: the `analysed_runs`.
    """
    scale, refusal = snapshot.get("scale", ""), ""
    if any(row.get("control") for row in snapshot["rows"]) and gate.passed is not True:
        refusal = "the baseline is not better than every control" if gate.passed is False else "the gate is undecided"
    looks, judged = stored_looks(snapshot), []
    alike = {row["label"] for row in snapshot["rows"] if not (row.get("control") or failed[row["label"]])}  # pooled
    analysis = None if looks is None else analyse(looks, claim_differences(snapshot, first))
    for index, claim in enumerate(judgeable(snapshot)):
        a, b, metric, rows = claim["a"], claim["b"], claim["metric"], claim_rows(claim)
        difference = interval(list(differences(runs, rows, metric).values()))
        sampling = _sampling(runs, a, b, metric) if len(rows) == 2 else None
        if looks is None or analysis is None or refusal or scale == "smoke":
            use_pooled = snapshot.get("pooled") and metric == snapshot["metric"] and len(rows) == 2 and {a, b} <= alike
            verdict = judge(
                difference, within=claim.get("within"), by=claim.get("by"), scale=scale, refusal=refusal,
                pooled=residual if use_pooled else None, sampling=sampling,
            )  # fmt: skip
        else:
            p, side, at = (part[index].item() for part in (analysis.p, analysis.side, analysis.at))
            late = difference.n - len(differences(first, rows, metric))
            verdict = judge_analyses(looks, difference, p, side, at, sampling, late)
        without = sum(failed[label] for label in set(rows))
        if without:
            verdict = replace(verdict, facts=f"{verdict.facts}; without {count(without, 'failed run')}")
        share = gate.share(difference.mean) if metric == snapshot["metric"] else None
        judged.append(Judged(a, b, metric, claim_text(claim, scale), verdict, share))
    verdicts = correct([claim.verdict for claim in judged])
    return tuple(replace(claim, verdict=verdict) for claim, verdict in zip(judged, verdicts, strict=True))


def stored_looks(snapshot: Mapping[str, Any]) -> Looks | None:
    """The interim analyses of a study whose seeds are added until it is decided, None for fixed seeds."""
    value = snapshot.get("decide")
    return None if value is None else Looks.from_json(value)


def judgeable(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The claims of a snapshot about rows that it has."""
    labels = {row["label"] for row in snapshot["rows"]}
    return [claim for claim in snapshot.get("claims") or () if labels >= set(claim_rows(claim))]


def claim_rows(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """The two or four rows of a claim."""
    return (claim["a"], claim["b"], *(claim.get("than") or ()))


def claim_differences(snapshot: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Differences:
    """The paired differences of the claims of `judgeable`, in the order of the runs: for analyses `analysed_runs`."""
    claims, at_paper = judgeable(snapshot), snapshot.get("scale") == "paper"
    return Differences(
        differences=as_array([list(differences(runs, claim_rows(c), c["metric"]).values()) for c in claims]),
        at=np.array([claim.get("by") or 0.0 if at_paper else 0.0 for claim in claims], float),
        within=np.array([claim.get("within") for claim in claims], float),  # None is NaN
    )


def analysed_runs(
    listed: Sequence[Mapping[str, Any]], ended: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Those of `runs` that interim analyses take: of each row the first seeds, up to one that has not ended.

    listed: all runs of a study, with its seeds in the order in which they are added; so an analysis keeps those it had,
    whatever ends later.
    """
    order = {seed: place for place, seed in enumerate(dict.fromkeys(run["seed"] for run in listed))}
    have = {(run["row"], run["seed"]) for run in ended}
    number = {
        row: next((place for seed, place in order.items() if (row, seed) not in have), len(order))
        for row in {run["row"] for run in runs}
    }
    taken = (run for run in runs if order[run["seed"]] < number[run["row"]])
    return sorted(taken, key=lambda run: order[run["seed"]])


def gate_differences(values: Mapping[str, Mapping[int, float]], controls: Sequence[str], baseline: str) -> Differences:
    """The baseline minus each control, in the order of the runs. values: the metric by row and seed, in this order."""
    base, others = values.get(baseline, {}), [values[label] for label in controls]
    rows = [[value - other[seed] for seed, value in base.items() if seed in other] for other in others]
    return Differences.against_zero(as_array(rows))


def as_array(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Rows of different lengths as an array, NaN at their ends."""
    value = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for line, row in zip(value, rows, strict=True):
        line[: len(row)] = row
    return value


def headline(claims: Sequence[Judged], gate: Gate, scale: str) -> str:
    """The verdicts on a study's claims in one sentence, with the numbers after correction."""
    number = count(len(claims), "claim")
    if not claims:
        return "The study makes no claims; its result is the table."
    if scale == "smoke":
        return f"Smoke scale only tests that everything runs: the {number} cannot be judged."
    if gate.passed is False:
        return f"The gate is not passed: the {number} cannot be judged at this scale."
    if all(claim.verdict.word == "not judged" for claim in claims):
        return f"The {number} {'is' if len(claims) == 1 else 'are'} not judged yet."
    counts = verdict_counts(claims)
    parts = [
        f"{n} {'is' if n == 1 else 'are'} {'only ' if word == 'suggested' else ''}{word}" for word, n in counts.items()
    ]
    return f"Of {number}, {join_with_and(parts)}."


def verdict_counts(claims: Sequence[Judged]) -> dict[str, int]:
    """The number of claims with each verdict, after correction; verdicts that no claim has are left out."""
    words = [claim.verdict.word for claim in claims]
    return {word: words.count(word) for word in WORDS if word in words}


def claim_text(claim: Mapping[str, Any], scale: str) -> str:
    """A claim as a sentence, as it is judged at a scale."""
    if claim.get("late"):
        return f"{claim_text({**claim, 'late': False}, scale)} (added after results were seen)"
    a, b, metric = claim["a"], claim["b"], claim["metric"]
    if claim.get("than"):
        return f"{a} is further above {b} than {claim['than'][0]} is above {claim['than'][1]}, in {metric}"
    if claim.get("within") is not None:
        return f"{a} is as good as {b} in {metric}, within {claim['within']:g}"
    text = f"{a} is above {b} in {metric}"
    if claim.get("by") is None:
        return text
    by = f"by at least {claim['by']:g}"
    return f"{text} {by}" if scale == "paper" else f"{text} (direction only; at paper scale {by})"


def share_text(share: float | None) -> str:
    """A share of what attention brings as text, "" for None."""
    return "" if share is None else f"{100 * share:.0f} % of what attention brings over the better control"


def row_values(runs: Sequence[Mapping[str, Any]], label: str, metric: str) -> dict[int, float]:
    """The metric of a row's finished runs by seed, in the order of the runs."""
    finished = (run for run in runs if run["row"] == label and run["outcome"].get("status") == "done")
    values = {int(run["seed"]): metric_of(run["outcome"], metric) for run in finished}
    return {seed: value for seed, value in values.items() if value is not None}


def metric_of(outcome: Mapping[str, Any] | None, metric: str) -> float | None:
    """A metric of an outcome; None without it, or without an outcome."""
    value = ((outcome or {}).get("metrics") or {}).get(metric)
    return float(value) if isinstance(value, int | float) else None


def differences(runs: Sequence[Mapping[str, Any]], rows: Sequence[str], metric: str) -> dict[int, float]:
    """a - b of two rows, (a - b) - (c - d) of four, by seed, over the seeds that all of them have, in the order of the
    runs."""
    values = [row_values(runs, row, metric) for row in rows]
    signs = (1, -1, -1, 1)[: len(rows)]
    seeds = [seed for seed in values[0] if all(seed in row for row in values)]
    return {seed: sum(sign * row[seed] for sign, row in zip(signs, values, strict=True)) for seed in seeds}


def sample_values(outcome: Mapping[str, Any], metric: str) -> NDArray[np.float64] | None:
    """What each test sample contributes to a metric, (n,), in its unit; None if that is not recorded.

    Right and wrong images count as 100 and 0 of "top1". Raises: StoreError.
    """
    bits, number = outcome.get("bits") if metric == "top1" else None, (outcome.get("data") or {}).get("test")
    text = bits or (outcome.get("samples") if outcome.get("sampled") == metric else None)
    if not text or not isinstance(number, int):
        return None
    try:
        data = base64.b64decode(text, validate=True)
        values = np.frombuffer(data, np.uint8 if bits else "<f4")
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"the samples of run {outcome.get('key')} are damaged ({error}); run it again") from error
    if len(values) * (8 if bits else 1) < number:
        return None
    return 100 * np.unpackbits(values, count=number).astype(np.float64) if bits else values[:number].astype(np.float64)


def _sampling(runs: Sequence[Mapping[str, Any]], a: str, b: str, metric: str) -> float | None:
    """The `sampling_error` of a - b, over the seeds that both rows have."""
    samples: dict[str, dict[int, NDArray[np.float64]]] = {a: {}, b: {}}
    for run in runs:
        done = run["row"] in samples and run["outcome"].get("status") == "done"
        if done and (values := sample_values(run["outcome"], metric)) is not None:
            samples[run["row"]][int(run["seed"])] = values
    seeds = sorted(samples[a].keys() & samples[b].keys())
    return sampling_error([samples[a][seed] for seed in seeds], [samples[b][seed] for seed in seeds])
