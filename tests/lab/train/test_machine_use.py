"""Others' share of the machine: a busy neighbour is counted, the run itself and its children are not."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from regard.lab.train.machine_use import MachineUse, processor_seconds

SPIN = "import time\nwhile time.process_time() < 1.0: pass"
"""Takes a second of a processor, however busy the machine is."""


def run_child() -> None:
    subprocess.run([sys.executable, "-c", SPIN], check=True)


def run_neighbour() -> None:
    """The same in a process that is no child of this one; returns when it has ended."""
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN!r}], stdout=sys.stdout)"
    subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True)  # the pipe ends with the last one


@pytest.mark.parametrize(("run", "own"), [(run_child, True), (run_neighbour, False)])
def test_children_are_the_run_and_neighbours_are_others(run: Callable[[], None], own: bool) -> None:
    all_before, own_before = processor_seconds()
    run()
    all_after, own_after = processor_seconds()
    assert all_after - all_before > 0.9
    assert (own_after - own_before > 0.9) == own


def test_own_work_is_no_use_by_others() -> None:
    use = MachineUse()
    use.start()
    begun = time.process_time()
    while time.process_time() - begun < 0.5:
        pass
    use.update()
    before = use.others
    use.update()
    assert 0 <= before <= use.others


def test_the_share_is_of_all_processors(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert MachineUse(2.0).share(10.0) == 0.05
    assert MachineUse(900.0).share(10.0) == 1.0
    assert MachineUse(None).share(10.0) is None
    assert MachineUse(0.0).share(0.0) is None


def test_a_part_that_was_not_measured_makes_the_whole_unknown() -> None:
    use = MachineUse(None)
    use.start()
    use.update()
    assert use.others is None
