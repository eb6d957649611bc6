"""Compare small models of other libraries before and after a swap: `python tools/compare_libraries.py`, a few minutes.

It writes docs/libraries.json, from which `make generated` writes a table of docs/hosts.md: for each attention class
the largest difference of the outputs after a swap to softmax, relative to the largest output, in float64, and the least
change by uniform attention in its place. Without a change by that, equal outputs would say nothing. For each mechanism
of `count_ports.MECHANISMS` it counts the classes that take it exactly, and with their position biases dropped.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.mixers.factors.factors import Factors
from regard.mixers.softmax import Softmax
from regard.swapping.inspect import attention_layers
from regard.swapping.swap import swap

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "libraries.json"
PACKAGES = {
    "transformers": "transformers", "torchvision": "torchvision", "open_clip": "open_clip_torch",
    "diffusers": "diffusers", "monai": "monai",
}  # fmt: skip
"""The library -> the package that has its version."""
LARGEST, LEAST = 1e-6, 1e-3
"""The largest difference by softmax, where a host computes it in float32, and the least by uniform attention."""

sys.path.insert(0, str(ROOT / "tests"))
from count_ports import DROPPED, EXACT, MECHANISMS, taken  # noqa: E402 beside this file

from library_hosts import HOSTS, LibraryHost, gap, outputs, prepared  # noqa: E402 the tests' own, not a part of the package


@torch.no_grad()
def compare(library: str, name: str, make: Callable[[], LibraryHost]) -> dict[str, Any]:
    """One host: its attention classes, its ports, the difference after softmax and after uniform attention."""
    torch.manual_seed(0)
    model, inputs, layers = prepared(make())
    ports = attention_layers(model)
    classes = sorted({type(model.get_submodule(layer)).__qualname__ for layer in ports})
    before = outputs(model, inputs)
    swap(model, Softmax(), example=inputs)
    same = gap(outputs(model, inputs), before)
    swap(model, Factors(terms="0000"), example=inputs)
    return {
        "library": library,
        "model": name,
        "classes": classes,
        "ports": sorted({port.__name__ for port in ports.values()}),
        "layers": layers,
        "softmax": float(f"{same:.0e}"),
        "uniform": float(f"{gap(outputs(model, inputs), before):.0e}"),
    }


def classes_by_mechanism() -> dict[str, dict[str, dict[str, int]]]:
    """Spelling of a mechanism -> library -> how many of its attention classes take it, by `EXACT` and `DROPPED`."""
    hosts = []
    for library, makers in HOSTS.items():
        for make in makers.values():
            model, inputs, _ = prepared(make())
            kinds = {
                name: f"{library} {type(model.get_submodule(name)).__qualname__}" for name in attention_layers(model)
            }
            hosts.append((model, inputs, kinds))
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for spelling in MECHANISMS:
        found = Counter((kind.partition(" ")[0], state) for kind, state in taken(spelling, hosts).items())
        counts[spelling] = {library: {state: found[library, state] for state in (EXACT, DROPPED)} for library in HOSTS}
    return counts


def main() -> None:
    warnings.simplefilter("ignore")
    rows = [compare(library, name, make) for library, hosts in HOSTS.items() for name, make in hosts.items()]
    wrong = [row["model"] for row in rows if row["softmax"] > LARGEST or row["uniform"] < LEAST]
    if wrong:
        sys.exit(f"softmax changes, or uniform attention does not change, the outputs of {', '.join(wrong)}")
    left = json.loads(FILE.read_text())["left"]  # attention that a swap leaves as it is, with the reason: by hand
    versions = {library: version(package) for library, package in PACKAGES.items()}
    content = {"versions": versions, "compared": rows, "left": left, "mechanisms": classes_by_mechanism()}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    for row in rows:
        print(f"{row['library']:13} {row['model']:40} softmax {row['softmax']:.0e}, uniform {row['uniform']:.0e}")


if __name__ == "__main__":
    main()
