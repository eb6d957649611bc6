"""docs/findings.md and its two pictures, from the committed evidence: `python -m tools.findings`.

Only what survives the correction over a study's claims is a sentence. tests/tools/test_findings.py fails when the text
is stale.
"""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from regard.lab.data.boards import PROBED
from regard.lab.studies.probes.names import AVERAGE, BASELINE, NONE
from regard.lab.studies.probes.study import ROWS
from regard.pages.figures import front
from regard.pages.phrasing import number, signed_number
from regard.pages.theme import SHADES, follow_scheme
from tools.generate import between, write
from tools.site.evidence import ROOT, WORDS, Evidence, all_evidence, judged

PAGE = "docs/findings.md"
MARK = "<!-- generated: findings -->"
QUALITY = "docs/quality-and-cost.svg"
SECOND = "docs/findings.svg"
COSTS = "mita_table2-desk"
"""The folder whose rows are drawn over their cost: the study with the most mechanisms."""
FEWEST_SEEDS, FEWEST_ROWS = 3, 3
"""Of a probe's rows, and of complete rows, below which the profile is not drawn."""
SENTENCES = {
    ("quickstart", "Factors 0110"):
        "Attention without query-key content (`Factors`, terms 0110) is better than softmax",
    ("mita_table2", "MiTA + DWC"): "MiTA with an added depth-wise convolution is better than softmax alone",
    ("esa_fig3", "0011"): "Key content plus relative position (`Factors`, terms 0011) is better than no attention",
    ("ska_table1", "SKA a, plain start"):
        "From plain random weights static keys are better than softmax; where branches start at zero they are not",
}  # fmt: skip
"""(study, first row of a claim) -> the claim in plain words; others are printed as the table has them."""
DATA = {"cifar10": "CIFAR-10", "digits-canvas": "digits on a canvas", "cued": "items that match a cue, IoU"}
LIGHT = SHADES["light"]
CELL_INK = ("#101010", "#fefefe")
"""On pale and on dark cells, which have the same colour for all readers."""
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "regard", "font.size": 11, "text.parse_math": False,
              "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": LIGHT["line"],
              "axes.labelcolor": LIGHT["muted"], "text.color": LIGHT["ink"], "xtick.color": LIGHT["muted"],
              "ytick.color": LIGHT["muted"]}  # fmt: skip


class Profile(NamedTuple):
    """Scores of the probes. rows: mechanisms with all abilities, softmax attention and the controls among them."""

    abilities: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]


def finding(evidence: Sequence[Evidence]) -> str:
    """The text between the marks of the page."""
    claims = [(study, claim) for study, claim in judged(evidence) if not study.is_probe]
    counts = Counter(claim["verdict"]["word"] for _, claim in claims)
    decided = [(study, claim) for study, claim in claims if claim["verdict"]["word"] in WORDS[:2]]
    contradicted = counts["contradicted"] or "none"
    abilities = Counter(claim["verdict"]["word"] for study, claim in judged(evidence) if study.is_probe)
    paragraphs = (
        f"Of {len(claims)} claims that small studies could judge (small networks, small images, three seeds or more, "
        f"beside controls without attention), {counts['supported']} are supported and {contradicted} contradicted "
        f"after correction over a study's claims; {counts['suggested']} are suggested by their own interval only, and "
        f"{counts['undecided']} are undecided.",
        "\n".join(
            ["| decided after correction | difference in accuracy, 95 % interval | data |", "|---|---|---|"]
            + [_line(study, claim) for study, claim in decided]
        ),
        "The four digits of `Factors` are the terms of the logits: query and key content, query content and relative "
        "position, key content alone, relative position alone. 1111 has all, 0000 is the average of all tokens. "
        f"{_controls(evidence)} At other sizes all of this may differ: [each study with its limits]"
        "(results/README.md), [which attention?](choosing.md)",
        f"![{_caption(QUALITY, evidence)}]({Path(QUALITY).name})",
        f"[Probes](probes.md) ask what a mechanism can do at all: small networks on generated boards, one ability "
        f"each. Of {abilities.total()} claims about them {abilities['supported']} are supported, "
        f"{abilities['contradicted']} contradicted, {abilities['suggested']} suggested and {abilities['undecided']} "
        "undecided."
        if abilities
        else "",
        f"![{_caption(SECOND, evidence)}]({Path(SECOND).name})" if abilities else "",
    )
    return "\n\n".join(text if text[0] in "|!" else fill(text, 120) for text in paragraphs if text)


def _line(study: Evidence, claim: Mapping[str, Any]) -> str:
    text = SENTENCES.get((study.name, claim["a"]), claim["text"])
    against = "contradicted: " if claim["verdict"]["word"] == "contradicted" else ""
    size = claim["verdict"]["interval"]
    interval = f"{signed_number(size['mean'])} [{signed_number(size['low'])}, {signed_number(size['high'])}] points"
    return f"| {against}{text} | {interval} | {_data(study)} |"


def _data(study: Evidence) -> str:
    name = str(study.snapshot["data"]["name"])
    return DATA.get(name, name)


def _controls(evidence: Sequence[Evidence]) -> str:
    """What attention itself brings in the study of the first picture."""
    study = _costs(evidence)
    gains = {row["label"]: -row["difference"]["mean"] for row in study.table["rows"] if row["control"]}
    return (
        f"In the network of the first picture ({_data(study)}) softmax attention itself is {number(gains['w/o'])} "
        f"points better than none, and {number(gains['0000'])} than the uniform average of all patches."
    )


def _costs(evidence: Sequence[Evidence]) -> Evidence:
    return next(study for study in evidence if study.folder.name == COSTS)


def _caption(picture: str, evidence: Sequence[Evidence]) -> str:
    if picture == QUALITY:
        return f"Accuracy over multiply-accumulates of mechanisms in one small network on {_data(_costs(evidence))}"
    return "Which abilities each mechanism learned in small networks on generated boards"


def pictures(evidence: Sequence[Evidence]) -> dict[str, str]:
    """path -> SVG of both pictures, the second of the rows of hypotheses. Raises: ValueError without probes."""
    scores = profile(evidence)
    if scores is None:
        raise ValueError("the evidence has no complete probes: docs/results/probes_*-desk")
    named = scores._replace(rows={row.label: scores.rows[row.label] for row in ROWS if row.label in scores.rows})
    return {QUALITY: svg(quality(_costs(evidence))), SECOND: svg(profile_figure(named))}


def svg(figure: Figure) -> str:
    """A figure as SVG for light and dark readers, equal for equal data; lines end without blanks."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return follow_scheme("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


def quality(study: Evidence) -> Figure:
    """Accuracy with its interval over MACs, with the front."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.6), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        rows = study.table["rows"]
        best = front([(row["macs"] / 1e6, row["mean"]) for row in rows], more=False)
        axes.plot(*zip(*best, strict=True), color=LIGHT["control"], linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        for row in rows:
            colour = LIGHT["control"] if row["control"] else LIGHT["ink" if row["label"] == "Softmax" else "c0"]
            axes.plot([row["macs"] / 1e6] * 2, [row["low"], row["high"]], color=colour, linewidth=1.2)
            axes.plot(row["macs"] / 1e6, row["mean"], "X" if row["control"] else "o", color=colour)
        _labels(axes, [(_shown(row["label"]), row["macs"] / 1e6, row["mean"]) for row in rows])
        axes.set_xlabel("million multiply-accumulates of the network, one image")
        axes.set_title(
            f"top-1 accuracy on {_data(study)}, %: mean and 95 % interval of 3 seeds", loc="left", fontsize=11
        )
        axes.margins(x=0.12)
        return figure


def _shown(label: str) -> str:
    return {"w/o": "no attention", "0000": "uniform average"}.get(label, label)


def _labels(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Names beside the points; where points of a similar cost are many, in a column with lines to them."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    across, step = right - left, 0.058 * (high - low)
    groups: list[list[tuple[str, float, float]]] = []
    for point in sorted(points, key=lambda point: point[1]):
        if groups and point[1] - groups[-1][-1][1] < 0.06 * across:
            groups[-1].append(point)
        else:
            groups.append([point])
    for group in groups:
        column = max(x for _, x, _ in group) + (0.07 if len(group) > 1 else 0.013) * across
        height = high
        for name, x, y in sorted(group, key=lambda point: (-point[2], point[0])):
            height = min(y + (0.4 if len(group) > 1 else -0.3) * step, height - step)
            axes.annotate(name, (column, height), fontsize=9.5, va="center", color=LIGHT["ink"])
            if len(group) > 1:
                axes.plot([x, column - 0.01 * across], [y, height], color=LIGHT["control"], linewidth=0.5, zorder=0)


def profile(evidence: Sequence[Evidence]) -> Profile | None:
    """The scores of the probes at desk scale, None as long as fewer than FEWEST_ROWS mechanisms have all abilities."""
    tables = {ability: _scores(evidence, ability) for ability in PROBED}
    present = tuple(ability for ability, scores in tables.items() if {BASELINE, AVERAGE, NONE} <= scores.keys())
    complete = {
        row: tuple(tables[ability][row] for ability in present)
        for row in (tables[present[0]] if present else ())
        if all(row in tables[ability] for ability in present)
    }
    return Profile(present, complete) if len(complete) >= FEWEST_ROWS + 3 and len(present) > 1 else None


def _scores(evidence: Sequence[Evidence], ability: str) -> dict[str, float]:
    """Row -> mean score, of rows with enough seeds."""
    for study in evidence:
        if study.name == f"probes_{ability}" and study.table["scale"] == "desk":
            return {row["label"]: row["mean"] for row in study.table["rows"] if row["n"] >= FEWEST_SEEDS}
    return {}


def _shares(scores: Profile, row: str) -> list[float]:
    """0 to 1 for each ability: the row's part of what softmax attention gains over the better control."""
    floors = [max(pair) for pair in zip(scores.rows[AVERAGE], scores.rows[NONE], strict=True)]
    return [
        min(max((value - floor) / (top - floor), 0.0), 1.0) if top > floor else 0.0
        for value, top, floor in zip(scores.rows[row], scores.rows[BASELINE], floors, strict=True)
    ]


def shares(evidence: Sequence[Evidence]) -> dict[str, dict[str, float]]:
    """Row -> ability -> share of softmax attention's gain, of rows with all abilities; {} as long as there are few."""
    scores = profile(evidence)
    if scores is None:
        return {}
    return {
        row: dict(zip(scores.abilities, (round(share, 2) for share in _shares(scores, row)), strict=True))
        for row in scores.rows
    }


def profile_figure(scores: Profile) -> Figure:
    """A table of scores, coloured by the share of what softmax attention gains over the better control."""
    colours = matplotlib.colormaps["Blues"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.0 + 0.3 * len(scores.rows)), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for line, (row, values) in enumerate(scores.rows.items()):
            for column, (value, share) in enumerate(zip(values, _shares(scores, row), strict=True)):
                axes.add_patch(matplotlib.patches.Rectangle((column, line), 1, 1, color=colours(0.75 * share)))
                ink = CELL_INK[share > 0.7]
                axes.text(column + 0.5, line + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=9, color=ink)
        axes.set(xlim=(0, len(scores.abilities)), ylim=(len(scores.rows), 0))
        axes.set_xticks([column + 0.5 for column in range(len(scores.abilities))], scores.abilities)
        axes.set_yticks([line + 0.5 for line in range(len(scores.rows))], [_shown(row) for row in scores.rows])
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("right, %, mean of all seeds; darker: more of what softmax attention gains", loc="left")
        return figure


def page(evidence: Sequence[Evidence]) -> str:
    """The page with the finding between its marks."""
    return between((ROOT / PAGE).read_text(encoding="utf-8"), MARK, finding(evidence))


def main() -> None:
    """Write the page and the pictures where they differ."""
    evidence = all_evidence()
    for name, text in {PAGE: page(evidence), **pictures(evidence)}.items():
        write(ROOT / name, text)


if __name__ == "__main__":
    main()
