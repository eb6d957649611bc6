"""Write the table from which `regard advise --tokens` answers: `python -m tools.advice_table`.

It holds what was measured and judged in this repository: times from docs/bench.html, and from docs/results every
difference to softmax attention in studies whose gate was passed, and what probes found. tests/advice/test_new_model.py
fails when it is stale.
"""

import dataclasses
import html
import json
import re
from collections.abc import Sequence
from typing import Any

from regard.advice.new_model import TABLE
from regard.lab.data.boards import PROBED
from regard.lab.studies import load_study
from regard.lab.studies.probes.names import BASELINE
from regard.mixers.spelling import parse_mixer, spell
from regard.mixers.table import FAMILIES
from tools.findings import shares
from tools.generate import write
from tools.site.evidence import ROOT, Evidence, all_evidence

BENCH = ROOT / "docs" / "bench.html"
TOKENS = 36
"""Of the probes: boards of 6 x 6 cells."""
PASSES = {name: f"{name.capitalize()}: time, divided by that of Softmax" for name in ("forward", "training")}
MEASURED = "layers of 192 channels and 3 heads, batch 1, float32, one core of an AMD EPYC"
"""Of docs/bench.html, as docs/choosing.md says it."""


def times() -> dict[str, Any]:
    """pass -> mechanism -> the time on each grid, divided by that of softmax attention; None: not measured."""
    page = BENCH.read_text(encoding="utf-8")
    found: dict[str, Any] = {"measured": MEASURED, "source": "docs/bench.html"}
    for name, title in PASSES.items():
        body = page[page.index(title) :].partition("</table>")[0]
        lines = [_cells(line) for line in re.findall(r"<tr.*?</tr>", body, re.DOTALL)]
        grids = [tuple(map(int, grid.split("x"))) for grid in lines[0][1:]]
        found["tokens"] = [height * width for height, width in grids]
        found[name] = {line[0]: [_number(text) for text in line[1:]] for line in lines[1:]}
    return found


def _cells(line: str) -> list[str]:
    texts = re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line, re.DOTALL)
    return [html.unescape(re.sub(r"<.*?>", "", text)).strip() for text in texts]


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[\d.]+", text) else None


def evidence(tables: Sequence[Evidence]) -> list[dict[str, Any]]:
    """Every mechanism's difference to softmax attention, with the verdict on it where the study has such a claim."""
    found = []
    for study in tables:
        if study.is_probe:
            continue
        gate = study.table.get("gate") or {}
        spellings = {row["label"]: str(row.get("spelling") or "") for row in study.snapshot.get("rows", ())}
        baseline = study.table.get("baseline")
        judged = gate.get("passed") is True and study.table["scale"] != "smoke"
        if not judged or not _is_softmax(study, spellings, baseline):
            continue
        for row in study.table["rows"]:
            label, size = row["label"], row.get("difference") or {}
            own = _class(spellings, label)
            if row["control"] or size.get("low") is None or own not in _mechanisms() or label in _otherwise(study):
                continue
            found.append({
                "mechanism": own, "spelling": _spelling(spellings[label]), "row": label,
                "study": study.name, "task": str(study.snapshot["task"]).partition("(")[0].lower(),
                "data": study.snapshot["data"]["name"], "metric": study.table["metric"], "tokens": _tokens(study),
                "seeds": size["n"], **{name: round(size[name], 2) for name in ("mean", "low", "high")},
                "verdict": _verdict(study, label, baseline),
            })  # fmt: skip
    return found


def abilities(tables: Sequence[Evidence]) -> list[dict[str, Any]]:
    """Each mechanism of the probes with the share of softmax attention's gain that it has in each ability.

    plain: its arguments other than numbers are the defaults.
    """
    asked = {f"probes_{ability}" for ability in PROBED}
    spellings = {
        row["label"]: str(row["spelling"])
        for study in tables
        if study.name in asked
        for row in study.snapshot["rows"]
        if row["spelling"] and not row["control"] and row["label"] != BASELINE
    }
    found = []
    for label, learned in shares(tables).items():
        if label in spellings and (config := parse_mixer(spellings[label])) is not None:
            values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
            plain = all(type(value) is int or value == getattr(type(config)(), name) for name, value in values.items())
            found.append({"mechanism": type(config).__name__, "spelling": spell(config), "plain": plain,
                          "tokens": TOKENS, "learned": learned})  # fmt: skip
    return found


def _class(spellings: dict[str, str], label: Any) -> str:
    return spellings.get(label, "").partition("(")[0]


def _is_softmax(study: Evidence, spellings: dict[str, str], label: Any) -> bool:
    """Whether a row has softmax attention, which is also the own attention of Regard's ViTs."""
    own = spellings.get(label) == "the host's own attention"
    return _class(spellings, label) == "Softmax" or (own and "host='vit_" in str(study.snapshot["task"]))


def _mechanisms() -> set[str]:
    return {name for members in FAMILIES.values() for name in members} - {"Softmax"}


def _otherwise(study: Evidence) -> set[str]:
    """Rows that are trained in another way than the baseline, or in another host."""
    rows = load_study(study.name).rows(study.table["scale"])
    return {row.label for row in rows if row.recipe or row.task or row.host}


def _tokens(study: Evidence) -> int:
    """Patch tokens of the study's host, or the length of its sequences."""
    task = str(study.snapshot["task"])
    if length := re.findall(r"length=(\d+)", task):
        return int(length[0])
    size, patch = (int(re.findall(rf"{name}=\(?(\d+)", task)[0]) for name in ("size", "patch"))
    return (size // patch) ** 2


def _spelling(text: str) -> str:
    """As this version spells it; an older spelling stays."""
    try:
        config = parse_mixer(text)
    except ValueError:
        return text
    return text if config is None else spell(config)


def _verdict(study: Evidence, row: str, baseline: str) -> str:
    """The word on a claim about a row and the baseline alone, "" without one."""
    for claim in study.claims:
        if {claim["a"], claim["b"]} == {row, baseline} and "further above" not in claim["text"]:
            return f"{claim['verdict']['word']} ({claim['text'].partition(' in ')[0]})"
    return ""


def text() -> str:
    """The file."""
    tables = all_evidence()
    value = {"times": times(), "evidence": evidence(tables), "abilities": abilities(tables)}
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the table if it differs."""
    write(TABLE, text())


if __name__ == "__main__":
    main()
