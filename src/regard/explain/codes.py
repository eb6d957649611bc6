"""The codes of F-SNE after training: norms, cosines within and between models, and the correlation of accuracies.

Numbers and pictures of "Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny Model Constraints":
norms (Table 6), cosines between the codes of two data sets (Figure 4), accuracy on ImageNet against accuracy after
transfer (Figure 5). Results are plain lists and dictionaries for JSON.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from regard.core import DataError, StoreError
from regard.models.saving import load
from regard.projections.sne import Codes
from regard.swapping.host_parameters import read_tensors

Book = dict[str, Any]
Source = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]

_KEY = re.compile(r"(^|\.)(regard_shared(\.\d+)?|codes)\.weight$")


def code_books(source: Source, roles: str = "qkv") -> list[Book]:
    """The code books of a model, a state dict, a folder that `regard.save` wrote, or the checkpoint of a run.

    roles: the roles of the rows in a state dict or checkpoint, which do not record them; a model does. Each book has
    name (of the module), roles and codes, one list of numbers for each role. Codes that all layers share are one book;
    those of FSNE(tied=False) are one book per layer, in the model's order. Averaged weights are read if there are any.
    Raises: DataError if there are no codes or the roles do not fit, StoreError if nothing can be read.
    """
    if isinstance(source, str | os.PathLike):
        source = _read(Path(source))
    weights: list[tuple[str, str, Tensor]]
    if isinstance(source, nn.Module):
        weights = [(name, m.roles, m.weight) for name, m in source.named_modules() if isinstance(m, Codes)]
        subject = type(source).__name__
    else:
        weights = [(key[: -len(".weight")], roles, value) for key, value in source.items() if _KEY.search(key)]
        subject = f"a state dict of {len(source)} tensors"
    for name, row_roles, weight in weights:
        if weight.ndim != 2 or weight.shape[0] != len(row_roles):
            raise DataError(f"{name} is {tuple(weight.shape)}, not one code for each of {row_roles!r}; pass roles=")
    if not weights:
        raise DataError(f"{subject} has no codes; they belong to models with projection=FSNE(...)")
    return [
        {"name": name, "roles": row_roles, "codes": weight.detach().double().tolist()}
        for name, row_roles, weight in weights
    ]


def norms(book: Book) -> dict[str, float]:
    """Euclidean length of each role's code (Table 6; untrained: about the square root of the code's size)."""
    return {role: math.hypot(*code) for role, code in zip(book["roles"], book["codes"], strict=True)}


def cosines(a: Book, b: Book) -> list[list[float | None]]:
    """Cosine of each code of a (rows) with each of b (columns); None where a code is zero.

    Raises: DataError if the codes have different sizes.
    """
    sizes = [len(book["codes"][0]) for book in (a, b)]
    if sizes[0] != sizes[1]:
        raise DataError(f"codes of {sizes[0]} and {sizes[1]} numbers cannot be compared; pass models of one code size")
    return [[_cosine(x, y) for y in b["codes"]] for x in a["codes"]]


def compare(sources: Mapping[str, Source | Book]) -> dict[str, Any]:
    """Norms and cosines of the codes of several models, by label; the first is compared with each of the others.

    Returns models, each with label, roles, norms and within (cosines of its own codes), and between, each with rows
    (the first label), columns (another label), their roles and cosines.
    Raises: DataError if there is no model, one has several code books (pass one of `code_books`), or sizes differ.
    """
    books = {label: _single_book(label, source) for label, source in sources.items()}
    if not books:
        raise DataError("nothing to compare: pass at least one labelled model")
    first, *others = books
    return {
        "models": [
            {"label": label, "roles": book["roles"], "norms": norms(book), "within": cosines(book, book)}
            for label, book in books.items()
        ],
        "between": [
            {
                "rows": first, "columns": label, "row_roles": books[first]["roles"],
                "column_roles": books[label]["roles"], "cosines": cosines(books[first], books[label]),
            }
            for label in others
        ],
    }  # fmt: skip


def regression(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """The least-squares line y = slope x + intercept and Pearson's r; n points.

    slope, intercept and r are None below two points or where x does not vary; r also where y does not.
    Raises: DataError if x and y have different lengths.
    """
    if len(x) != len(y):
        raise DataError(f"{len(x)} values of x and {len(y)} of y do not form pairs")
    n = len(x)
    empty = {"n": n, "slope": None, "intercept": None, "r": None}
    if n < 2:
        return empty
    mean_x, mean_y = math.fsum(x) / n, math.fsum(y) / n
    dx, dy = np.subtract(x, mean_x), np.subtract(y, mean_y)
    xx, yy, xy = float(dx @ dx), float(dy @ dy), float(dx @ dy)
    if xx == 0:
        return empty
    slope = xy / xx
    r = None if yy == 0 else max(-1.0, min(1.0, xy / math.sqrt(xx * yy)))
    return {"n": n, "slope": slope, "intercept": mean_y - slope * mean_x, "r": r}


def transfer(accuracies: Mapping[str, Mapping[str, float]], source: str) -> dict[str, Any]:
    """Accuracy on one data set against that on every other, over models (Figure 5).

    accuracies: model -> data set -> accuracy in per cent. source: the data set of the horizontal axis. Returns source
    and sets; each has its name, models, x, y and the fields of `regression`. A set lists only models with a number.
    Raises: DataError if no model has the source.
    """
    rows = {label: row for label, row in accuracies.items() if source in row}
    if not rows:
        raise DataError(f"no model has an accuracy on {source!r}; pass source= one of their data sets")
    names = dict.fromkeys(name for row in rows.values() for name in row if name != source)
    sets = []
    for name in names:
        models = [label for label, row in rows.items() if name in row]
        x, y = [rows[m][source] for m in models], [rows[m][name] for m in models]
        sets.append({"name": name, "models": models, "x": x, "y": y, **regression(x, y)})
    return {"source": source, "sets": sets}


def _single_book(label: str, source: "Source | Book") -> Book:
    if isinstance(source, Mapping) and {"roles", "codes"} <= set(source):
        return dict(source)
    books = code_books(source)  # type: ignore[arg-type]
    if len(books) > 1:
        raise DataError(f"{label} has {len(books)} code books ({books[0]['name']}, ...); pass one of code_books(model)")
    return books[0]


def _cosine(x: Sequence[float], y: Sequence[float]) -> float | None:
    lengths = math.hypot(*x) * math.hypot(*y)
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / lengths if lengths else None


def _read(path: Path) -> nn.Module | Mapping[str, Tensor]:
    """A saved model, or the weights of a checkpoint file or of the last checkpoint in a run's folder."""
    if (path / "model.json").exists():
        return load(path)
    file = path / "last.ckpt" if path.is_dir() else path
    if not file.is_file():
        raise StoreError(f"{path} is neither a folder of regard.save, nor a run with last.ckpt, nor a checkpoint")
    return read_tensors(file, "ema", "model")
