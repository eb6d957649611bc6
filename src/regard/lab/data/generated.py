"""Revisions of the generated sets, which are part of a run's key.

Without them, a run that finished on the samples of an older generator would be taken for one on today's. Whoever
changes what a generator makes under an old name raises its number; `tests/lab/data/test_generated.py` notices the
change.
"""

REVISIONS: dict[str, int] = {
    "digits-canvas": 1,
    **dict.fromkeys(("cued", "cued-class", "cued-random", "cued-digits"), 1),
    **dict.fromkeys(("listops", "listops-mini"), 1),
    **dict.fromkeys(("pathfinder", "pathfinder-9", "pathfinder-mini"), 1),
    "matching-mini": 1,
    "numbers": 1,
    **dict.fromkeys(("boards", "digit_boards"), 1),
    "moving_digits": 1,
}
"""By the name of the set. 1 is not written into keys, which older versions made without revisions."""


def with_revision(data: str) -> str:
    """A named set as it is in a run's key: "cued@2" for the second revision of a generated set, else its name."""
    revision = REVISIONS.get(data, 1)
    return data if revision == 1 else f"{data}@{revision}"
