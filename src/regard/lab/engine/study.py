"""Study: the rows, scales and claims of one table or figure, as data."""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.core import ConfigError, Extra, check_known, nearest
from regard.core.validation import as_float, check_arguments, check_fields, short_repr
from regard.lab.results.layout import SCALES, setting_name, slug

if TYPE_CHECKING:
    from regard.core import MixerConfig
    from regard.lab.tasks.base import Task
    from regard.lab.train.recipe import Recipe
    from regard.lab.train.run import Run


log = logging.getLogger("regard.lab.engine")

Scale = Literal["smoke", "desk", "paper"]
MOST_SEEDS = 10_000
"""Of a row."""
LONGEST_VARIANT = 120
"""Characters in the name of a file; a longer variant is cut, and ends with 8 hexadecimal digits of its SHA-256."""


@dataclass(frozen=True)
class Row:
    """One row of a table: a mechanism (None: the host's own attention) in a host.

    - host: replaces the host of the setting's task.
    - control: the gate compares the baseline with this row.
    - removed: with mixer=None, attention is removed ("w/o").
    - paper: published numbers by metric, such as {"params": 5.7e6, "top1": 72.2}.
    - exact: integers that follow from the reference files, {"params": 5717416}.
    - notes: sentences below the table.
    - recipe, task: fields of the setting's recipe and task that this row changes.
    - start: a row, in the table or not, whose trained weights (same seed) are this row's initial weights; or
      (study, label), a row of another study at the same scale.
    - teacher: a row that teaches this one (hard distillation), or the spelling of a pretrained host.
    - rate: the learning rate that tuning chose for it on the setting's data; `--decide` chooses anew.
    - against: the label of the row that this one is compared with, "" = the study's baseline.

    Raises: ConfigError.
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
    start: "Row | tuple[Study, str] | None" = None
    teacher: "Row | str | None" = None
    rate: float | None = None
    against: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.removed and self.mixer is not None:
            raise ConfigError(f"row {self.label!r}: removed=True needs mixer=None, not a mechanism")
        if self.mixer is not None:  # imported here, since a study needs no torch
            from regard.core import MixerConfig

            if not isinstance(self.mixer, MixerConfig):
                raise ConfigError(
                    f"row {self.label!r}: mixer is a configuration such as SKA(), or None, not {short_repr(self.mixer)}"
                )


@dataclass(frozen=True)
class Claim:
    """A claim: row a is higher than row b in a metric.

    within: instead, a and b differ by at most so much. by: at paper scale, a is at least so much higher than b (smaller
    scales judge the direction only). than: two rows (c, d); a - b is larger than c - d.
    Raises: ConfigError.
    """

    a: str
    b: str
    metric: str
    within: int | float | None = None
    by: int | float | None = None
    than: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.than is not None and (self.within is not None or self.by is not None):
            raise ConfigError("a claim with than= takes neither within= nor by=")
        if self.within is not None and (self.by is not None or self.within <= 0):
            raise ConfigError(f"a claim takes a positive within=, or by=, not within={self.within}, by={self.by}")


def paper_claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """What rows with `against` claim by their printed top1: higher or lower by so much, or equal within 0.5."""
    printed = {row.label: row.paper.get("top1") for row in rows}
    claims = []
    for row in rows:
        ours, theirs = printed[row.label], printed.get(row.against)
        if ours is None or theirs is None:
            continue
        by = round(abs(ours - theirs), 2)
        pair = (row.label, row.against) if ours >= theirs else (row.against, row.label)
        claims.append(Claim(*pair, "top1", by=by) if by else Claim(*pair, "top1", within=0.5))
    return tuple(claims)


@dataclass(frozen=True)
class Setting:
    """One scale of a study: task, recipe, rows and seeds.

    recipe None: nothing is trained. seeds: their number, or the seeds themselves. variant: what `Study.elsewhere`
    changed, as part of a file name; "" for the study's own setting.
    Raises: ConfigError without seeds, or for equal row labels.
    """

    task: "Task"
    recipe: "Recipe | None"
    rows: tuple[Row, ...]
    seeds: int | tuple[int, ...] = field(default=3, metadata={"least": 1, "most": MOST_SEEDS})
    variant: str = ""

    def __post_init__(self) -> None:
        from regard.lab.tasks.base import Task
        from regard.lab.train.recipe import Recipe

        check_fields(self)
        for name, kind, value in (("task", Task, self.task), ("recipe", Recipe, self.recipe)):
            if not isinstance(value, kind) and (name == "task" or value is not None):
                raise ConfigError(f"{name} of a setting is a {kind.__name__}, not {short_repr(value)}")
        _check_part_of_a_file_name("variant of a setting", self.variant)
        seeds = self.numbers
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ConfigError(
                f"the seeds of a setting are different numbers from 0, at least one, not {short_repr(seeds)}"
            )
        object.__setattr__(self, "seeds", seeds)
        if not self.rows:
            raise ConfigError("a setting needs at least one row")
        labels = [row.label for row in self.rows]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(f"row labels must differ; used twice: {', '.join(twice)}")
        for row in self.rows:
            if row.against:
                check_known(row.against, labels, f"row {row.label!r} is against {row.against!r}")

    def task_of(self, row: Row) -> "Task":
        """The task with the changes of a row."""
        changes = dict(row.task) | ({"host": row.host} if row.host else {})
        return replace(self.task, **changes) if changes else self.task

    @property
    def numbers(self) -> tuple[int, ...]:
        """The seeds as a tuple."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure. baseline: the row from which differences are taken. metric: the main one.

    pooled: verdicts may use the interval pooled over rows; to be decided before the runs.
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
        check_fields(self)
        _check_part_of_a_file_name("name of a study", self.name or "?")
        if not self.metric:
            raise ConfigError(f"{self.name}: the metric is a name such as 'top1', not ''")
        unknown = sorted(set(self.settings) - set(SCALES))
        if unknown:
            raise ConfigError(f"{self.name}: scales are {', '.join(SCALES)}, not {', '.join(unknown)}")
        labels = {row.label for setting in self.settings.values() for row in setting.rows}
        claimed = (label for claim in self.claims for label in (claim.a, claim.b, *(claim.than or ())))
        for label in (self.baseline, *claimed):
            check_known(label, labels, f"{self.name}: no row {label!r}")

    @check_arguments
    def setting(self, scale: str) -> Setting:
        """The setting of a scale. Raises: ConfigError for a scale that this study does not have."""
        if scale not in self.settings:
            plain, changed, _ = scale.partition("+")
            hint = f"changes are options: --scale {plain} with --data, --host, --size or --set" if changed else ""
            raise ConfigError(f"{self.name} has no scale {scale!r}; {hint or nearest(scale, self.settings)}")
        return self.settings[scale]

    @check_arguments
    def rows(self, scale: str, glob: str = "*") -> tuple[Row, ...]:
        """Rows whose label equals `glob` or matches it; several globs are separated by commas.

        Raises: ConfigError if a glob matches no row.
        """
        rows = self.setting(scale).rows
        labels = [row.label for row in rows]
        whole = _matching_labels(labels, glob)  # labels have commas
        parts = [glob] if whole else [part.strip() for part in glob.split(",")]
        matching = {part: _matching_labels(labels, part) for part in parts}
        for part, found in matching.items():
            if not found:
                raise ConfigError(f"no row of {self.name} matches {part!r}; {nearest(part, labels)}")
        return tuple(row for row in rows if row.label in set().union(*matching.values()))

    @check_arguments
    def runs(self, scale: str, glob: str = "*", seeds: int | None = None) -> "tuple[tuple[Row, Run], ...]":
        """Every (row, run) of a scale, seed by seed: a study that is stopped early has runs of all rows.

        seeds: their number instead of the setting's; 1 or more.
        Raises: ConfigError.
        """
        setting = self.setting(scale)
        if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
            raise ConfigError(f"the number of seeds is 1 to {MOST_SEEDS}, not {seeds}")
        numbers = setting.numbers if seeds is None else _first(seeds, setting.numbers)
        rows = self.rows(scale, glob)
        return tuple((row, self.run(scale, row, seed)) for seed in numbers for row in rows)

    def run(self, scale: str, row: Row, seed: int) -> "Run":
        """The run of one row and seed. Raises: ConfigError if the setting trains nothing."""
        from regard.lab.train.run import Run

        setting = self.setting(scale)
        if setting.recipe is None:
            raise ConfigError(f"{self.name} trains nothing at {scale} scale; use --dry-run")
        changes = dict(row.recipe) if row.rate is None else {**row.recipe, "lr": row.rate}
        recipe = replace(setting.recipe, **changes) if changes else setting.recipe
        teacher = self.run(scale, row.teacher, seed) if isinstance(row.teacher, Row) else row.teacher
        start = None
        if isinstance(row.start, Row):
            start = self.run(scale, row.start, seed)
        elif row.start is not None:
            study, label = row.start
            (first,) = (other for other in study.setting(scale).rows if other.label == label)
            start = study.run(scale, first, seed)
        return Run(task=setting.task_of(row), mixer=row.mixer, recipe=recipe, seed=seed, start=start,
                   removed=row.removed, teacher=teacher)  # fmt: skip

    @check_arguments
    def elsewhere(
        self, scale: str, data: str | None = None, host: str | None = None, size: tuple[int, int] | None = None,
        extra: Extra = (), *, recipe: Mapping[str, Any] = {}, fields: Mapping[str, Any] = {},
    ) -> "Study":  # fmt: skip
        """The same rows on other data, in another host (for all rows) or at another image size (height, width).

        None keeps the setting's value; a new host also sets its own image size unless one is given. recipe, fields:
        other values of the recipe's and of the task's fields; rows that have their own values keep these. With fewer
        epochs training stops, and weights are averaged, no later than that. Tuned rates, which are for the setting as
        it is, are left out. The changes form the setting's `variant`, so that it has its own results:
        NAME-SCALE+CHANGES. extra: the user's own models and ports, beside those of the task.
        Rows with a host of their own are left out where there is a host for all, with a warning.
        Raises: ConfigError, also for fields that do not exist, for a recipe of a setting that trains nothing, for a
        host where rows compare hosts, and where the changes make rows equal.
        """
        if extra:
            own = self.setting(scale)
            task = replace(own.task, extra=tuple(dict.fromkeys((*own.task.extra, *extra))))
            self = replace(self, settings={**self.settings, scale: replace(own, task=task)})
        if data is None and host is None and size is None and not recipe and not fields:
            return self
        if self.setting(scale).variant:
            raise ConfigError(f"{self.name} is changed at {scale} scale already: give all changes in one call")
        if "" in (data, host):
            raise ConfigError("data and host are names, or None for those of the setting, not ''")
        setting = self.setting(scale)
        task = setting.task.on(data) if data is not None else setting.task
        task = _change(task, fields, ("data", "host", "size", "extra", "revision"))
        changed_recipe = self._with_recipe(scale, recipe)
        rows = setting.rows if host is None else self._without_own_hosts(setting)
        if host is not None or size is not None:
            task = task.in_host(host or task.host, size)
        parts = [
            _variant(setting, task, rows, data, host),
            *_parts(setting.recipe, changed_recipe, recipe),
            *(_parts(setting.task.identity(), task.identity(), fields) if fields else ()),
        ]
        variant = "+".join(filter(None, parts))
        if len(variant) > LONGEST_VARIANT:
            variant = f"{variant[:LONGEST_VARIANT]}_{hashlib.sha256(variant.encode()).hexdigest()[:8]}"
        if variant:
            rows = tuple(replace(row, rate=None) for row in rows)
        changed = replace(setting, task=task, recipe=changed_recipe, rows=rows, variant=variant)
        settings = {**self.settings, scale: changed}
        labels = {row.label for each in settings.values() for row in each.rows}
        claims = tuple(claim for claim in self.claims if {claim.a, claim.b, *(claim.than or ())} <= labels)
        study = replace(self, settings=settings, claims=claims)
        if recipe or fields:
            from regard.lab.train.optimizer import check_optimizer

            for row in rows:
                run = study.run(scale, row, changed.numbers[0])
                run.task.check(run.recipe)
                check_optimizer(run.recipe)
        study._check_rows_differ(scale)
        return study

    def _without_own_hosts(self, setting: Setting) -> tuple[Row, ...]:
        """The rows but for those with a host of their own, which is a part of what they are, in one host.

        Raises: ConfigError where the baseline is one of them, or a single row is left.
        """
        own = [row.label for row in setting.rows if row.host]
        rows = tuple(row for row in setting.rows if not row.host)
        if own and (self.baseline in own or sum(not row.control for row in rows) < 2):
            raise ConfigError(f"rows of {self.name} compare hosts ({'; '.join(own)}): leave the host as it is")
        if own:
            log.warning("rows with a host of their own are left out: %s", "; ".join(own))
        return rows

    def _check_rows_differ(self, scale: str) -> None:
        """Raises: ConfigError if rows with different labels are the same run."""
        setting = self.setting(scale)
        labels: dict[str, list[str]] = {}
        for row in setting.rows if setting.recipe is not None else ():
            labels.setdefault(self.run(scale, row, setting.numbers[0]).key, []).append(row.label)
        if same := [" = ".join(rows) for rows in labels.values() if len(rows) > 1]:
            raise ConfigError(f"rows of {self.name} would be the same run ({'; '.join(same)}): they differ in what is "
                              "changed, so leave that as it is")  # fmt: skip

    def _with_recipe(self, scale: str, changes: Mapping[str, Any]) -> "Recipe | None":
        """The recipe of a scale with other fields. Raises: ConfigError."""
        recipe = self.setting(scale).recipe
        if recipe is None:
            if changes:
                raise ConfigError(f"{self.name} trains nothing at {scale} scale: it has no recipe to change")
            return None
        epochs = changes.get("epochs", recipe.epochs)
        names = ("average", "stop_after") if isinstance(epochs, int) and epochs > 0 else ()
        fewer = {name: epochs for name in names if getattr(recipe, name) > epochs}
        return _change(recipe, fewer | dict(changes), ("revision",))

    def setting_name(self, scale: str) -> str:
        """The name of a scale's results: the scale, and what `elsewhere` changed."""
        return setting_name(scale, self.setting(scale).variant)


def _check_part_of_a_file_name(what: str, text: str) -> None:
    """Raises: ConfigError for characters with which a result could be written elsewhere."""
    if not re.fullmatch(r"[\w.+-]*", text, re.ASCII) or text.startswith("."):
        raise ConfigError(f"the {what} has letters, digits and any of _ . + - only, not {short_repr(text)}")


def _matching_labels(labels: Sequence[str], pattern: str) -> set[str]:
    return {label for label in labels if label == pattern or fnmatchcase(label.lower(), pattern.lower())}


def _first(number: int, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The first seeds of a setting, then the smallest numbers that are not among its seeds."""
    further = (seed for seed in range(number + len(seeds)) if seed not in seeds)
    return (*seeds[:number], *(next(further) for _ in range(number - len(seeds))))


def _change(value: Any, changes: Mapping[str, Any], fixed: Sequence[str]) -> Any:
    """A task or recipe with other fields. fixed: those that cannot be set so. Raises: ConfigError."""
    names = [each.name for each in dataclass_fields(value) if each.init and each.name not in fixed]
    for name in changes:
        check_known(name, names, f"{type(value).__name__} has no field {name!r} to set")
    plain = {name: as_float(given, getattr(value, name)) for name, given in changes.items()}
    return replace(value, **plain) if changes else value


def _parts(before: Any, after: Any, changes: Mapping[str, Any]) -> list[str]:
    """The fields of `changes` that have other values now, as parts of a file name, in the order of the fields."""
    names = [each.name for each in dataclass_fields(after) if each.name in changes] if changes else []
    changed = [(name, getattr(after, name)) for name in names if getattr(after, name) != getattr(before, name)]
    return [f"{name}_{slug(str(value))}" for name, value in changed]


def _variant(setting: Setting, task: "Task", rows: tuple[Row, ...], data: str | None, host: str | None) -> str:
    """Data, host and size that differ from the setting's, joined by "+"; different changes have different names."""
    parts = []
    if data is not None and task.data != setting.task.data:
        name = task.identity().data
        digest = name.partition(":")[2].rpartition("-")[2]  # of the user's own data
        parts.append(f"{slug(Path(data).expanduser().resolve().stem)}_{digest[:4]}" if digest else slug(name))
    if host is not None and (host != setting.task.host or rows != setting.rows):
        parts.append(slug(host))
    size = getattr(task, "size", None)
    if size is not None and size != getattr(setting.task, "size", None):
        parts.append(f"{size[0]}x{size[1]}")
    return "+".join(parts)
