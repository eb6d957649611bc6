"""boards: generated boards that ask for one ability each; docs/probes.md says what is shown, asked and needed.

A black board of side x side cells of 14 x 14 pixels, one token a cell. A cell has two halves of 14 x 7 pixels: the left
one can show a garment, the right one a digit; a code fills the cell. Some cells ask, each for one class. A board of
the ability "motion" is a clip of several frames. Every board is a pure function of its set, split, seed and index.
Images of different splits are different.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from regard.core import ConfigError, DataError, nearest
from regard.core.validation import check_fields
from regard.images.streams import generator
from regard.models.create import parse_host

from .board_images import HEIGHT, WIDTH, BoardImages, board_images
from .board_paths import paths
from .generated import with_revision

CELL = HEIGHT
"""Pixels of a cell's side."""
HALF = WIDTH
NOTHING = 255
"""The label of a cell that does not ask."""
BLOCK = 64
"""Boards that are generated together."""
EPOCH = 6_400
"""Training boards of an epoch; those of the next one are new."""
TESTED = 1_024
"""Boards of each of the splits "val" and "test"."""
REACH = 1
"""Largest step of the abilities "offset" and "motion", in cells, down or across."""
STEPS = [(r, c) for r in range(-REACH, REACH + 1) for c in range(-REACH, REACH + 1) if (r, c) != (0, 0)]
_DOTS = 0.3
NAMES = ("boards", "digit_boards")
"""Of the sets: with garments, and with digits in their place."""


@dataclass(frozen=True)
class Ability:
    """classes: of an answer. pairs: the default. cells: that pairs need, each. needs: what answers it; question: what
    is asked, in words. asking: cells that ask, for each pair. images: different garments that a pair needs. epochs: in
    which softmax attention learns it. frames: of a board."""

    classes: int
    pairs: int
    cells: int | float
    needs: str
    question: str
    asking: int = 1
    images: int = 0
    epochs: int = 6
    frames: int = 1


ABILITIES: Mapping[str, Ability] = {
    "content": Ability(10, 10, 2, "recall by content",
                       "A garment is shown again: which digit stood beside it?", images=1),
    "place": Ability(10, 10, 2, "recall by absolute place", "A code names a row and a column: which digit is there?"),
    "offset": Ability(10, 10, 2, "recall by relative place",
                      "A code names a step of one cell, down, across or both: which digit is there?", epochs=15),
    "salience": Ability(10, 10, 2, "the key that stands out",
                        "Which digit stands beside the brightest garment?", images=1),
    "compare": Ability(2, 16, 2, "same or different", "Is this garment the same as one of the others?", images=2),
    "count": Ability(4, 10, 3.5, "how many match", "How many other cells show this garment, 0 to 3?", images=1),
    "hops": Ability(10, 8, 2, "two steps of recall",
                    "A code names a cell, which may show the code of another: which digit is at the end?", asking=2),
    "motion": Ability(10, 8, 4, "following what moves",
                      "Garments move, two of each kind: which digit stood beside this one in the first frame?",
                      asking=2, images=1, frames=3),
}  # fmt: skip
"""What boards can ask for."""
PROBED = {name: ability for name, ability in ABILITIES.items() if ability.frames == 1}
"""What probes ask for."""


@dataclass(frozen=True, kw_only=True)
class BoardSet:
    """A set of boards, as `--data` spells it: `boards(ability=content, pairs=16)`.

    ability: one of `ABILITIES`. pairs: of shown and asking cells, 0 = the ability's own number. side: cells of a
    board's side. noise: deviation of the noise of garments that are shown again, as a share of white. garments: False
    shows scikit-learn's digits in their place, `digit_boards(...)`, which is another set.
    Raises: ConfigError.
    """

    brightness: ClassVar[tuple[float, float]] = (0.7, 1.3)

    ability: str
    pairs: int = 0
    side: int = 6
    noise: int | float = 0.1
    garments: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ability not in ABILITIES:
            raise ConfigError(f"boards have no ability {self.ability!r}; {nearest(self.ability, ABILITIES)}")
        ability = ABILITIES[self.ability]
        object.__setattr__(self, "pairs", self.pairs or ability.pairs)
        if not 2 <= self.side <= 32:
            raise ConfigError(f"boards have a side of 2 to 32 cells, not {self.side}")
        most = min(int(self.side**2 / ability.cells), self.side**2 - 1)
        if most < 2 or self.side < 2 * ability.frames - 1:  # what moves needs room
            raise ConfigError(f"boards of {self.side} x {self.side} cells are too small for {self.ability}")
        if self.pairs < 2 or self.pairs > most:
            raise ConfigError(
                f"boards of {self.side} x {self.side} cells have 2 to {most} pairs for {self.ability}, not {self.pairs}"
            )
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"the noise of boards is a share of white, 0 to 1, not {self.noise}")
        object.__setattr__(self, "noise", float(self.noise))  # 0 and 0.0 are one set

    @property
    def name(self) -> str:
        """ "boards" or "digit_boards"."""
        return NAMES[0] if self.garments else NAMES[1]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of a board in pixels."""
        return self.side * CELL, self.side * CELL

    @property
    def frames(self) -> int:
        """Frames of a board."""
        return ABILITIES[self.ability].frames

    @property
    def classes(self) -> int:
        """Number of classes of an answer."""
        return ABILITIES[self.ability].classes

    @property
    def asking(self) -> int:
        """Number of cells of a board that ask."""
        return ABILITIES[self.ability].asking * self.pairs

    def __str__(self) -> str:
        """The spelling, without what is at its default."""
        usual = {"pairs": ABILITIES[self.ability].pairs, "side": 6, "noise": 0.1}
        changed = {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        options = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{self.name}(ability={self.ability}{options})"

    @property
    def identity(self) -> str:
        """The spelling with the generator's revision, for a run's key: "boards@2(...)" for the second."""
        return str(self).replace(self.name, with_revision(self.name), 1)


@dataclass(frozen=True, eq=False)
class Boards:
    """n boards. images: (n, side * 14, side * 14, frames); answers: the class that a cell asks for, `NOTHING`
    elsewhere, (n, frames * side, side), the frames below one another."""

    images: UInt8[np.ndarray, "n H W frames"]
    answers: UInt8[np.ndarray, "n h w"]


def is_boards(data: str) -> bool:
    """Whether a text names a set of boards."""
    return data.partition("(")[0].strip() in NAMES


def read_boards(data: str) -> BoardSet:
    """The set that a text spells. Raises: ConfigError."""
    example = "boards(ability=content, pairs=10, side=6, noise=0.1)"
    if not isinstance(data, str) or not is_boards(data):
        raise ConfigError(f"{data!r} is no set of boards; expected {example}, or digit_boards(...) without garments")
    set_name, _, options = data.strip().partition("(")
    options = re.sub(r"\bability\s*=\s*(\w+)", r"ability='\1'", options)  # without quotes, as shells like it
    try:
        name, fields = parse_host(f"{set_name}({options}" if options else set_name)
    except ConfigError as error:
        raise ConfigError(f"cannot read the boards {data!r}: expected {example}") from error
    names = [field.name for field in dataclasses.fields(BoardSet) if field.name != "garments"]
    for field in fields:
        if field not in names:
            raise ConfigError(f"{name} has no {field!r}; it has {', '.join(names)}")
    if "ability" not in fields:
        raise ConfigError(f"{name} needs an ability: {', '.join(ABILITIES)}")
    return BoardSet(**fields, garments=name == NAMES[0])


def boards(data: BoardSet, split: str, seed: int, start: int, stop: int, download: bool = False) -> Boards:
    """Boards start .. stop-1 of a split: "train", "val" or "test".

    seed: of training boards; it has no meaning for the others. download: Fashion-MNIST if it is missing.
    Raises: DataError without the images.
    """
    seed = seed if split == "train" else 0
    made = [_block(data, split, seed, block, download) for block in range(start // BLOCK, -(-stop // BLOCK))]
    rows = slice(start % BLOCK, start % BLOCK + stop - start)
    images = np.concatenate([part.images for part in made])[rows]
    return Boards(images, np.concatenate([part.answers for part in made])[rows])


def check_images(data: BoardSet, splits: Iterable[str], download: bool = False) -> None:
    """Raises: DataError if a split has fewer different images than a board shows."""
    number = ABILITIES[data.ability].images * data.pairs
    for split in splits:
        if number > (there := len(board_images(data.garments, split, download).shown)):
            raise DataError(f'{data} shows {number} different images on a board, and its split "{split}" has {there}')


def checksum(data: BoardSet, download: bool = False) -> str:
    """64 hexadecimal digits of a digest of the images and of the set. Raises: DataError."""
    facts = (str(data), BLOCK, EPOCH, TESTED, STEPS if data.ability == "offset" else ())
    total = hashlib.sha256(repr(facts).encode())
    for split in ("train", "val", "test"):
        images = board_images(data.garments, split, download)
        total.update(images.shown.tobytes() + b"".join(part.tobytes() for part in images.digits))
    return total.hexdigest()


class _Draw:
    """The random choices of a block of boards, and the pixels drawn so far."""

    def __init__(self, data: BoardSet, images: BoardImages, rng: np.random.Generator) -> None:
        self.data, self.images, self.rng = data, images, rng
        number = data.frames * data.side**2
        self.cells = np.zeros((BLOCK, number, CELL, CELL), np.float32)
        self.answers = np.full((BLOCK, number), NOTHING, np.uint8)
        self.rows = np.arange(BLOCK)[:, None]

    def places(self) -> np.ndarray:
        """The cells of each board in random order, (BLOCK, side^2)."""
        return self.rng.random(self.answers.shape).argsort(1)

    def garments(self, number: int) -> np.ndarray:
        """So many different garments for each board, (BLOCK, number, 14, 7): one of each part of the pool."""
        part = len(self.images.shown) // number
        if not part:
            raise DataError(f"{self.data} needs {number} different images, a split has {len(self.images.shown)}")
        chosen = part * np.arange(number) + self.rng.integers(0, part, (BLOCK, number))
        order = self.rng.random(chosen.shape).argsort(1)
        return self.images.shown[np.take_along_axis(chosen, order, 1)]

    def again(self, garments: np.ndarray) -> np.ndarray:
        """The same garments with another brightness and noise."""
        bright = garments * self.rng.uniform(*self.data.brightness, (*garments.shape[:2], 1, 1)).astype(np.float32)
        return bright + 255 * np.float32(self.data.noise) * self.rng.standard_normal(garments.shape, np.float32)

    def labels(self, number: int) -> np.ndarray:
        """Digits 0 to 9, each with the same probability, (BLOCK, number)."""
        return self.rng.integers(0, 10, (BLOCK, number))

    def digits(self, labels: np.ndarray) -> np.ndarray:
        """An image of each digit, (*labels.shape, 14, 7)."""
        images, draws = np.empty((*labels.shape, CELL, HALF), np.float32), self.rng.random(labels.shape)
        for label, pool in enumerate(self.images.digits):
            here = labels == label
            images[here] = pool[(draws[here] * len(pool)).astype(int)]
        return images

    def fill_left(self, places: np.ndarray, images: np.ndarray) -> None:
        """Draw images into the left halves of cells."""
        self.cells[self.rows, places, :, :HALF] = images

    def fill_right(self, places: np.ndarray, images: np.ndarray) -> None:
        """Draw images into the right halves of cells."""
        self.cells[self.rows, places, :, HALF:] = images

    def ask(self, places: np.ndarray, answers: np.ndarray) -> None:
        """Cells that ask, and what is right."""
        self.answers[self.rows, places] = answers


def _content(draw: _Draw) -> None:
    """Pairs of a garment and a digit; each garment is shown again alone, and asks for its digit."""
    pairs = draw.data.pairs
    places, garments, labels = draw.places(), draw.garments(pairs), draw.labels(pairs)
    shown, asking = places[:, :pairs], places[:, pairs : 2 * pairs]
    draw.fill_left(shown, garments)
    draw.fill_right(shown, draw.digits(labels))
    draw.fill_left(asking, draw.again(garments))
    draw.ask(asking, labels)


def _among_digits(draw: _Draw, asking: np.ndarray, targets: np.ndarray, codes: np.ndarray) -> None:
    """Digits in all cells that do not ask; asking cells show a code and want the digit of their target cell."""
    labels = draw.labels(draw.data.side**2)
    draw.fill_right(np.arange(draw.data.side**2)[None].repeat(BLOCK, 0), draw.digits(labels))
    draw.cells[draw.rows, asking] = codes
    draw.ask(asking, np.take_along_axis(labels, targets, 1))


def _place(draw: _Draw) -> None:
    """An asking cell shows the code of a row and a column, and wants the digit there."""
    pairs, places = draw.data.pairs, draw.places()
    asking, others = places[:, :pairs], places[:, pairs:]
    targets = np.take_along_axis(others, draw.rng.integers(0, others.shape[1], asking.shape), 1)
    _among_digits(draw, asking, targets, place_codes(draw.data.side)[targets])


def _offset(draw: _Draw) -> None:
    """An asking cell shows the code of a step, and wants the digit at that step."""
    pairs, side = draw.data.pairs, draw.data.side
    asking, missing = np.zeros((BLOCK, pairs), np.int64), np.arange(BLOCK)
    while len(missing):  # an asking cell needs a digit within reach
        asking[missing] = draw.places()[missing, :pairs]
        allowed = _digits_within_reach(draw, asking)
        missing = np.flatnonzero(allowed.sum(2).min(1) == 0)
    chosen = (draw.rng.random(allowed.shape) * allowed).argmax(2)
    steps = np.array(STEPS)[chosen]
    _among_digits(draw, asking, asking + steps[..., 0] * side + steps[..., 1], step_codes()[chosen])


def _digits_within_reach(draw: _Draw, asking: np.ndarray) -> np.ndarray:
    """For each asking cell and each of `STEPS` whether there is a cell that does not ask, (BLOCK, pairs, 8)."""
    side = draw.data.side
    free = np.ones(draw.answers.shape, np.bool_)
    free[draw.rows, asking] = False
    wide = np.pad(free.reshape(BLOCK, side, side), [(0, 0), (REACH, REACH), (REACH, REACH)])
    down, across = np.array(STEPS).T + REACH
    return wide[draw.rows[..., None], asking[..., None] // side + down, asking[..., None] % side + across]


def _salience(draw: _Draw) -> None:
    """Pairs of a garment and a digit; cells with a question mark all want the digit of the brightest garment."""
    pairs, rng = draw.data.pairs, draw.rng
    places, garments, labels = draw.places(), draw.garments(pairs), draw.labels(pairs)
    shown, asking = places[:, :pairs], places[:, pairs : 2 * pairs]
    levels = rng.uniform(0.3, 0.8, (BLOCK, pairs))
    levels[:, 0] = 1.0  # places are random, so is that of the first
    levels *= rng.uniform(0.5, 1.0, (BLOCK, 1))  # no level is the brightest of every board
    level = garments.mean((2, 3), keepdims=True)
    draw.fill_left(shown, (garments * (60 / level)).clip(0, 255) * levels[..., None, None].astype(np.float32))
    draw.fill_right(shown, draw.digits(labels))
    draw.cells[draw.rows, asking] = question_mark()
    draw.ask(asking, labels[:, :1])


def _compare(draw: _Draw) -> None:
    """Garments, and garments with a question mark, half of them the same: is this one among the others?"""
    pairs = draw.data.pairs
    places, garments = draw.places(), draw.garments(2 * pairs)
    half = pairs // 2 + (draw.rng.random((BLOCK, 1)) < pairs % 2 / 2)
    same = draw.rng.random((BLOCK, pairs)).argsort(1) < half
    shown, other = garments[:, :pairs], garments[:, pairs:]
    draw.fill_left(places[:, :pairs], shown)
    asking = places[:, pairs : 2 * pairs]
    draw.fill_left(asking, draw.again(np.where(same[..., None, None], shown, other)))
    draw.fill_right(asking, question_mark()[:, :HALF])
    draw.ask(asking, same)


def _count(draw: _Draw) -> None:
    """Garments, each shown 0 to 3 times, and once more with a question mark: how many times?"""
    pairs, rng = draw.data.pairs, draw.rng
    places, garments = draw.places(), draw.garments(pairs)
    times = (np.arange(pairs) + rng.integers(0, 4, (BLOCK, 1))) % 4  # each number is as frequent as the others
    asking, next_place = places[:, :pairs], pairs + times.cumsum(1) - times
    draw.fill_left(asking, garments)
    draw.fill_right(asking, question_mark()[:, :HALF])
    for copy in range(3):
        board, kind = np.nonzero(times > copy)
        copies = draw.again(garments)[board, kind]
        draw.cells[board, places[board, next_place[board, kind] + copy], :, :HALF] = copies
    draw.ask(asking, times)


def _hops(draw: _Draw) -> None:
    """Half of the asking cells show the code of a cell with a digit, the others that of one of the first half."""
    pairs, places = draw.data.pairs, draw.places()
    links, starts, others = places[:, :pairs], places[:, pairs : 2 * pairs], places[:, 2 * pairs :]
    ends = np.take_along_axis(others, draw.rng.integers(0, others.shape[1], links.shape), 1)
    link = draw.rng.integers(0, pairs, starts.shape)
    shown = np.concatenate([ends, np.take_along_axis(links, link, 1)], 1)
    targets = np.concatenate([ends, np.take_along_axis(ends, link, 1)], 1)
    _among_digits(draw, places[:, : 2 * pairs], targets, place_codes(draw.data.side)[shown])


def _motion(draw: _Draw) -> None:
    """Garments that move by a step from frame to frame, two of each kind; those after the first frame ask for the digit
    that the same one has there. Each is nearer to where it began than to where its twin did."""
    pairs, side = draw.data.pairs, draw.data.side
    kinds = -(-pairs // 2)
    places = paths(draw.rng, STEPS, BLOCK, side, pairs, kinds, draw.data.frames)
    garments, labels = draw.garments(kinds)[:, np.arange(pairs) % kinds], draw.labels(pairs)
    draw.fill_left(places[..., 0], garments)
    draw.fill_right(places[..., 0], draw.digits(labels))
    for frame in range(1, draw.data.frames):
        here = frame * side**2 + places[..., frame]
        draw.fill_left(here, draw.again(garments))
        draw.ask(here, labels)


_DRAWN: Mapping[str, Callable[[_Draw], None]] = {
    "content": _content,
    "place": _place,
    "offset": _offset,
    "salience": _salience,
    "compare": _compare,
    "count": _count,
    "hops": _hops,
    "motion": _motion,
}


def _block(data: BoardSet, split: str, seed: int, block: int, download: bool) -> Boards:
    side, frames, rng = data.side, data.frames, generator(str(data), split, seed, block)
    draw = _Draw(data, board_images(data.garments, split, download), rng)
    _DRAWN[data.ability](draw)
    image = draw.cells.clip(0, 255).astype(np.uint8).reshape(BLOCK, frames, side, side, CELL, CELL)
    pixels = image.transpose(0, 2, 4, 3, 5, 1).reshape(BLOCK, side * CELL, side * CELL, frames)
    return Boards(pixels, draw.answers.reshape(BLOCK, frames * side, side))


@lru_cache(maxsize=4)
def place_codes(side: int) -> np.ndarray:
    """The code of each cell of a board, (side^2, 14, 14): random dots of its row, and of its column."""
    rows, columns = np.divmod(np.arange(side**2), side)
    return np.concatenate([_dots("row", side)[rows], _dots("column", side)[columns]], 2)


@lru_cache(maxsize=1)
def step_codes() -> np.ndarray:
    """The code of each of `STEPS`, (8, 14, 14): random dots of the cells down, and of those across."""
    down, across = np.array(STEPS).T + REACH
    return np.concatenate([_dots("down", 2 * REACH + 1)[down], _dots("across", 2 * REACH + 1)[across]], 2)


def _dots(name: str, number: int) -> np.ndarray:
    """So many half cells of random dots, (number, 14, 7)."""
    return np.float32(255) * (generator("boards", name).random((number, CELL, HALF)) < _DOTS)


@lru_cache(maxsize=1)
def question_mark() -> np.ndarray:
    """What cells show that ask without a code, random dots (14, 14)."""
    return np.concatenate([*_dots("question", 2)], 1)
