"""Pathfinder (Linsley et al. 2018; Long Range Arena, Tay et al. 2021): are two dots on the same dashed contour?

Two contours of `dashes` dashes grow from seeds 7 pixels apart among five shorter distractors; one dot is at the seed of
a contour, the other at the far end of the same contour (label 1) or of the other (label 0). Generated here from
polylines: the samples are not the published ones, and their accuracy cannot be compared with published numbers.
The distance of the dots must not tell the label: a scene is kept only if the far ends of both contours have nearly
the same distance from the first dot. Their directions still tell a little, the more the shorter the contours are: trees
on the places of the dots are right for 61, 55 and 53 % of contours of 6, 9 and 14 dashes.
"""

import math
from dataclasses import dataclass

import numpy as np

from regard.images.streams import generator

from .cache import generated_splits
from .tokens import SequenceSet, Split, Tokens

DASH, GAP = 2.0, 2.0
"""Length of a dash and of the gap behind it, in pixels."""
SEEDS = 7.0
"""Distance of the seeds of the two contours."""
CLEARANCE = 2.4
"""Smallest distance of the dashes of different contours, and of a contour to itself, in pixels."""
SAME_DISTANCE = 1.5
"""Largest difference of the distances of the two far ends from the first dot."""
DISTRACTORS = 5
BORDER = 1.0
HEADINGS = 12
OVERSAMPLING = 4
STEPS = DASH * np.array([[0.0], [0.5], [1.0]])
"""Where along a dash its distance to others is measured."""
PART = 500
"""Samples in a stored part."""


@dataclass(frozen=True, kw_only=True)
class Pathfinder:
    """What is generated. side: of the image in pixels. dashes: of a contour; a distractor has a third. continuity:
    larger is straighter. sizes: numbers of samples for training, tuning and the test."""

    name: str
    side: int
    dashes: int
    sizes: tuple[int, int, int]
    continuity: float = 1.0


PATHFINDER = {
    spec.name: spec
    for spec in (
        Pathfinder(name="pathfinder", side=32, dashes=14, sizes=(160_000, 20_000, 20_000)),
        Pathfinder(name="pathfinder-9", side=32, dashes=9, sizes=(16_000, 2_000, 2_000)),
        Pathfinder(name="pathfinder-mini", side=24, dashes=6, sizes=(16_000, 2_000, 2_000)),
    )
}


@dataclass(frozen=True, eq=False)
class Scene:
    """dashes (n, 2, 2): start and end (x, y) of each, in pixels; contour (n,): which one it is of, 0 and 1 are the
    two long ones. dots (2, 2): their centres. label: 1 if they are on one contour."""

    dashes: np.ndarray
    contour: np.ndarray
    dots: np.ndarray
    label: int


class _Canvas:
    """The dashes so far, as points (n, 2) with the contour and the number of their dash (n, 2)."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.dashes: list[np.ndarray] = []
        self.contour: list[int] = []
        self.points = np.empty((0, 2))
        self.owner = np.empty((0, 2), int)

    def free(self, starts: np.ndarray, headings: np.ndarray, contour: int, index: int) -> np.ndarray:
        """Whether dashes from these points (h, 2) with these directions (h, 2) keep clear of the others and the border.

        The dash before it of the same contour is not an obstacle.
        """
        path = starts[:, None] + STEPS * headings[:, None]
        inside = ((path > BORDER) & (path < self.side - BORDER)).all((1, 2))
        other = ~((self.owner[:, 0] == contour) & (self.owner[:, 1] >= index - 1))
        obstacles = self.points[other]
        if not len(obstacles):
            return inside
        x, y = (path[..., axis, None] - obstacles[:, axis] for axis in (0, 1))
        return inside & ((x * x + y * y).min((1, 2)) >= CLEARANCE**2)

    def add(self, start: np.ndarray, heading: np.ndarray, contour: int, index: int) -> np.ndarray:
        """Draw a dash; returns its end."""
        end = start + DASH * heading
        self.dashes.append(np.stack([start, end]))
        self.contour.append(contour)
        self.points = np.concatenate([self.points, start + STEPS * heading])
        self.owner = np.concatenate([self.owner, [[contour, index]] * len(STEPS)])
        return end


class _Contour:
    """A contour that grows on a canvas, one dash at a time."""

    def __init__(self, canvas: _Canvas, number: int, seed: np.ndarray, angle: float, continuity: float) -> None:
        self.canvas, self.number, self.continuity = canvas, number, continuity
        self.end, self.angle, self.length = seed, angle, 0

    def grow(self, rng: np.random.Generator) -> bool:
        """Add a dash, p(turn) ~ cos(continuity * turn)^2 up to |turn| = pi / (2 continuity); False without room."""
        reach = min(math.pi / 2 / self.continuity, math.pi)
        turns = (np.arange(HEADINGS) + rng.random()) * (2 * reach / HEADINGS) - reach
        weights = np.cos(self.continuity * turns) ** 2
        headings = np.stack([np.cos(self.angle + turns), np.sin(self.angle + turns)], -1)
        gap = GAP if self.length else 0.0
        starts = self.end + gap * headings
        weights = weights * self.canvas.free(starts, headings, self.number, self.length)
        total = weights.sum()
        if total < 1e-9:
            return False
        choice = int(rng.choice(HEADINGS, p=weights / total))
        self.end = self.canvas.add(starts[choice], headings[choice], self.number, self.length)
        self.angle, self.length = float(self.angle + turns[choice]), self.length + 1
        return True


def scene(rng: np.random.Generator, spec: Pathfinder) -> Scene:
    """A random scene; attempts without room, or whose dots would tell the label, are drawn again."""
    while True:
        found = _attempt(rng, spec)
        if found is not None:
            return found


def _attempt(rng: np.random.Generator, spec: Pathfinder) -> Scene | None:
    canvas = _Canvas(spec.side)
    middle = spec.side / 2
    first = middle + rng.uniform(-2, 2, 2) - SEEDS / 2 * (turn := _direction(rng.uniform(0, 2 * math.pi)))
    seeds = (first, first + SEEDS * turn)
    contours = [_Contour(canvas, i, seed, rng.uniform(0, 2 * math.pi), spec.continuity) for i, seed in enumerate(seeds)]
    if not all(contour.grow(rng) for _ in range(spec.dashes) for contour in contours):
        return None
    source = int(rng.integers(2))
    if not _same_distance(seeds[source], contours):
        source = 1 - source
        if not _same_distance(seeds[source], contours):
            return None
    if not all(_distractor(rng, canvas, number, spec) for number in range(2, 2 + DISTRACTORS)):
        return None
    label = int(rng.integers(2))
    target = source if label else 1 - source
    dots = np.stack([seeds[source], contours[target].end])
    return Scene(np.stack(canvas.dashes), np.array(canvas.contour), dots, label)


def _same_distance(dot: np.ndarray, contours: list[_Contour]) -> bool:
    """Whether both far ends have nearly the same distance from a dot, and do not touch it."""
    distances = [float(np.linalg.norm(contour.end - dot)) for contour in contours]
    return abs(distances[0] - distances[1]) <= SAME_DISTANCE and min(distances) >= 2 * GAP


def _distractor(rng: np.random.Generator, canvas: _Canvas, number: int, spec: Pathfinder, attempts: int = 60) -> bool:
    """Draw a short contour at a random place; False if none was found."""
    dashes = max(spec.dashes // 3, 1)
    for _ in range(attempts):
        kept = len(canvas.dashes), len(canvas.points)
        start = rng.uniform(BORDER, spec.side - BORDER, 2)
        contour = _Contour(canvas, number, start, rng.uniform(0, 2 * math.pi), spec.continuity)
        if all(contour.grow(rng) for _ in range(dashes)):
            return True
        del canvas.dashes[kept[0] :], canvas.contour[kept[0] :]
        canvas.points, canvas.owner = canvas.points[: kept[1]], canvas.owner[: kept[1]]
    return False


def _direction(angle: float) -> np.ndarray:
    return np.array([math.cos(angle), math.sin(angle)])


def draw(drawn: Scene, side: int) -> np.ndarray:
    """Grey values (side, side) uint8: white dashes of half a pixel's width and dots of radius 1.5 on black."""
    from PIL import Image, ImageDraw

    large = Image.new("L", (side * OVERSAMPLING, side * OVERSAMPLING))
    pen = ImageDraw.Draw(large)
    for start, end in drawn.dashes * OVERSAMPLING:
        pen.line([*start, *end], fill=255, width=OVERSAMPLING // 2)
    for x, y in drawn.dots * OVERSAMPLING:
        radius = 1.5 * OVERSAMPLING
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)
    return np.asarray(large.resize((side, side), Image.Resampling.BOX), dtype=np.uint8)


def samples(spec: Pathfinder, seed: str, count: int) -> Split:
    """`count` images; a pure function of the arguments."""
    rng = generator("pathfinder", spec.name, seed)
    scenes = [scene(rng, spec) for _ in range(count)]
    pixels = [draw(item, spec.side).reshape(-1) for item in scenes]
    return Split(Tokens.of(pixels), np.array([item.label for item in scenes], np.int64))


def load(name: str) -> SequenceSet:
    """A set of `PATHFINDER`, generated once and then read from the cache."""
    spec = PATHFINDER[name]
    train, held, test = generated_splits(name, spec.sizes, PART, lambda seed: samples(spec, seed, PART))
    return SequenceSet(name, ("two contours", "one contour"), train, test, "pixels", 256, False, held)
