"""CPU seconds of passes that are timed in turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def in_turns(
    runs: Mapping[str, Callable[[], Any]], leaves: "Sequence[torch.Tensor]", rounds: int
) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Median CPU seconds of (name, "f" or "fb"), forward and with the backward pass, and minor page faults per call.

    runs: passes that return a tensor or several. leaves: tensors whose gradients are cleared after each pass. One round
    warms up.
    """
    import torch

    from regard.measure.turns import time_pass

    cpu = torch.device("cpu")
    times: dict[tuple[str, str], list[float]] = {(name, part): [] for name in runs for part in ("f", "fb")}
    faults = dict.fromkeys(runs, 0.0)
    grads: dict[str, list[torch.Tensor]] = {}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            if not turn:
                out = run()
                grads[name] = [torch.ones_like(y) for y in ([out] if isinstance(out, torch.Tensor) else out)]
                del out
            with torch.no_grad():
                forward = time_pass(run, cpu)
            both = time_pass(lambda run=run, name=name: torch.autograd.backward(run(), grads[name]), cpu)  # type: ignore[misc]
            for leaf in leaves:
                leaf.grad = None
            if turn:
                faults[name] += (forward.faults + both.faults) / rounds / 2
                times[name, "f"].append(forward.seconds)
                times[name, "fb"].append(both.seconds)
    return {key: statistics.median(values) for key, values in times.items()}, faults
