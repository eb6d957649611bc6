"""The dry run of a setting: every row is built and trained for one step, and its counts are compared with the paper."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard.core import ConfigError
from regard.measure.cost import count_macs

if TYPE_CHECKING:
    from .study import Row, Setting, Study


@dataclass(frozen=True)
class DryRow:
    """Parameters and MACs (of one sample) of a row, counted here and published. loss: of the one step.

    Verdicts: "equal" or "differs by ..." against the exact integer where it is known; else "near" or "differs by ..."
    (more than 2 %) against the rounded published number, MACs then counted as the papers of the mechanisms do; ""
    without either. error: why the row could not be built.
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


def dry_run(
    study: "Study", scale: str, rows: str = "*", classes: int = 0, report: Callable[[str], None] = lambda line: None
) -> list[DryRow]:
    """Build every row of a scale and train one step on two random samples of the right size.

    classes: outputs of the host; 0 = the task's number, else that of the named data set, else 1000. report: is given a
    line before each row, since rows of the paper's scale may take minutes.
    Raises: ConfigError for an unknown scale or row.
    """
    setting = study.setting(scale)
    chosen = study.rows(scale, rows)
    found = []
    for number, row in enumerate(chosen, 1):
        report(f"{row.label}, row {number} of {len(chosen)}")
        found.append(_dry_row(row, setting, classes))
    return found


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
    params, macs, printed, loss, error = None, None, None, None, ""
    try:
        params, macs, printed, loss = _step(row, setting, classes)
    except Exception as failure:  # hosts raise various errors; the other rows are still compared
        error = f"{type(failure).__name__}: {failure}"
    exact, paper = row.exact, row.paper
    return DryRow(
        row.label, params, paper.get("params"), exact.get("params"),
        compare(params, exact.get("params"), paper.get("params")), macs, paper.get("macs"), exact.get("macs"),
        compare(macs if exact.get("macs") else printed, exact.get("macs"), paper.get("macs")), loss, error,
    )  # fmt: skip


def _step(row: "Row", setting: "Setting", classes: int) -> tuple[int, int, int, float]:
    """(parameters, MACs of one sample, the same as papers count them, loss) of a row, on random inputs."""
    torch.manual_seed(0)
    trial = setting.task_of(row).trial(row.mixer, row.removed, classes)
    params = sum(parameter.numel() for parameter in trial.model.parameters())
    macs, printed = (count_macs(trial.model, trial.inputs, accounting) for accounting in ("executed", "paper"))
    trial.model.train()
    optimizer = torch.optim.AdamW(trial.model.parameters(), lr=1e-4)
    loss = trial.loss(2)
    loss.backward()
    optimizer.step()
    if not torch.isfinite(loss):
        raise ConfigError(f"the first step of {row.label} gives a loss of {loss.item()}")
    return params, macs, printed, float(loss.detach())
