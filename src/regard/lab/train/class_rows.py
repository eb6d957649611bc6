"""The outputs of a network by class: the tensors that grow with the number of classes, whose rows follow the names."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

log = logging.getLogger("regard.lab.engine")
_FEW = 3


@dataclass(frozen=True)
class ClassRows:
    """Of a tensor: along `axis` it has `first` rows of no class, such as the background, then `rows` for each class."""

    axis: int
    first: int
    rows: int

    def places(self, classes: Sequence[int]) -> list[int]:
        """The rows of no class, and those of these classes."""
        starts = (self.first + self.rows * number for number in classes)
        return [*range(self.first), *(start + row for start in starts for row in range(self.rows))]


def class_rows(build: Callable[[int], nn.Module]) -> dict[str, ClassRows]:
    """The tensors, by name, that grow with the number of classes in the models that `build` makes.

    The models are made on the meta device, or, where one cannot be, on the CPU.
    """
    states: list[dict[str, Tensor]] = []
    with suppress(Exception), torch.device("meta"):  # of a host of the user's own it may be any
        states = [build(number).state_dict() for number in (_FEW, _FEW + 1)]
    fewer, more = states or (build(number).state_dict() for number in (_FEW, _FEW + 1))
    found = {}
    for name, value in fewer.items():
        shapes = zip(value.shape, more[name].shape, strict=True) if name in more else ()
        grown = [(axis, few, many - few) for axis, (few, many) in enumerate(shapes) if many != few]
        if len(grown) == 1:
            axis, few, rows = grown[0]
            found[name] = ClassRows(axis, few - _FEW * rows, rows)
    return found


def match_classes(
    weights: Mapping[str, Tensor], target: Mapping[str, Tensor], rows: Mapping[str, ClassRows], old: Sequence[str],
    new: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of `rows` in the order of the new classes; those of unknown classes are the target's own.

    weights: of the source, which may have outputs beyond the named ones. Says how many outputs start anew.
    """
    known = [index for index, label in enumerate(new) if label in old]
    placed: dict[str, Tensor] = {}
    there = [name for name in rows if name in weights]
    for name in there:
        each, given, own = (
            rows[name],
            weights[name].movedim(rows[name].axis, 0),
            target[name].movedim(rows[name].axis, 0),
        )
        if given.shape[1:] == own.shape[1:] and len(given) >= each.first + each.rows * len(old):
            result = own.clone()
            taken = each.places([old.index(new[index]) for index in known])
            result[each.places(known)] = given[taken].to(own.dtype)
            placed[name] = result.movedim(0, each.axis).contiguous()
    kept = len(known) if placed else 0
    if there and kept < len(new):
        log.warning(
            "the classes have other names than those that the weights were trained on: %d of %d outputs start anew",
            len(new) - kept, len(new),
        )  # fmt: skip
    return placed
