"""How a swapped layer learns the grid of its tokens: from the output of the module that makes the tokens."""

import functools
import math
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from regard.core import Grid, GridError, SwapError

NO_BACKWARD = -1
"""The number of the backward pass, outside of all."""


Sides = tuple[int, int, int]
"""Height, width and depth in patch tokens."""


_same_grid = functools.lru_cache(Grid)
"""The grid with these numbers, made once: all layers of all passes ask for a few."""


class GridSource:
    """The grid of the current forward pass, written by a forward hook on the watched module, read by the layers.

    The hook is the bound method `record`, so a deep copy of a model gets a source of its own. Until its own watched
    module has run, a copy follows the source that it was copied from, so that a copy of one block may become a part of
    the same model. Every thread has its own grid, which ends with the thread; a pickled copy starts with the grid of
    the thread that pickled.
    Activation checkpointing runs a layer again during the backward pass, maybe in another thread. The grid is then that
    of the forward pass whose graph is being run backward, where it is marked. If the watched module is frozen, there is
    no mark: a thread must then run a pass backward before it begins one of another size. The same holds for parts that
    are compiled by themselves inside of checkpoints; a model that is compiled as a whole has no such limit.
    Raises: GridError, by `grid`, where the grid is unknown: the watched module has not run, or a layer runs without it
    in another thread or a backward pass, and passes of several sizes are possible; by `count`, where a layer runs once
    more without it and the grid cannot be told from the number of tokens.
    users: the swapped layers of all models that read it.
    """

    def __init__(self) -> None:
        self._reset(None, None, None)

    def _reset(self, *sides: int | None) -> None:
        self.users: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._sizes: weakref.WeakSet[_Size] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread = _OfThread(self._sizes, self._lock)
        self._thread.size.height, self._thread.size.width, self._thread.size.depth = sides
        self._trained: set[Sides] = set()  # grids of all passes that may run backward
        self._last, self._one = sides, sides[0] is not None  # of passes that may run backward; all the same
        self._expected: Sides | None = None
        self._of_number: dict[int, Sides] = {}  # the first grid of each number of tokens
        self._alike: dict[int, Sides] = {}  # another one of that number
        self._copied_from: GridSource | None = None

    def expect(self, grid: Grid) -> None:
        """The grid where none is known: a traced model (torch.fx) runs without the watched module."""
        self._expected = (grid.height, grid.width, grid.depth)

    def record(self, module: nn.Module, args: tuple, output: Any) -> None:
        """The forward hook; output (B, C, h, w), of clips (B, C, depth, h, w), or tokens and their (h, w), or those of
        Gemma 4's patch embedding.

        Raises: GridError for tokens without (h, w), whose images may have different grids.
        """
        if isinstance(output, Proxy):
            return  # no pass, but a trace of one
        if self._copied_from is not None:
            self._copied_from = None
        size = self._thread.size
        output, sides = _with_sides(module, args[0] if args else None, output)
        if sides is not None and output.ndim < 3:
            raise GridError(f"the watched module gives {tuple(output.shape)}, no map (B, C, h, w)")
        if sides is None:
            raise GridError("patches with coordinates have no common grid; pass a swapped model images (B, C, H, W)")
        size.height, size.width, size.depth = (*sides, 1) if len(sides) == 2 else (*sides[1:], sides[0])
        if torch.is_grad_enabled():
            self._last = size.sides
        if not torch.compiler.is_compiling():
            size.backward = torch._C._current_graph_task_id()
            if type(size.height) is int:
                size.begin(size.sides)
                number = math.prod(size.sides)
                if self._of_number.setdefault(number, size.sides) != size.sides:
                    self._alike[number] = size.sides
            if torch.is_grad_enabled() and type(size.height) is int:
                self._mark(size, output)

    def _mark(self, size: "_Size", output: Tensor) -> None:
        """Keep the grid of a pass that may run backward: in its graph, or, with a frozen module, until it has."""
        grid = size.sides
        self._trained.add(grid)
        self._one = len(self._trained) == 1
        if output.grad_fn is not None:
            output.grad_fn.metadata[self] = grid  # type: ignore[index]
        elif size.backward == NO_BACKWARD:
            if size.finished:
                size.open, size.finished = set(), False
            size.open.add(grid)

    def count(self, layer: nn.Module, times: int) -> None:
        """A layer runs, which does so `times` in a pass of the whole model. Raises: GridError."""
        source = self._copied_from or self
        if not source._alike or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != NO_BACKWARD:
            return
        size = source._thread.size
        size.calls[id(layer)] = number = size.calls.get(id(layer), 0) + 1
        if number <= times or type(size.height) is not int:
            return
        cells = math.prod(size.sides)
        known = {size.sides, *(grids[cells] for grids in (source._of_number, source._alike) if cells in grids)}
        if len(known) > 1:
            raise GridError(
                "a swapped layer runs again without the module that gives the grid of its tokens, which may be "
                f"{' or '.join(map(_text, sorted(known)))}, as many: pass the images through the whole model"
            )

    def grid(self, prefix: int, suffix: int = 0) -> Grid:
        """The grid of this pass, with `prefix` tokens before its patch tokens and `suffix` after them."""
        if self._copied_from is not None:
            return self._copied_from.grid(prefix, suffix)
        size, compiling = self._thread.size, torch.compiler.is_compiling()
        sides = size.sides
        if not compiling:
            size.check()
        if not compiling and torch._C._current_graph_task_id() != NO_BACKWARD:
            sides = self._recomputed_size(size)
        elif sides[0] is None:
            sides = self._last if compiling and torch.is_grad_enabled() and self._one else self._elsewhere()
        height, width, depth = sides
        make = _same_grid if type(height) is int and not compiling else Grid
        return make(height, width, prefix, suffix, depth=depth)

    def _recomputed_size(self, size: "_Size") -> Sides:
        """The sides of the forward pass of which a part runs again in the present backward pass."""
        sizes = self._all_sizes()
        known = self._trained | {each.sides for each in sizes if each.height is not None}
        if len(known) > 1:
            found = nearest_marks(torch._C._current_autograd_node(), self)
            if size.backward == torch._C._current_graph_task_id():  # the watched module has run again, too
                found.add(size.sides)
            known = found or {grid for each in sizes for grid in each.open} or known
        for each in sizes:
            each.finished = True
        return self._only(known)

    @torch.compiler.disable
    def _elsewhere(self) -> Sides:
        """The sides where this thread has not run the watched module."""
        known = {size.sides for size in self._all_sizes() if size.height is not None}
        return self._only(known or ({self._expected} if self._expected else known))

    def _all_sizes(self) -> "list[_Size]":
        with self._lock:
            return list(self._sizes)

    def _only(self, sizes: set[Sides]) -> Sides:
        if not sizes:
            raise GridError("the grid of these tokens is unknown: call the whole model, not a swapped layer alone")
        if len(sizes) > 1:
            grids = ", ".join(map(_text, sorted(sizes)))
            raise GridError(
                f"a swapped layer runs without the module that gives the grid of its tokens, which may be {grids}: run "
                "the model in one thread, and backward before a pass of another size"
            )
        return next(iter(sizes))

    # copies and pickles; older versions have pickled the same dictionary

    def __deepcopy__(self, memo: dict[int, Any]) -> "GridSource":
        copied = GridSource()
        copied.__setstate__(self.__getstate__())
        copied._copied_from = self
        return copied

    def __getstate__(self) -> dict[str, int]:
        sides = (self._copied_from or self)._thread.size.sides
        return dict(zip(("height", "width", "depth"), sides if type(sides[0]) is int else (0, 0, 0), strict=True))

    def __setstate__(self, state: dict[str, int]) -> None:
        known = (state["height"], state["width"], state.get("depth", 1))
        self._reset(*(known if state["height"] else (None, None, None)))


def _text(sides: Sides) -> str:
    return "x".join(map(str, Grid(sides[0], sides[1], depth=sides[2]).sides))


class _Size:
    """Height, width and depth in patch tokens, None before the first pass.

    backward: number of the backward pass in which they were recorded, when a checkpointed part contains the module.
    calls: how often each layer, by its id, has run since the tokens were made.
    open: grids of passes that may run backward and have no mark, as the module is frozen. finished: whether a part of
    such a pass has run again, so that the next pass begins another set.
    """

    def __init__(self) -> None:
        self.height: Any = None
        self.width: Any = None
        self.depth: Any = None
        self.backward = NO_BACKWARD
        self.open: set[Sides] = set()
        self.finished = False
        self.unread: Sides | None = None
        self.clash: Sides | None = None
        self.calls: dict[int, int] = {}

    @property
    def sides(self) -> Any:
        """(height, width, depth)."""
        return self.height, self.width, self.depth

    def begin(self, sides: Sides) -> None:
        """A watched module has made tokens on a grid."""
        self.calls.clear()
        before, self.unread = self.unread, sides
        if before is not None and before != sides and math.prod(before) == math.prod(sides):
            self.clash = before

    def check(self) -> None:
        """Raises: GridError if a layer asks, and two grids of one number of tokens were begun since the last did."""
        clash, present, self.clash, self.unread = self.clash, self.unread, None, None
        if clash is not None and present is not None:
            first, second = map(_text, (clash, present))
            raise GridError(
                f"tokens on grids of {first} and of {second}, as many, were made before any attention: pass one image "
                "through the whole model before the next one's tokens are made"
            )


class _OfThread(threading.local):
    """`size`, another one in every thread; torch.compile can read and write it, unlike a ContextVar."""

    def __init__(self, sizes: "weakref.WeakSet[_Size]", lock: threading.Lock) -> None:
        self.size = _Size()
        with lock:
            sizes.add(self.size)


def nearest_marks(node: Any, owner: Hashable) -> set[Any]:
    """What `owner` has marked in the graph that leads to a node of a backward pass, at the marks nearest to it."""
    found, waiting, met = set(), [node], {node}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if owner in node.metadata:
            found.add(node.metadata[owner])
            continue
        before = {parent for parent, _ in node.next_functions} - met
        met |= before
        waiting.extend(before)
    return found


def _with_sides(module: nn.Module, given: Any, output: Any) -> tuple[Tensor, Any]:
    """The tokens or map that a watched module makes of what it was given, and (height, width); None for no grid."""
    if not isinstance(output, tuple):
        return output, output.shape[2:] if output.ndim == 5 else output.shape[-2:]
    if len(output) == 2:
        return cast(tuple[Tensor, Any], output)
    tokens, _, padding = output  # Gemma 4: tokens, their positions, and which of them are padding
    if padding is not None or given.ndim != 4:
        return tokens, None
    height, width = cast(tuple[int, int], module.patch_size)
    return tokens, (given.shape[-2] // height, given.shape[-1] // width)


def modules_around(model: nn.Module, layer: str) -> Iterator[nn.Module]:
    """The modules that have `layer` inside, the nearest first, the model itself last."""
    parts = layer.split(".")
    for end in range(len(parts) - 1, -1, -1):
        yield model.get_submodule(".".join(parts[:end]))


def watched_module(model: nn.Module, layer: str, watch: str) -> nn.Module | None:
    """The module at path `watch` below the nearest ancestor of `layer` that has it; None if there is none.

    watch: as in `Port`, "a|b" means either path, and {-3} is the third last part of the layer's name.
    """
    parts = {f"-{place}": part for place, part in enumerate(reversed(layer.split(".")), 1)}
    for module in modules_around(model, layer):
        for path in watch.split("|"):
            with suppress(AttributeError, KeyError):
                return module.get_submodule(path.format_map(parts))
    return None


def require_watched_module(model: nn.Module, layer: str, watch: str) -> nn.Module:
    """`watched_module`. Raises: SwapError if there is none."""
    module = watched_module(model, layer, watch)
    if module is None:
        raise SwapError(
            f"no module {watch!r} was found above {layer}, so the grid of its tokens is unknown; this model needs a "
            "port of its own"
        )
    return module
