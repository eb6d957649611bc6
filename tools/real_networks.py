"""docs/real-networks.md, its picture and what README says of it, from the records of two studies of a real network.

`python -m tools.real_networks`. The records are in docs/results/focus_vit_swaps and docs/results/focus_vit_heads; what
they lack is left out. tests/tools/test_real_networks.py fails when the text is stale.
"""

import json
from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from regard.lab.studies.focus_vit import heads, swaps
from regard.measure.intervals import interval
from tools.docs_pages import NOTE, code, table
from tools.findings import LIGHT, STYLE, svg
from tools.generate import ROOT, between, write

PAGE, PICTURE = "docs/real-networks.md", "docs/real-network.svg"
MARK = "<!-- generated: real networks -->"
HEADED = ("MiTA", "Window", "Agent")
"""Mechanisms whose heads README names."""
Scores = Mapping[str, Mapping[str, list[float]]]


def records(name: str) -> dict[str, dict]:
    """What the records of a study found, by their names."""
    files = (ROOT / "docs" / "results" / name).glob("*.json")
    return {file.stem: json.loads(file.read_text(encoding="utf-8"))["found"] for file in files}


def short(mixer: str) -> str:
    return mixer.partition("(")[0]


def kept(values: Sequence[float]) -> str:
    found = interval(values)
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def learned(found: Scores, mixer: str) -> list[float]:
    """The correlation of each picture after learning, the mean over the seeds that are there; [] without one."""
    seeds = [found[key]["correlation"] for seed in range(swaps.SEEDS) if (key := f"{mixer} | all | {seed}") in found]
    return np.mean(seeds, 0).tolist() if seeds else []


def swapped_table(size: int, found: Scores) -> str:
    """Mechanisms at one size, by layers."""
    groups = list(dict.fromkeys(key.split(" | ")[1] for key in found))
    taught = any(learned(found, mixer) for mixer in swaps.MIXERS[size])
    rows = []
    for mixer in swaps.MIXERS[size]:
        cells = [kept(found[key]["correlation"]) if (key := f"{mixer} | {group} | None") in found else ""
                 for group in groups]  # fmt: skip
        after = learned(found, mixer)
        share = swaps.share(mixer, swaps.square(size))
        rows.append((code(mixer), f"{share:.2f}", *cells, *[kept(after) if after else ""] * taught))
    named = [f"layers {group}" if group != "all" else group for group in groups]
    return table(("mechanism", "products", *named, *["learned"] * taught), rows)


def by_tokens(found: Mapping[int, Scores]) -> str:
    """A sentence on all sizes that are complete, "" with one."""
    sizes = [
        size for size in sorted(found) if all(f"{mixer} | all | None" in found[size] for mixer in swaps.MIXERS[size])
    ]
    if len(sizes) < 2:
        return ""
    rows = zip(*(swaps.MIXERS[size] for size in sizes), strict=True)
    means = {short(row[0]): [np.mean(found[size][f"{mixer} | all | None"]["correlation"])
                             for size, mixer in zip(sizes, row, strict=True)] for row in rows}  # fmt: skip
    kept = ", ".join(f"{min(means[name]):.2f} to {max(means[name]):.2f} with `{name}`"
                     for name in ("TopK", "MiTA", "Window", "Agent"))  # fmt: skip
    last = f"{swaps.square(sizes[-1]).cells:,}"
    first = swaps.square(sizes[0]).cells
    return f" Right after the swap, from {first} to {last} tokens, with landmarks and windows in step, it was {kept}."


def heads_table(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Mechanisms by data, with heads that were kept or learned anew."""
    problems = [problem for problem in heads.PROBLEMS if problem.data in found]
    rows = []
    for number, mixer in enumerate((heads.OWN, *problems[0].mixers)):
        cells = []
        for problem in problems:
            own = (heads.OWN, *problem.mixers)[number]
            scores = [found[problem.data].get(f"{own} | {head}", []) for head in heads.HEADS]
            whole = found[problem.data][f"{heads.OWN} | kept"]
            cells += [percent(values, whole) if values else "" for values in scores]
        rows.append((short(mixer), *cells))
    heading = [f"{problem.data}, {problem.score}: {head}" for problem in problems for head in heads.HEADS]
    return table(("mechanism", *heading), rows)


def percent(values: Sequence[float], whole: Sequence[float]) -> str:
    """The mean, and the interval of the difference to what softmax attention has, picture by picture."""
    apart = interval([100 * (a - b) for a, b in zip(values, whole, strict=True)])
    text = f"{100 * np.mean(values):.1f}"
    return text if apart.sd == 0 else f"{text} [{apart.low:+.1f}, {apart.high:+.1f}]"


def picture(found: Scores) -> Figure:
    """What mechanisms keep in all layers at 224 pixels: after the swap, and after learning."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        order = sorted(swaps.MIXERS[224], key=lambda mixer: np.mean(found[f"{mixer} | all | None"]["correlation"]))
        for row, mixer in enumerate(order):
            both = (found[f"{mixer} | all | None"]["correlation"], "ink"), (learned(found, mixer), "c0")
            for scores, colour in both if both[1][0] else both[:1]:
                drawn, height = interval(scores), row - 0.2 * (colour != "ink")
                axes.plot([drawn.low or 0.0, drawn.high or 0.0], [height, height], color=LIGHT[colour], linewidth=1.2)
                axes.plot(drawn.mean or 0.0, height, "o", color=LIGHT[colour])
        axes.set_yticks(range(len(order)), [short(mixer) for mixer in order])
        axes.set_title(
            "correlation of a real network's maps with the old ones, all layers swapped (256 tokens):\n"
            "plain right after the swap, coloured after its layers have learned for 200 steps", loc="left", fontsize=11,
        )  # fmt: skip
        axes.set_xlim(-0.1, 1.02)
        return figure


CAPTION = "What six mechanisms keep of a real network for saliency at 256 tokens, before and after learning"


def words(sizes: Mapping[int, Scores], scored: Mapping[str, Mapping[str, list[float]]]) -> str:
    """What holds for the real network, in a few sentences."""
    found = sizes[224]
    after = {short(mixer): np.mean(found[f"{mixer} | all | None"]["correlation"]) for mixer in swaps.MIXERS[224]}
    taught = {short(mixer): np.mean(learned(found, mixer)) for mixer in swaps.MIXERS[224] if learned(found, mixer)}
    text = (
        "**Dense maps.** With all layers swapped, a real network for saliency (256 tokens) kept a correlation of "
        f"{after['TopK']:.2f} with its old maps with `TopK`, {after['MiTA']:.2f} with `MiTA`, {after['Window']:.2f} "
        f"with `Window`, {after['Agent']:.2f} with `Agent`, and nothing with `Linear` and static keys (`SKA`), which "
        "have to learn first"
    )
    named = [name for name in ("MiTA", "Window", "Agent", "Linear", "SKA") if name in taught]
    few = ", ".join(f"{taught[name]:.2f} with `{name}`" for name in named)
    text += f"; after 200 steps of [`distill`](docs/advice.md#learning-without-labels-distill) {few}." if few else "."
    text += by_tokens(sizes) + " **Heads.**" * bool(scored)
    for problem, what in zip(heads.PROBLEMS, ("classifier", "segmenter of streets"), strict=False):
        percent = {key: 100 * np.mean(values) for key, values in scored.get(problem.data, {}).items()}
        done = [mixer for mixer in problem.mixers if f"{mixer} | anew" in percent and short(mixer) in HEADED]
        if done:
            done.sort(key=lambda mixer: -percent[f"{mixer} | kept"])
            first = ", ".join(f"{percent[f'{mixer} | kept']:.0f} with `{short(mixer)}`" for mixer in done)
            second = ", ".join(f"{percent[f'{mixer} | anew']:.0f}" for mixer in done)
            text += (
                f" A linear {what} on its features fell from {percent[f'{heads.OWN} | kept']:.0f} % to {first}; "
                f"learned anew after the swap it came to {second} %."
            )
    return text


def page(found: Mapping[int, Scores], scored: Mapping[str, Mapping[str, list[float]]]) -> str:
    """docs/real-networks.md."""
    parts = [f"## {size} pixels, {swaps.square(size).cells} tokens\n\n{swapped_table(size, one)}\n"
             for size, one in sorted(found.items())]  # fmt: skip
    missing = [f"{size}" for size in swaps.MIXERS if size not in found]
    todo = f" Not run yet: {', '.join(missing)} pixels of the study `{swaps.NAME}`." if missing else ""
    head = heads_table(scored) if scored else ""
    return f"""{NOTE.replace("docs_pages", "real_networks")}
# What a swap keeps of a real network

A published DINOv2 ViT-S/14 that was fine-tuned to predict saliency, with its attention swapped for six mechanisms.
`MiTA`, `Agent` and `Window` have the most landmarks, or the largest window, with at most 0.3 of the products of softmax
attention; `Linear` has fewer, `TopK` and `SKA` more, whatever their settings. Correlation of the new map with the old
one, with its 95 % interval over 100 pictures (at 896 pixels 40) that nothing was learned from. Settings were fixed
before the first result. See also [half the time for a network that you have](half-the-time.md), and
[which attention?](choosing.md)

![{CAPTION}](real-network.svg)

{chr(10).join(parts)}
Learned: 200 steps of four pictures without labels in the layers, as `regard distill` does, the mean over up to three
seeds.{todo}

## Heads on its features

Linear heads on the frozen backbone, in percent: learned before the swap of all layers and kept, or learned anew after
it; in brackets the 95 % interval of the difference to softmax attention, picture by picture. The class token had no
part in the tuning, so the classifier starts lower than DINOv2's own. Study `{heads.NAME}`.

{head}
"""


def readme(found: Mapping[int, Scores], scored: Mapping[str, Mapping[str, list[float]]]) -> str:
    """README.md with the words and the picture."""
    text = fill(words(found, scored), 120, break_long_words=False, break_on_hyphens=False)
    content = f"{text}\n\n![{CAPTION}]({PICTURE})"
    return between((ROOT / "README.md").read_text(encoding="utf-8"), MARK, content)


def main() -> None:
    """Write what differs."""
    found = {int(name): one for name, one in records(swaps.NAME).items()}
    scored = records(heads.NAME)
    write(ROOT / PAGE, page(found, scored))
    write(ROOT / PICTURE, svg(picture(found[224])))
    write(ROOT / "README.md", readme(found, scored))


if __name__ == "__main__":
    main()
