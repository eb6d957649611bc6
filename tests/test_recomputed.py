"""Every figure of the committed tables, recomputed from the outcomes with numpy and scipy alone.

Nothing of Regard is imported: a mistake in its statistics cannot confirm itself here.
"""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FILES = sorted(RESULTS.rglob("evidence.json"))


def interval(x: list[float]) -> tuple[float, float, float]:
    if len(x) < 3:
        return np.nan, -np.inf, np.inf
    if np.ptp(x) == 0:
        return x[0], x[0], x[0]
    low, high = stats.t.interval(0.95, len(x) - 1, np.mean(x), stats.sem(x))
    return np.mean(x), low, high


def p_value(x: list[float], within: float | None) -> float:
    if len(x) < 3 or np.ptp(x) == 0:  # nothing is known of their deviation
        return 1.0
    if within is None:
        return stats.ttest_1samp(x, 0).pvalue
    one_sided = {(edge, side): stats.ttest_1samp(x, edge, alternative=side).pvalue
                 for edge in (-within, within) for side in ("less", "greater")}  # fmt: skip
    inside = max(one_sided[-within, "greater"], one_sided[within, "less"])
    outside = min(one_sided[-within, "less"], one_sided[within, "greater"])
    return min(1.0, 2 * inside, 2 * outside)


def p_of(x: list[float], within: float | None, decide: dict | None) -> float:
    """Of all seeds; with `--decide` the smallest p over share of its analyses, each of its first seeds."""
    if decide is None:
        return p_value(x, within)
    looks = zip(decide["pairs"], decide["shares"], strict=True)
    return min(1.0, *(p_value(x[:pairs], within) / share for pairs, share in looks if pairs <= len(x)))


def word(x: list[float], p: float, survives: bool, within: float | None) -> str:
    for_it = np.mean(x) > 0 if within is None else abs(np.mean(x)) < within
    return "undecided" if p >= 0.05 else ("supported" if for_it else "contradicted") if survives else "suggested"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RESULTS)))
def test_the_committed_figures_follow_from_the_outcomes(file: Path) -> None:
    evidence = json.loads(file.read_text())
    snapshot, table = evidence["snapshot"], evidence["table"]
    assert json.loads(file.with_name("table.json").read_text()) == table
    done = {run["key"]: run["metrics"][snapshot["metric"]] for run in evidence["outcomes"] if run["status"] == "done"}
    seeds: dict[str, dict[int, float]] = {row["label"]: {} for row in snapshot["rows"]}
    for run in snapshot["runs"]:
        if run["key"] in done:
            seeds[run["row"]][run["seed"]] = done[run["key"]]

    def differences(*rows: str) -> list[float]:
        common = sorted(set.intersection(*(set(seeds[row]) for row in rows)))
        return [sum(s * seeds[row][i] for s, row in zip((1, -1, -1, 1), rows, strict=False)) for i in common]

    base = snapshot["baseline"]
    against = {row["label"]: row.get("against") or base for row in snapshot["rows"]}
    for row in table["rows"]:
        values = list(seeds[row["label"]].values())
        assert row["n"] == len(values)
        if row["n"] >= 3:
            expected = np.clip(interval(values), 0, 100)  # a metric is a share in percent
            assert expected == pytest.approx((row["mean"], row["low"], row["high"]))
        if row["label"] != base and row["difference"]["n"] >= 3:
            expected = interval(differences(row["label"], against[row["label"]]))
            assert expected == pytest.approx([row["difference"][key] for key in ("mean", "low", "high")])

    to_controls = [interval(differences(base, row["label"])) for row in snapshot["rows"] if row["control"]]
    decide = snapshot.get("decide")
    controls = [differences(base, row["label"]) for row in snapshot["rows"] if row["control"]]
    passed = all(low > 0 for _, low, _ in to_controls) and all(p_of(x, None, decide) <= 0.05 for x in controls)
    assert (table["gate"]["passed"] is True) == passed
    if passed:
        assert table["gate"]["gain"] == pytest.approx(min(mean for mean, _, _ in to_controls))
    claims = {(c["a"], c["b"], *(c.get("than") or ())): c.get("within") for c in snapshot["claims"]}
    claims = {rows: within for rows, within in claims.items() if set(rows) <= set(seeds)}
    assert len(claims) == len(table["claims"])
    x = [differences(*rows) for rows in claims]
    p = [
        p_of(d, within, decide) if passed and len(d) >= 3 else 1.0 for d, within in zip(x, claims.values(), strict=True)
    ]
    survives = np.zeros(len(p), bool)
    for rank, index in enumerate(np.argsort(p)):
        if p[index] > 0.05 / (len(p) - rank):
            break
        survives[index] = True
    for claim, d, value, holds, within in zip(table["claims"], x, p, survives, claims.values(), strict=True):
        verdict = claim["verdict"]
        equal = verdict["p"] is None and len(set(d)) == 1  # which tells no deviation
        if not passed or len(d) < 3 or equal:
            assert verdict["word"] == "not judged"
            continue
        assert verdict["p"] == pytest.approx(value)
        assert interval(d) == pytest.approx([verdict["interval"][key] for key in ("mean", "low", "high")])
        assert verdict["word"] == word(d, value, holds, within)
        assert claim["share"] == pytest.approx(np.mean(d) / table["gate"]["gain"])
    words = [claim["verdict"]["word"] for claim in table["claims"]]
    unknown = set(words) == {"not judged"}
    assert not (passed and unknown) or table["headline"] == f"The {len(words)} claims are not judged yet."
    for name in set(words) if passed and not unknown else ():
        assert f"{words.count(name)} {'is' if words.count(name) == 1 else 'are'}" in table["headline"]
    for page in (file.with_name("table.md"), RESULTS / "README.md"):
        assert table["headline"] in page.read_text(), "run tools/redraw_results.py, and correct docs/results/README.md"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RESULTS)))
def test_the_errors_of_the_test_sample_follow_from_the_samples(file: Path) -> None:
    evidence = json.loads(file.read_text())
    runs = {run["key"]: run for run in evidence["outcomes"] if run["status"] == "done"}
    scores: dict[str, dict[int, np.ndarray]] = {row["label"]: {} for row in evidence["snapshot"]["rows"]}
    for run in evidence["snapshot"]["runs"]:
        if run["key"] in runs:
            outcome = runs[run["key"]]
            if outcome.get("bits"):
                bits = np.frombuffer(base64.b64decode(outcome["bits"]), np.uint8)
                scores[run["row"]][run["seed"]] = 100.0 * np.unpackbits(bits, count=outcome["data"]["test"])
            elif outcome.get("samples"):
                scores[run["row"]][run["seed"]] = np.frombuffer(base64.b64decode(outcome["samples"]), "<f4")
    for claim in evidence["table"]["claims"]:
        if claim["verdict"]["sampling"] is not None:
            a, b = scores[claim["a"]], scores[claim["b"]]
            mean = np.mean([a[seed].astype(float) - b[seed] for seed in a.keys() & b.keys()], axis=0)
            assert claim["verdict"]["sampling"] == pytest.approx(stats.sem(mean))


@pytest.mark.parametrize("file", sorted(RESULTS.glob("advice/*.json")), ids=lambda file: file.stem)
def test_the_correlations_of_advice_follow_from_its_plans(file: Path) -> None:
    content = json.loads(file.read_text())
    drawn = [record for record in content["records"] if not record["recommended"]]
    accuracy = [np.mean(record["top1"]) for record in drawn]
    half = np.argsort([record["divergence"] for record in drawn])[: len(drawn) // 2]

    def ranks(name: str, plans: np.ndarray) -> float:
        return -stats.spearmanr([drawn[i][name] for i in plans], [accuracy[i] for i in plans])[0]

    found = {name: ranks(name, np.arange(len(drawn))) for name in ("divergence", "swapped", "layer_error", "macs")}
    found["divergence, better half"] = ranks("divergence", half)
    times = [[record[f"latency_{kind}"] for record in drawn] for kind in ("predicted", "measured")]
    found["latency"] = stats.spearmanr(*times)[0]
    shown = " ".join(file.parents[2].joinpath("advice.md").read_text().split())
    for name, value in found.items():
        summary = content["summary"][name]
        assert summary["value"] == pytest.approx(value)
        assert f"{value:.2f} [{summary['low']:.2f}, {summary['high']:.2f}]" in shown
    recommended = content["summary"]["recommended"]
    assert recommended["top1"] == pytest.approx(np.mean(content["records"][-1]["top1"]))
    assert recommended["best of all"] == pytest.approx(max(accuracy))
    within = [mean for mean, time in zip(accuracy, times[1], strict=True) if time <= 0.8]
    assert recommended["best of those within the budget"] == (pytest.approx(max(within)) if within else None)
    for figure in (f"{recommended['top1']:.1f} % at {recommended['latency']:.2f}x", f"{max(accuracy):.1f} %"):
        assert figure in shown
