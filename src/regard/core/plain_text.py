"""Names and labels in pictures, drawn as they are written."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_text() -> Iterator[None]:
    """matplotlib draws every text of the block as it is written, and reads no formula between two dollar signs.

    Also a decorator: of every function that draws.
    """
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield
