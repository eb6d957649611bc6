"""A page for every mechanism: formula, picture, cost, abilities, evidence, options and API."""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import get_type_hints

from regard.core import Grid, MixerConfig, RegardError, Site
from regard.lab.data.boards import PROBED
from regard.lab.studies.probes.names import AVERAGE, BASELINE, NONE
from regard.lab.studies.probes.profile import shipped_controls
from regard.lab.studies.probes.study import protocol
from regard.mixers import MIXERS
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.table import FAMILIES, MECHANISMS
from regard.pages.charts import chart
from regard.pages.phrasing import number
from tools.docs_pages import code, table
from tools.generate import exported

from . import pictures
from .evidence import Evidence, on_mechanism
from .formulas import formula
from .markdown import interval, link, size

SIDES = (7, 10, 14, 20, 28, 40, 56, 80, 112)
"""Of square grids, 49 to 12,544 tokens."""
DIM, HEADS = 192, 3
CONTROLS = (BASELINE, AVERAGE, NONE)
"""Of the probes."""
SHOWN_SIDES = (14, 32, 64)
"""In the table of costs."""


def page_of(name: str) -> str:
    """The path of a mechanism's page."""
    return f"mechanisms/{name}.md"


def pages(evidence: Sequence[Evidence]) -> Iterator[tuple[str, str | bytes]]:
    """(path, content) of every mechanism's page and picture."""
    for cls in MIXERS:
        yield f"mechanisms/{cls.__name__}.png", pictures.draw(cls())
        yield page_of(cls.__name__), page(cls, evidence)


def page(cls: type[MixerConfig], evidence: Sequence[Evidence]) -> str:
    """The page of a mechanism with its default options."""
    config, name = cls(), cls.__name__
    sections = (facts(config), picture(config), costs(config), abilities(name, evidence), results(name, evidence))
    parts = [
        f"# {name}",
        f"{config.card.title}.",
        formula(name, config.card.formula),
        *sections,
        options(cls),
        api(name),
    ]
    return "\n\n".join(parts) + "\n"


def facts(config: MixerConfig) -> str:
    """Source, cost, masks and how to use it."""
    card, name = config.card, type(config).__name__
    family = next(kind for kind, members in FAMILIES.items() if name in members)
    rows = [
        ("source", card.source),
        ("kind", family),
        ("formula in code", code(card.formula)),
        ("cost", code(card.complexity)),
        ("weights depend on", _conditions(config)),
        ("masks", ", ".join(sorted(config.masks)) or "none; it refuses masks"),
        ("keys of another sequence", "yes" if config.cross else "no"),
        ("prefix and suffix tokens", card.prefix),
        ("attention maps", "yes" if card.row_maps else "no matrix of token weights"),
    ]
    swap = link("swap it", "docs/swap.md", page_of(name))
    compare = link("others by cost, masks and tokens", "docs/mechanisms.md", page_of(name))
    return (
        f"{table(('', ''), rows)}\n\nIn a trained model: `swap(model, {spell(config)})`, {swap}. Also: {compare}, "
        f"and {link('which attention?', 'docs/choosing.md', page_of(name))}"
    )


def _conditions(config: MixerConfig) -> str:
    card = config.card
    parts = {
        "the query": card.query_content,
        "the keys": card.key_content,
        "relative position": card.relative_position,
    }
    return ", ".join(part for part, used in parts.items() if used) or "nothing: they are learned"


def picture(config: MixerConfig) -> str:
    """What an untrained layer reads of a photograph."""
    name = type(config).__name__
    if pictures.has_weights(config):
        shown = "the weights of two queries (white frames) on all patches"
    else:
        shown = "the influence of all patches on the output at two places (white frames): norms of derivatives"
    return f"""## What it reads

![What {name} reads of a photograph]({name}.png)

An untrained layer with default options: {shown}, each map scaled to its largest. Queries, keys and values are the
colours of the patches, so similar patches have large products; learned keys, tables and filters are as they start. It
shows how the mechanism chooses, not what a trained model looks at (`regard maps RUN` does).
Picture: {pictures.CREDIT}."""


def costs(config: MixerConfig) -> str:
    """Parameters and MACs over the number of tokens, beside softmax attention."""
    rows = [row for mixer in {type(c): c for c in (Softmax(), config)}.values() for row in _curve(mixer)]
    columns = ("mechanism", "tokens", "million MACs of a layer")
    spec = {"kind": "line", "x": "tokens", "y": columns[2], "series": "mechanism", "logs": "xy"}
    name = type(config).__name__
    drawn = chart({"title": f"Cost of {name}", "columns": columns, "rows": rows, "chart": spec})
    lines = []
    for side in SHOWN_SIDES:
        own, plain = (mixer.cost(_site(side)) for mixer in (config, Softmax()))
        ratio = f"{own.macs / plain.macs:.2f}"
        lines.append((f"{side * side:,} ({side} x {side})", size(own.params), size(own.macs), ratio))
    return f"""## What it costs

Exact, by formula: one layer with its projections, {DIM} channels and {HEADS} heads, one image.

<figure class="chart">{drawn}</figure>

{table(("tokens", "parameters", "MACs", "MACs / softmax"), lines)}

Fewer multiplications do not always mean less time: {link("measured times", "docs/bench.html", page_of(name))}, and
`regard bench Softmax {name} --grid 14x14,32x32` on your machine."""


def _site(side: int) -> Site:
    return Site(dim=DIM, heads=HEADS, grid=Grid(side, side))


def _curve(config: MixerConfig) -> Iterator[tuple[str, int, float]]:
    """(mechanism, tokens, million MACs) on every grid that fits it."""
    for side in SIDES:
        try:
            macs = config.cost(_site(side)).macs
        except RegardError:  # such as more landmarks than tokens
            continue
        yield type(config).__name__, side * side, macs / 1e6


def abilities(name: str, evidence: Sequence[Evidence]) -> str:
    """Scores of the probes beside those of the controls, from the committed studies; of softmax attention, shipped."""
    heading, about = "## What it can do", link("probes", "docs/probes.md", page_of(name))
    rows = []
    for study in evidence:
        ability = study.name.removeprefix("probes_")
        labels = study.labels(name) if ability in PROBED else {}
        lines = {line["label"]: line for line in study.table.get("rows", ())}
        controls = [interval(lines.get(label)) for label in CONTROLS]
        rows += [
            (link(code(ability), study.report, page_of(name)), code(spelling), interval(lines[label]), *controls)
            for label, spelling in labels.items()
        ]
    heads: tuple[str, ...] = ("ability", "configuration", "score", "softmax", "uniform average", "no mixing")
    if not rows and name == Softmax.__name__:
        rows, heads = _shipped_controls(), ("ability", "softmax", "uniform average", "no mixing")
    if not rows:
        return f"{heading}\n\nNot measured yet by the {about}; `regard probe '{name}()'` does it in minutes."
    return f"{heading}\n\nCells answered right, in percent ({about}).\n\n{table(heads, rows)}"


def _shipped_controls() -> list[tuple[str, ...]]:
    """The scores of the controls that come with the package, each of some seeds: means on boards of garments."""
    scores = shipped_controls("boards", protocol("boards"))
    return [
        (code(ability), *(number(fmean(values)) if (values := scores[row].get(ability)) else "" for row in CONTROLS))
        for ability in PROBED
        if scores[BASELINE].get(ability)
    ]


def results(name: str, evidence: Sequence[Evidence]) -> str:
    """Rows and verdicts of the studies that have the mechanism."""
    parts = []
    for study, labels, claims in on_mechanism(evidence, name):
        if study.name.removeprefix("probes_") in PROBED:  # shown above, as what it can do
            continue
        lines = {line["label"]: line for line in study.table["rows"]}
        rows = [
            (label, code(spelling), str(lines[label]["n"]), interval(lines[label]))
            + (interval(lines[label].get("difference"), sign=True),)
            for label, spelling in labels.items()
        ]
        heads = ("row", "configuration", "seeds", study.table["metric"], f"minus {study.table['baseline']}")
        title = link(study.table["title"], study.report, page_of(name))
        gate = "" if study.table["gate"]["passed"] else f"\n\n{study.table['gate']['sentence']}"
        verdicts = "".join(f"\n- {claim['text']}: {claim['verdict']['sentence']}" for claim in claims)
        parts.append(f"### {title}\n\n{study.setting}.{gate}\n\n{table(heads, rows)}\n{verdicts}".rstrip())
    if not parts:
        parts = ["No committed study has it as a row yet."]
    about = link("how verdicts are reached", "docs/deciding.md", page_of(name))
    return "\n\n".join([f"## Evidence\n\nMeans over seeds with 95 % intervals; {about}.", *parts])


def options(cls: type[MixerConfig]) -> str:
    """The fields of the configuration with their types and defaults."""
    inherited = (
        {field.name for field in dataclasses.fields(HeadMixerConfig)} if issubclass(cls, HeadMixerConfig) else ()
    )
    hints = get_type_hints(cls)
    rows = [
        (code(field.name), code(_type_name(hints[field.name])), code(_shown(field.default)))
        for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in inherited)
    ]
    text = inspect.cleandoc(cls.__doc__ or "")
    shared = inspect.cleandoc(HeadMixerConfig.__doc__ or "") if inherited and cls is not HeadMixerConfig else ""
    parts = ["## Options", table(("option", "type", "default"), rows), text, shared]
    return "\n\n".join(part for part in parts if part)


def _shown(default: object) -> str:
    return spell(default) if dataclasses.is_dataclass(default) else repr(default)


def _type_name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def api(name: str) -> str:
    """The configuration and the operator functions of a mechanism, from their docstrings."""
    module = MECHANISMS[name]
    members = "".join(f"\n        - {member}" for member in exported(module))
    return f"## API\n\n::: regard.mixers.{module}\n    options:\n      heading_level: 3\n      members:{members}"
