"""What saved models and outcomes of runs say of the data that a model was trained on."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

DATA = ("name", "class_names", "normal")
"""What a saved model says of the data that it was trained on: as `Task.record` has them."""


def names_digest(names: Sequence[str]) -> str:
    """12 hexadecimal digits of a digest of class names, in their order: "classes" in a record of data."""
    return hashlib.sha256("\0".join(names).encode(errors="surrogatepass")).hexdigest()[:12]


def data_problem(data: Any) -> str:
    """What is wrong with the recorded data; "" if nothing is."""
    if not isinstance(data, dict):
        return "it has the names class_names, normal and name"
    names, normal = data.get("class_names", []), data.get("normal", [[0.0], [1.0]])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "class_names is a list of texts, the name of each output in order"
    if data.get("classes") and "class_names" in data and data["classes"] != names_digest(names):
        return "class_names is not the list whose digest is classes"
    whole = (
        isinstance(normal, list)
        and [type(part) for part in normal] == [list, list]
        and 0 < len(normal[0]) == len(normal[1])
        and all(type(value) in (int, float) and abs(value) < math.inf for part in normal for value in part)
        and all(value > 0 for value in normal[1])
    )
    if not whole:
        return "normal is [mean, deviation], a number of each channel in both, and deviations are above 0"
    return "" if isinstance(data.get("name", ""), str) else "name is a text"
