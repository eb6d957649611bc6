"""How much of the machine others used while a run trained: only without them its time tells of the mechanism."""

import os
from contextlib import suppress

from regard.core import require

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Kinds of processor time in which something works; not every system tells all of them."""


class MachineUse:
    """The processor time that other processes of this machine used while `start` .. `stop` were on.

    others: seconds of one processor so far; None if a part of the run did not measure it.
    """

    def __init__(self, others: float | None = 0.0) -> None:
        self.others = others
        self._counted: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin to count."""
        self._counted = processor_seconds()

    def update(self) -> None:
        """Add what others used since the last call."""
        if self._counted is None:
            return
        before, self._counted = self._counted, processor_seconds()
        if self.others is not None:
            busy, own = (now - then for now, then in zip(self._counted, before, strict=True))
            self.others += max(busy - own, 0.0)

    def share(self, seconds: float) -> float | None:
        """Of all processors in so many seconds of training, between 0 and 1; None if it is not known."""
        if self.others is None or not seconds:
            return None
        return round(min(self.others / (seconds * (os.cpu_count() or 1)), 1.0), 4)


def processor_seconds() -> tuple[float, float]:
    """(of all processes of this machine, of this one with its children) since they began."""
    require("psutil")
    import psutil

    times = psutil.cpu_times()
    this = psutil.Process()
    own = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # a child that has ended meanwhile
            used = process.cpu_times()
            own += used.user + used.system
            if process == this:
                own += used.children_user + used.children_system
    return sum(getattr(times, name, 0.0) for name in _BUSY), own
