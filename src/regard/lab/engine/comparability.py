"""Whether the runs of a table can be compared: devices, machines, versions, precision and data. Needs no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from regard.pages.phrasing import count

_FIELDS = {
    "devices": "device", "numbers of devices": "devices", "numbers of threads": "threads",
    "runs with and without compiled kernels": "compiled kernels",
    "runs with and without torch.compile": "torch.compile",
    "precisions": "precision", "torch versions": "torch",
}  # fmt: skip
"""Text of a warning -> the field of an outcome's environment that it is about."""


def on_one_device(runs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """(runs on the device type with most finished runs, warnings): an interval never mixes CPU and GPU."""
    counts = Counter(device_type(run["outcome"]) for run in runs if run["outcome"].get("status") == "done")
    if len(counts) < 2:
        return list(runs), []
    common = counts.most_common(1)[0][0]
    others = ", ".join(f"{number} on {device}" for device, number in sorted(counts.items()) if device != common)
    text = f"the table has runs on {common} only; left out: {others} (an interval never mixes types of devices)"
    kept = [run for run in runs if not run["outcome"].get("environment") or device_type(run["outcome"]) == common]
    return kept, [text]


def device_type(outcome: Mapping[str, Any]) -> str:
    """ "cpu" or "a GPU", on which a run was trained; "cpu" where that is not recorded."""
    text = str((outcome.get("environment") or {}).get("device") or "cpu").lower()
    return "cpu" if text.startswith("cpu") else "a GPU"


def mixture_warnings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each property in which the finished runs differ; a property that is not recorded is not counted.

    Data are compared with data of the same name: rows on other data sets differ by design. The user's own data, whose
    names hold a digest, count as one set.
    """
    outcomes = [run["outcome"] for run in runs if run["outcome"].get("status") == "done"]
    environments = [outcome.get("environment") or {} for outcome in outcomes]
    data = [outcome.get("data") or {} for outcome in outcomes]
    values: dict[str, list[Any]] = {
        "code versions": [outcome.get("code") for outcome in outcomes],
        "machines": [_machine(environment) for environment in environments],
        **{text: [environment.get(name) for environment in environments] for text, name in _FIELDS.items()},
    }
    for entry in data:
        name = str(entry.get("name") or "the data").partition(":")[0]
        text = f"data checksums of {'your data' if name == 'own' else name}"
        values.setdefault(text, []).append(entry.get("checksum"))
    warnings = []
    for text, items in values.items():
        counts = Counter(_text(item) for item in items if item is not None)
        if len(counts) > 1:
            parts = (f"{item} ({count(number, 'run')})" for item, number in counts.items())
            warnings.append(f"the table mixes {text}: {', '.join(parts)}")
    return warnings


def _text(value: Any) -> str:
    return str(value) if not isinstance(value, bool) else "with" if value else "without"


def _machine(environment: Mapping[str, Any]) -> str | None:
    """System and processor, or GPU."""
    return " with ".join(str(environment[name]) for name in ("machine", "processor") if environment.get(name)) or None
