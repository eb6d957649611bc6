"""What a judge of outputs is: how far a model's new answer is from its old one, for each image, and what teaches it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import UnsupportedError

Change = tuple[Float[Tensor, " n"], Float[Tensor, " n"]]
"""Of each image, the distance, from 0, and what agrees, 1 if all does."""


class Judge(ABC):
    """Compares one output of a model with what the model gave before. name: of the output, "" where there is one only.

    kind: as in `--judge`. distance: what is measured, with its unit, as text. unit: after a number. kept: what the
    share that agrees is of. sentence: what a plan keeps, with {} for the percent. shares: whether what agrees is a
    share of something, not a correlation. whole: `change` needs all images at once. learnable: whether `loss` has
    gradients.
    """

    kind: ClassVar[str]
    distance: ClassVar[str]
    unit: ClassVar[str] = ""
    kept: ClassVar[str]
    sentence: ClassVar[str]
    shares: ClassVar[bool] = True
    learnable: ClassVar[bool] = True
    whole: bool = False

    def __init__(self, name: str = "") -> None:
        self.name = name

    def read(self, output: Any) -> Any:
        """The part of an output that is judged, float32. Raises: UnsupportedError if it is not there."""
        found = named_outputs(output)
        if self.name not in found:
            raise UnsupportedError(f"the output has no {self.name!r} now; it has {', '.join(found) or 'no tensor'}")
        return found[self.name].float()

    @abstractmethod
    def change(self, before: Any, after: Any) -> Change:
        """How far the new output is from the old one. before, after: from `read`."""

    def loss(self, before: Any, after: Any) -> Float[Tensor, ""]:
        """What a model learns to make small: the mean squared difference, divided by the variance of the old values."""
        return (after - before).square().mean() / before.var().clamp_min(1e-12)

    def __str__(self) -> str:
        return f"{self.kind} ({self.name})" if self.name else self.kind


def named_outputs(output: Any, name: str = "") -> dict[str, Tensor]:
    """The floating tensors of an output by name: "" for a tensor, "logits" in a mapping or an object, "0" in a tuple.

    Names within a part follow a dot. Scalars, such as a loss, are left out.
    """
    if isinstance(output, Tensor):
        plain = output.is_floating_point() and output.ndim and output.layout is torch.strided
        return {name: output} if plain else {}
    found: dict[str, Tensor] = {}
    for key, part in _parts(output):
        found |= named_outputs(part, f"{name}.{key}" if name else key)
    return found


def _parts(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        yield from ((str(key), part) for key, part in output.items())
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output, strict=True)
    elif isinstance(output, tuple | list):
        yield from ((str(number), part) for number, part in enumerate(output))
    elif output is not None and not isinstance(output, str | int | float):
        yield from vars(output).items() if hasattr(output, "__dict__") else ()


def image_mean(values: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
    """The mean of each image."""
    return values.reshape(len(values), -1).mean(1)


def divergence(before: Float[Tensor, "B K ..."], after: Float[Tensor, "B K ..."]) -> Float[Tensor, "B ..."]:
    """The Kullback-Leibler divergence from log probabilities, in nats; a class of probability 0 before adds nothing."""
    share = before.exp()
    return torch.where(share > 0, share * (before - after), 0.0).sum(1)


def neighbours(vectors: Float[Tensor, "N C"]) -> Tensor:
    """For each vector the index of the most similar other one, by the cosine."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return (unit @ unit.mT).fill_diagonal_(-2.0).argmax(-1)


def concatenate(parts: Sequence[Any]) -> Any:
    """Tensors of batches in one; lists likewise."""
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else [one for part in parts for one in part]
