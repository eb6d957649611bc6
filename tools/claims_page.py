"""docs/claims.md, the register of claims: `python -m tools.claims_page`.

Verdicts are read from docs/results, counts and hours from docs/counts.json (`python -m tools.count_claims`).
tests/tools/test_claims_page.py fails when the page is stale.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from regard.lab.engine.analysis import run_analysis
from regard.lab.engine.study import Claim, Study
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES, STUDIES, load_analysis, load_study
from regard.lab.studies.paper_claim import COUNTED, KINDS, PaperClaim, text_of
from regard.lab.studies.papers import ESA_PAPER, PAPERS
from regard.lab.studies.published_sizes import verdict
from regard.lab.studies.register import REGISTER
from tools.docs_pages import table
from tools.generate import write
from tools.site.evidence import ROOT, Evidence, all_evidence

NOTE = "<!-- written by tools/claims_page.py: run `make generated`, do not edit -->"
PAGE = ROOT / "docs" / "claims.md"
COUNTS = ROOT / "docs" / "counts.json"
STATES = (
    "supported", "contradicted", "suggested", "suggested against", "undecided", "not judged", "computed", "reproduced",
    "reproduced in part", "not reproduced", "not run", "not here",
)  # fmt: skip
"""Of an entry, the first that any of its claims has; those before "not judged" are verdicts on training."""
JUDGED = (*STATES[:5], *STATES[7:10])
SLOW = ("host_counts",)
"""Analyses that take most of a minute, and whose counts docs/counts.json has."""
NEAR = 0.02
"""A difference that is not listed."""
DOUBLED = ("ska_table1", "ska_table2")
"""Studies whose paper prints two FLOPs for a multiply-accumulate."""
AS_PRINTED = ("rounded", "cut off")
NAMES = {"params": "parameters", "macs": "MACs"}
FEW = 3
"""Verdicts that are written out one by one."""


@dataclass
class Fate:
    """What became of an entry: the states of all that judges it, and lines of text about them."""

    states: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)

    def add(self, state: str, line: str) -> None:
        """Note one state with its text."""
        self.states.add(state)
        self.lines.append(line)

    @property
    def state(self) -> str:
        """The first of `STATES` that was found."""
        return next(state for state in STATES if state in self.states)


def digits(printed: float, count: int, doubled: bool = False) -> str:
    """Whether a count has the printed digits: "rounded", "cut off", or by how much it differs.

    Numbers are read as printed in millions below 10^8.5 and in 10^9 above, with at least two digits.
    """
    factor = 2 if doubled else 1
    printed, count = printed * factor, count * factor
    unit, letter = (1e6, "M") if printed < 3e8 and not doubled else (1e9, "G")
    value = printed / unit
    text = f"{value:.10g}"
    text += ".0" if value < 10 and "." not in text else ""
    found = verdict(count, text + letter)
    return {"R": "rounded", "R,T": "rounded", "T": "cut off"}.get(found) or f"differs by {count / printed - 1:+.1%}"


@cache
def counts() -> Mapping[str, Any]:
    """docs/counts.json: printed and own counts by study, and hours of desk scales."""
    value: Mapping[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return value


def matching(names: Sequence[str]) -> list[str]:
    """Studies of the counts that globs name."""
    return [name for name in counts()["counts"] if any(Path(name).match(glob) for glob in names)]


def counted(names: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """(study, printed count, verdict on it) of studies that globs name."""
    for name in matching(names):
        for line in counts()["counts"][name]:
            doubled = name in DOUBLED and line["count"] == "macs"
            yield name, line, "not built" if line["here"] is None else digits(line["printed"], line["here"], doubled)


def fate(entry: PaperClaim, evidence: Mapping[str, Sequence[Evidence]]) -> Fate:
    """Everything that judges an entry."""
    found = Fate()
    for name in STUDIES:
        study = load_study(name)
        claims = [claim for claim in study.claims if entry.judged_by(name, claim)]
        if claims:
            _of_study(found, study, claims, evidence.get(name, ()))
    if entry.counts:
        _of_counts(found, entry)
    if entry.analysis in evidence:
        table = evidence[entry.analysis][0].written_table
        found.add("computed", f"computed from trained networks: [table]({table})")
    elif entry.analysis and entry.analysis not in SLOW:
        _of_analysis(found, entry)
    if entry.reason:
        found.add("not here", entry.reason)
    return found


def _of_study(found: Fate, study: Study, claims: Sequence[Claim], evidence: Sequence[Evidence]) -> None:
    desk = study.settings.get("desk")
    labels = {row.label for row in desk.rows} if desk else set()
    here = [claim for claim in claims if {claim.a, claim.b, *(claim.than or ())} <= labels]
    if not here:
        found.add("not here", f"`{study.name}`: rows of the paper scale only")
        return
    if not evidence:
        hours = counts()["hours"].get(study.name)
        found.add("not run", f"`{study.name}`: not run{f', about {hours:g} h' if hours else ''}")
    for committed in evidence:
        _of_table(found, committed, here)


def _of_table(found: Fate, evidence: Evidence, claims: Sequence[Claim]) -> None:
    """The verdicts of one committed table."""
    verdicts = {line["text"].partition(" (direction")[0]: line["verdict"] for line in evidence.claims}
    missing = [claim for claim in claims if text_of(claim) not in verdicts]
    judged = [(text_of(claim), verdicts[text_of(claim)]) for claim in claims if claim not in missing]
    name = f"[{evidence.folder.name}]({evidence.written_table})"
    found.states |= {together({_word(value) for _, value in judged})} if judged else set()
    open_, lines = [value for _, value in judged if value["word"] == "not judged"], list[str]()
    if len(open_) > FEW:
        means = [value["interval"]["mean"] for value in open_]
        shown = ", ".join("no runs" if mean is None else f"{mean:+.1f}" for mean in means)
        why = open_[0]["sentence"].removeprefix("not judged: ").partition("; ")[0]
        reason = "without runs" if set(means) == {None} else f"not judged ({why}): {shown}"
        lines = [f"{len(open_)} differences {reason}"]
        judged = [(text, value) for text, value in judged if value not in open_]
    lines = [_line(text, value, len(claims) > 1) for text, value in judged] + lines
    if missing:
        found.states.add("not run")
        lines += [f"{text_of(claim)}: not in the committed table" for claim in missing]
    found.lines.append(f"{name}: {'; '.join(lines)}")


def together(words: Set[str]) -> str:
    """The verdict of an entry that several claims of a table judge: it holds only if all of them do."""
    against = next((word for word in ("contradicted", "suggested against") if word in words), "")
    if against or len(words) == 1:
        return against or next(iter(words))
    return "suggested" if words <= {"supported", "suggested"} else "undecided"


def _word(value: Mapping[str, Any]) -> str:
    """A verdict's word; where its own interval suggests the opposite, that."""
    against = value["word"] == "suggested" and value["side"] < 0
    return "suggested against" if against else str(value["word"])


def _line(text: str, value: Mapping[str, Any], named: bool) -> str:
    """A verdict with its interval, after the claim if there are several."""
    sentence = value["sentence"] if value["word"] == "not judged" else value["sentence"].partition("; ")[0]
    return f"{text}: {sentence}" if named else sentence


def _of_counts(found: Fate, entry: PaperClaim) -> None:
    """How many counts have the printed digits; the state too, unless an analysis follows the paper's own rules."""
    total, equal, off = Counter[str](), Counter[str](), dict.fromkeys(COUNTED, 0.0)
    for _, line, word in counted(entry.counts):
        total[line["count"]] += 1
        equal[line["count"]] += word in AS_PRINTED
        off[line["count"]] = max(off[line["count"]], abs(change(line)))
    found.lines += [
        f"{NAMES[name]} of the models built here: {equal[name]} of {total[name]} as printed"
        + (f", the others off by {off[name]:.1%} or less" if equal[name] < total[name] else "")
        for name in total
    ]
    if entry.analysis not in ANALYSES or entry.analysis in SLOW:
        whole, some = total == equal, any(equal.values())
        found.states.add("reproduced" if whole else "reproduced in part" if some else "not reproduced")


def change(line: Mapping[str, Any]) -> float:
    """How far our count lies from the printed one, as a share; 0 if it was not built."""
    return 0.0 if line["here"] is None else line["here"] / line["printed"] - 1


def _of_analysis(found: Fate, entry: PaperClaim) -> None:
    """The verdicts of the sheets about the entry's place, or the notes of sheets without verdicts."""
    if entry.analysis == "errata":
        found.add("not reproduced", "see [errata](errata.md)")
        return
    sheets = [sheet for sheet in analysed(entry.analysis) if entry.place in sheet["title"]] or analysed(entry.analysis)
    words = [
        str(row[index])
        for sheet in sheets
        for index, head in enumerate(sheet["columns"])
        if head.startswith("verdict")
        for row in sheet["rows"]
        if row[index] not in ("base", "cited", "not printed")
    ]
    good = sum(word in (*AS_PRINTED, "equal", "same order", "reproduced") for word in words)
    if words:
        state = "reproduced" if good == len(words) else "reproduced in part" if good else "not reproduced"
        found.add(state, f"by the paper's counting: {good} of {len(words)} as printed")
    else:
        notes = [sheet["note"].rstrip(".") for sheet in sheets]
        found.add("reproduced" if all(map(_all_of, notes)) else "reproduced in part", "; ".join(notes))


def _all_of(note: str) -> bool:
    """Whether all parts "n of m" of a note have n = m."""
    words = note.replace(",", "").split()
    pairs = [(words[i - 1], words[i + 1]) for i, word in enumerate(words) if word == "of" and words[i - 1].isdigit()]
    return all(a == b for a, b in pairs)


@cache
def analysed(name: str) -> Sequence[Mapping[str, Any]]:
    """The sheets of an analysis that needs no runs."""
    with tempfile.TemporaryDirectory() as folder:
        sheets: Sequence[Mapping[str, Any]] = run_analysis(load_analysis(name), Results(Path(folder)))["sheets"]
        return sheets


def fates() -> dict[str, list[tuple[PaperClaim, Fate]]]:
    """Every entry with its fate, by paper."""
    evidence: dict[str, list[Evidence]] = {}
    for found in all_evidence():
        evidence.setdefault(found.name, []).append(found)
    return {paper: [(entry, fate(entry, evidence)) for entry in entries] for paper, entries in REGISTER.items()}


def page() -> str:
    """The page."""
    found = fates()
    entries = [pair for pairs in found.values() for pair in pairs]
    tally = {kind: Counter(f.state for entry, f in entries if entry.kind == kind) for kind in KINDS}
    states = [state for state in STATES if any(tally[kind][state] for kind in KINDS)]
    summary = [
        (KINDS[kind], str(words.total()), str(sum(words[state] for state in JUDGED)))
        + tuple(str(words[state] or "") for state in states)
        for kind, words in tally.items()
    ]
    hours = math.fsum(counts()["hours"].get(name, 0) for name in _not_run(entries))
    parts = [
        f"""{NOTE}
# Claims of the papers

{len(entries)} claims of the four papers in our words, what they print, and what became of each here. Verdicts are read
from the committed [results](results/README.md), which are of small networks and small images (desk scale): they tell
whether a direction holds there, not whether a printed number is right. "Supported" and "contradicted" are
[corrected](deciding.md) over a study's claims. An entry that several claims of a table judge is
supported only if all of them are, and counts by its most decided table.
Studies that nobody ran (`regard study show NAME` has the hours of each) would take about {hours:.0f} hours, one run
after another; these hours follow from timed steps of each study's baseline, and of the networks that it starts or
learns from, on one core beside other jobs: read them as an order of magnitude.

{table(("kind", "claims", "judged", *states), summary)}

Not judged: attention does not clearly help in that network (the gate), so a claim on it says nothing, or its rows have
fewer than three seeds. Computed: read from trained networks, without a verdict. Not here: this scale cannot judge it,
and why. [Errata](errata.md) lists what cannot be as printed.""",
        *(_section(paper, pairs) for paper, pairs in found.items()),
        _misfits(),
    ]
    return "\n\n".join(parts) + "\n"


def _not_run(entries: Sequence[tuple[PaperClaim, Fate]]) -> set[str]:
    """The studies that have a claim which could be judged at desk scale, and no evidence."""
    return {line.split("`")[1] for _, found in entries for line in found.lines if ": not run" in line}


def _section(paper: str, pairs: Sequence[tuple[PaperClaim, Fate]]) -> str:
    rows = [
        (f"`{paper}:{entry.id}`", entry.place, entry.says, entry.printed, f"**{f.state}**", _where(entry, f))
        for entry, f in pairs
    ]
    return f"## {PAPERS[paper]}\n\n{table(('id', 'where', 'claim', 'printed', 'state', 'how it is known'), rows)}"


def _where(entry: PaperClaim, found: Fate) -> str:
    named = [f"`{entry.study}`"] if entry.study else [f"`{name}`" for name in matching(entry.counts)]
    named += [f"`{entry.analysis}`"] if entry.analysis in ANALYSES else []
    return "; ".join(found.lines) + (f" ({', '.join(named)})" if named else "")


def _misfits() -> str:
    """The printed counts that the models built here do not have."""
    lines = list(counted("*"))
    off = [line for line in lines if line[2] not in AS_PRINTED]
    rows = [
        (f"`{name}`", line["row"], NAMES[line["count"]], f"{line['printed']:,.0f}",
         "" if line["here"] is None else f"{line['here']:,}", word)
        for name, line, word in off
        if line["here"] is None or abs(change(line)) > NEAR
    ]  # fmt: skip
    return f"""## Printed counts that are not reproduced

Of {len(lines)} printed parameters and MACs whose models are built here, {len(lines) - len(off)} have the printed digits
(rounded or cut off), {len(off) - len(rows)} are within {NEAR:.0%}, and {len(rows)} are not. Where the SKA paper counts
two FLOPs for a multiply-accumulate, printed MACs are half of them. Detectors and segmenters are counted as whole models
here; by the counting rules of *{ESA_PAPER}*
(`regard study show esa_costs`), with its printed base, all but a few of its numbers are reproduced.
`python -m tools.count_claims` counts again.

{table(("study", "row", "count", "printed", "here", "verdict"), rows)}"""


def main() -> None:
    """Write the page if it differs."""
    write(PAGE, page())


if __name__ == "__main__":
    main()
