"""The dry run of a setting: every row is built and trained for one step, and its counts are compared with the paper."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from regard.core import ConfigError
from regard.swapping.count import count_macs
from regard.swapping.inspect import input_channels
from regard.tasks.data.catalog import classes_and_channels

if TYPE_CHECKING:
    from regard.tasks.base import Task

    from .study import Row, Setting, Study


@dataclass(frozen=True)
class DryRow:
    """Parameters and MACs (of one image) of a row, counted here and published. loss: of the one step.

    Verdicts: "equal" or "differs by ..." against the exact integer where it is known; else "near" or "differs by ..."
    (more than 2 %) against the rounded published number; "" without either. error: why the row could not be built.
    """

    label: str
    params: int | None
    params_paper: int | float | None
    params_exact: int | None
    params_verdict: str
    macs: int | None
    macs_paper: int | float | None
    macs_exact: int | None
    macs_verdict: str
    loss: float | None
    error: str = ""


def dry_run(study: "Study", scale: str, rows: str = "*", classes: int = 0) -> list[DryRow]:
    """Build every row of a scale and train one step on two random images of the right size.

    classes: outputs of the host; 0 = the task's number, else that of the named data set, else 1000.
    Raises: ConfigError for an unknown scale or row.
    """
    setting = study.setting(scale)
    return [_dry_row(row, setting, classes) for row in study.rows(scale, rows)]


def compare(count: int | None, exact: int | None, paper: int | float | None) -> str:
    """The verdict on a count, as in `DryRow`. exact, paper: the published integer and the rounded number, or None."""
    if count is None:
        return ""
    if exact is not None:
        return "equal" if count == exact else f"differs by {count - exact:+,}"
    if paper:
        change = count / paper - 1
        return "near" if abs(change) <= 0.02 else f"differs by {change:+.1%}"
    return ""


def _dry_row(row: "Row", setting: "Setting", classes: int) -> DryRow:
    params, macs, loss, error = None, None, None, ""
    try:
        params, macs, loss = _step(row, setting, classes)
    except Exception as failure:  # hosts raise various errors; the other rows are still compared
        error = f"{type(failure).__name__}: {failure}"
    return DryRow(
        label=row.label, params=params, params_paper=row.paper.get("params"), params_exact=row.exact.get("params"),
        params_verdict=compare(params, row.exact.get("params"), row.paper.get("params")), macs=macs,
        macs_paper=row.paper.get("macs"), macs_exact=row.exact.get("macs"),
        macs_verdict=compare(macs, row.exact.get("macs"), row.paper.get("macs")), loss=loss, error=error,
    )  # fmt: skip


def _step(row: "Row", setting: "Setting", classes: int) -> tuple[int, int, float]:
    """(parameters, MACs of one image, loss) of a row, on random images; no data are read."""
    task = setting.task_of(row)
    default, channels = outputs_and_channels(task)
    outputs = classes or default
    torch.manual_seed(0)
    model = task.built(row.mixer, outputs, channels, row.removed, pretrained=False)
    images = torch.randn(2, input_channels(model), *task.size)
    params = sum(parameter.numel() for parameter in model.parameters())
    macs = count_macs(model, images[:1])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = F.cross_entropy(model(images), torch.randint(0, outputs, (2,)))
    loss.backward()
    optimizer.step()
    if not torch.isfinite(loss):
        raise ConfigError(f"the first step of {row.label} gives a loss of {loss.item()}")
    return params, macs, float(loss.detach())


def outputs_and_channels(task: "Task") -> tuple[int, int]:
    """Classes and channels of a task without reading its data: the task's field, else those of the named data set."""
    classes, channels = classes_and_channels(task.data)
    return int(getattr(task, "classes", 0)) or classes, channels
