"""`regard study run --all --decide --hours N`: plan which studies to carry out, and do it."""

import sys
from dataclasses import asdict

from regard.core import ConfigError
from regard.lab.results.results import Results
from regard.lab.studies import STUDIES, load_study

from .study_display import Display
from .tables import show
from .user_model import progress


def run_all(
    scale: str, store: Results, hours: float, workers: int | None, compile: bool, only_plan: bool, as_json: bool
) -> int:
    """Carry out the plan, or print it; returns the exit code. Raises: ConfigError."""
    from regard.lab.engine.executors.local import usual_workers
    from regard.lab.engine.priorities import decide_all, priorities

    if hours <= 0:
        raise ConfigError(f"--hours is a positive number, not {hours:g}")
    studies = [load_study(name) for name in STUDIES]
    number = usual_workers() if workers is None else workers
    if only_plan:
        found = priorities(studies, scale, store, hours, max(number, 1), lambda name: progress(f"timing {name}"))
        lines = [
            {"study": each.study, "open claims": each.claims, "hours": round(each.hours, 2),
             "expected": round(each.expected, 2), "per hour": round(each.rate, 2), "why": each.why}
            for each in found
        ]  # fmt: skip
        show(
            lines, as_json, f"What {hours:g} hours on {max(number, 1)} processes would go to, from the top", [_EXPECTED]
        )
        return 0
    with Display(sys.stderr.isatty()) as display:
        try:
            spent = decide_all(studies, scale, store, hours=hours, workers=number, compile=compile,
                               watch=display.show_event, report=display.print_line)  # fmt: skip
        except KeyboardInterrupt:
            display.print_line("stopped; finished work is kept, and the same command plans anew with it")
            raise
    rounded = [{**asdict(each), "hours": round(each.hours, 2), "expected": round(each.expected, 2)} for each in spent]
    total = f"{sum(each.hours for each in spent):.2f} hours, {sum(each.decided for each in spent)} claims decided"
    show(rounded, as_json, "What the hours went to", [total, _EXPECTED])
    return 0


_EXPECTED = (
    "expected: claims that the hours decide, of a study that has begun from its pilot, of any other a fifth of its "
    "claims as a guess; the promise of at most 5 % false verdicts is each study's own"
)
