"""The ways of things that move on boards."""

from collections.abc import Sequence

import numpy as np

Steps = Sequence[tuple[int, int]]
"""Cells down and across from frame to frame; a thing keeps its step in all frames of a board."""
_DRAWS = 64
"""Ways that are drawn for each thing, of which the first that fits is taken."""


def paths(
    rng: np.random.Generator, steps: Steps, boards: int, side: int, things: int, kinds: int, frames: int
) -> np.ndarray:
    """The cell of each thing in each frame, (boards, things, frames) int64: row * side + column.

    Things i and i + kinds look alike. All stay on the board, no two are in one cell of a frame, and each is nearer (in
    the larger of rows and columns) to where it began than to where its twin began.
    """
    cells = np.empty((boards, things, frames), np.int64)
    missing = np.arange(boards)
    while len(missing):  # where a thing found no way among others, the whole board is drawn again
        made, fits = _attempt(rng, steps, len(missing), side, things, kinds, frames)
        cells[missing[fits]] = made[fits]
        missing = missing[~fits]
    return cells


def _attempt(
    rng: np.random.Generator, steps: Steps, boards: int, side: int, things: int, kinds: int, frames: int
) -> tuple[np.ndarray, np.ndarray]:
    """The cells, and for each board whether all its things found a way."""
    at = np.zeros((boards, things, frames, 2), np.int64)
    fits = np.ones(boards, np.bool_)
    for thing in range(things):
        start = rng.integers(0, side, (boards, _DRAWS, 1, 2))
        step = np.array(steps)[rng.integers(0, len(steps), (boards, _DRAWS, 1))]
        drawn = start + step * np.arange(frames)[:, None]
        good = ((drawn >= 0) & (drawn < side)).all((2, 3))
        good &= (drawn[:, :, None] != at[:, None, :thing]).any(4).all((2, 3))
        if thing >= kinds:
            twin = at[:, None, thing - kinds]
            good &= _keeps_nearer(drawn, twin) & _keeps_nearer(twin, drawn)
        at[:, thing] = drawn[np.arange(boards), good.argmax(1)]
        fits &= good.any(1)
    return at[..., 0] * side + at[..., 1], fits


def _keeps_nearer(way: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether all places of a way (..., frames, 2) are nearer to its first one than to the other's."""
    near, far = (np.abs(way - start[..., :1, :]).max(-1) for start in (way, other))
    return np.asarray((near < far).all(-1))
