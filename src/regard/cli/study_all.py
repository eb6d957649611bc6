"""`regard study run --all --decide --hours N`: carry out the most promising studies."""

from dataclasses import asdict

from regard.core import ConfigError
from regard.lab.results.results import Results
from regard.lab.studies import STUDIES, load_study

from .study_display import Display
from .study_options import WorkOptions
from .tables import show


def run_all(work: WorkOptions, workers: int | None) -> None:
    """Carry out the most promising studies until the hours are spent. Raises: ConfigError."""
    from regard.lab.engine.executors.local import usual_workers
    from regard.lab.engine.priorities import decide_all

    hours = 6.0 if work.hours is None else work.hours
    if hours <= 0:
        raise ConfigError(f"--hours is a positive number, not {hours:g}")
    studies = [load_study(name) for name in STUDIES]
    number = usual_workers() if workers is None else workers
    with Display(", and the same command plans anew with it") as display:
        spent = decide_all(studies, work.scale, Results(work.results), hours=hours, workers=number,
                           compile=work.compile, watch=display.show_event, report=display.print_line)  # fmt: skip
    rounded = [{**asdict(each), "hours": round(each.hours, 2), "expected": round(each.expected, 2)} for each in spent]
    total = f"{sum(each.hours for each in spent):.2f} hours, {sum(each.decided for each in spent)} claims decided"
    show(rounded, work.as_json, "What the hours went to", [total, _EXPECTED])


_EXPECTED = (
    "expected: claims that the hours decide, of a study that has begun from its pilot, of any other a fifth of its "
    "claims as a guess; the promise of at most 5 % false verdicts is each study's own"
)
