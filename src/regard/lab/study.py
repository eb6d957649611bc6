"""Study: the rows, scales and claims of one table or figure, as data, and how its runs are carried out."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.core import ConfigError, nearest
from regard.store.layout import slug

if TYPE_CHECKING:
    from regard.core import MixerConfig
    from regard.tasks.base import Task
    from regard.train.recipe import Recipe
    from regard.train.run import Run


Scale = Literal["smoke", "desk", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "desk", "paper")


@dataclass(frozen=True)
class Row:
    """One line of a table: a mechanism (None: the host's own attention) in a host.

    host: replaces the host of the setting's task. control: belongs to the gate, not to the comparison. removed: with
    mixer=None, attention is taken out ("w/o"). paper: published numbers by metric, such as {"params": 5.7e6,
    "top1": 72.2}. exact: integers that follow from the reference files, {"params": 5717416}. notes: sentences under the
    table. recipe, task: fields of the setting's recipe and task that this row changes. start: a row, in the table or
    not, whose trained network (same seed) this one starts from. teacher: one that it learns from (hard distillation),
    or the spelling of a pretrained host.
    """

    label: str
    mixer: "MixerConfig | None"
    host: str = ""
    control: bool = False
    removed: bool = False
    paper: Mapping[str, int | float] = field(default_factory=dict)
    exact: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    start: "Row | None" = None
    teacher: "Row | str | None" = None

    def __post_init__(self) -> None:
        if self.removed and self.mixer is not None:
            raise ConfigError(f"row {self.label!r}: removed=True goes with mixer=None, not with a mechanism")


@dataclass(frozen=True)
class Claim:
    """Row a lies above row b in a metric. within: instead, they differ by at most so much. by: at paper scale, a lies
    at least so much above b (smaller scales judge the direction alone). than: two rows; a lies further above b than the
    first of them above the second."""

    a: str
    b: str
    metric: str
    within: int | float | None = None
    by: int | float | None = None
    than: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.than is not None and not (isinstance(self.than, tuple) and len(self.than) == 2):
            raise ConfigError(f"than= is the labels of two rows, not {self.than!r}")
        if self.than is not None and (self.within is not None or self.by is not None):
            raise ConfigError("a claim with than= has no within= and no by=")
        if self.within is not None and (self.by is not None or self.within <= 0):
            raise ConfigError(f"a claim has a positive within= or a by=, not within={self.within}, by={self.by}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one scale of a study runs. seeds: their number, or the seeds themselves. recipe None: nothing is trained.

    variant: what `Study.elsewhere` changed, as a part of a file name; "" for the study's own setting.
    """

    task: "Task"
    recipe: "Recipe | None"
    rows: tuple[Row, ...]
    seeds: int | tuple[int, ...] = 3
    variant: str = ""

    def __post_init__(self) -> None:
        seeds = tuple(range(self.seeds)) if isinstance(self.seeds, int) else tuple(self.seeds)
        if not seeds:
            raise ConfigError("a setting needs at least one seed")
        object.__setattr__(self, "seeds", seeds)
        labels = [row.label for row in self.rows]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(f"row labels must differ; used twice: {', '.join(twice)}")

    def task_of(self, row: Row) -> "Task":
        """The task with what the row changes."""
        changes = dict(row.task) | ({"host": row.host} if row.host else {})
        return replace(self.task, **changes) if changes else self.task

    @property
    def numbers(self) -> tuple[int, ...]:
        """The seeds as a tuple."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure. baseline: the label that differences are taken to. metric: the main one.

    pooled: verdicts may use the interval pooled over rows; only a study that says so beforehand may do that.
    Raises: ConfigError if the baseline or a claim names a row that no setting has.
    """

    name: str
    title: str
    source: str
    question: str
    baseline: str
    settings: Mapping[str, Setting]
    metric: str = "top1"
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    pooled: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.settings) - set(SCALES))
        if unknown:
            raise ConfigError(f"{self.name}: scales are {', '.join(SCALES)}, not {', '.join(unknown)}")
        everywhere = {row.label for setting in self.settings.values() for row in setting.rows}
        for label in {
            self.baseline,
            *(name for claim in self.claims for name in (claim.a, claim.b, *(claim.than or ()))),
        }:
            if label not in everywhere:
                raise ConfigError(f"{self.name}: no row {label!r}; {nearest(label, everywhere)}")

    def setting(self, scale: str) -> Setting:
        """Raises: ConfigError for a scale that this study does not have."""
        if scale not in self.settings:
            raise ConfigError(f"{self.name} has no scale {scale!r}; {nearest(scale, self.settings)}")
        return self.settings[scale]

    def rows(self, scale: str, glob: str = "*") -> tuple[Row, ...]:
        """Rows whose label matches (several globs may be separated by commas; a label may be given exactly).

        Raises: ConfigError if nothing matches.
        """
        every = self.setting(scale).rows
        whole = any(_matches(row.label, glob) for row in every)
        wanted = [glob] if whole else [part.strip() for part in glob.split(",")]
        for part in wanted:
            if not any(_matches(row.label, part) for row in every):
                raise ConfigError(f"no row of {self.name} matches {part!r}; {nearest(part, (r.label for r in every))}")
        return tuple(row for row in every if any(_matches(row.label, part) for part in wanted))

    def runs(self, scale: str, glob: str = "*", seeds: int | None = None) -> "tuple[tuple[Row, Run], ...]":
        """Every (row, run) of a scale, seed by seed, so that a study that is stopped has compared all rows.

        seeds: their number instead of the setting's; 1 or more.
        Raises: ConfigError.
        """
        setting = self.setting(scale)
        if seeds is not None and seeds < 1:
            raise ConfigError(f"the number of seeds is at least 1, not {seeds}")
        numbers = setting.numbers if seeds is None else _first(seeds, setting.numbers)
        rows = self.rows(scale, glob)
        return tuple((row, self.run(scale, row, seed)) for seed in numbers for row in rows)

    def run(self, scale: str, row: Row, seed: int) -> "Run":
        """The run of one row and seed. Raises: ConfigError if the setting trains nothing."""
        from regard.train.run import Run

        setting = self.setting(scale)
        if setting.recipe is None:
            raise ConfigError(f"{self.name} trains nothing at {scale} scale; use --dry-run")
        recipe = replace(setting.recipe, **row.recipe) if row.recipe else setting.recipe
        return Run(
            task=setting.task_of(row),
            mixer=row.mixer,
            recipe=recipe,
            seed=seed,
            start=None if row.start is None else self.run(scale, row.start, seed),
            removed=row.removed,
            teacher=self.run(scale, row.teacher, seed) if isinstance(row.teacher, Row) else row.teacher,
        )

    def elsewhere(
        self, scale: str, data: str | None = None, host: str | None = None, size: tuple[int, int] | None = None
    ) -> "Study":
        """The same rows on other data, in another host (for all rows) or at another image size (height, width).

        None leaves what the setting has; a new host brings its own size unless one is given. The setting's `variant`
        says what is new, and gives it results of its own: NAME-SCALE+CHANGES.
        Raises: ConfigError.
        """
        if data is None and host is None and size is None:
            return self
        setting = self.setting(scale)
        task = setting.task.on(data) if data is not None else setting.task
        rows = setting.rows
        if host is not None:
            task, rows = replace(task, host=host), tuple(replace(row, host="") for row in rows)
            size = size or size_of(host)
        if size is not None:
            task = replace(task, host=sized(task.host, size), size=size)
        variant = _variant(setting, task, rows, data, host)
        changed = replace(setting, task=task, rows=rows, variant=variant)
        return replace(self, settings={**self.settings, scale: changed})

    def place(self, scale: str) -> str:
        """Where the results of a scale are listed: the scale, and what `elsewhere` changed."""
        variant = self.setting(scale).variant
        return f"{scale}+{variant}" if variant else scale


def _matches(label: str, pattern: str) -> bool:
    return label == pattern or fnmatch.fnmatchcase(label.lower(), pattern.lower())


def _first(number: int, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The first seeds of a setting, and then the next free ones."""
    more = (seed for seed in range(number + len(seeds)) if seed not in seeds)
    return (*seeds[:number], *(next(more) for _ in range(number - len(seeds))))


def _variant(setting: Setting, task: "Task", rows: tuple[Row, ...], data: str | None, host: str | None) -> str:
    """Data, host and size where they differ from the setting's, joined by "+"; two changes never share a name."""
    parts = []
    if data is not None and task.data != setting.task.data:
        name = task.identity().data
        own = name.partition(":")[2]  # the user's own data: the folder's name, and 4 digits of what is in it
        parts.append(f"{slug(Path(data).expanduser().resolve().stem)}_{own[:4]}" if own else slug(name))
    if host is not None and (host != setting.task.host or rows != setting.rows):
        parts.append(slug(host))
    if task.size != setting.task.size:
        parts.append(f"{task.size[0]}x{task.size[1]}")
    return "+".join(parts)


def size_of(host: str) -> tuple[int, int]:
    """The image size that a host is made for: its option, its default, or timm's configuration."""
    from regard.models.catalog import default_size
    from regard.models.create import check_host, parse_host

    name, options = parse_host(host)
    given = options.get("img_size", options.get("size"))
    if given is not None:
        return (given, given) if isinstance(given, int) else (int(given[0]), int(given[1]))
    import timm

    check_host(name)
    own = default_size(name)
    if own is not None:
        return own
    if not timm.is_model(name):
        raise ConfigError(f"give --size: the image size of {name} is not known")
    configuration = timm.models.get_pretrained_cfg(name)
    _, height, width = configuration.input_size if configuration is not None else (3, 224, 224)
    return int(height), int(width)


def sized(host: str, size: tuple[int, int]) -> str:
    """The host's spelling for an image size, where that differs from its own and it has a size to set."""
    from regard.models.create import parse_host, spell_host

    if size_of(host) == size:
        return host
    name, options = parse_host(host)
    options.pop("size", None)
    return spell_host(name, {**options, "img_size": size})
