"""What a long answer keeps on disk while it is found, so that the same command goes on after an interruption."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.core import StoreError
from regard.files.tensor_files import read_state, write_state

from .learning import Learning

SECONDS_BETWEEN = 20.0
"""Between two writes of the state while something learns, and between two lines of progress."""
WRITING = 0.05
"""The largest share of the time that is spent with writing, where a state is so large that it takes long."""


class Kept:
    """A state of plain values and tensors in a file, for one question; `content` is empty at first.

    - file: None keeps nothing.
    - key: of all that the state depends on.
    - other: called with a sentence if the file is of another question, before it is replaced.
    - seconds: spent on it so far, earlier ones too.

    Raises: StoreError if the file is damaged, and what `other` raises.
    """

    def __init__(self, file: Path | None, key: str, other: Callable[[str], None]) -> None:
        self.file, self.key = file, key
        known = (None if file is None else read_state(file)) or {}
        if known and known.get("key") != key:
            other(f"{file} is of another question (model, plan, images or options)")
            known = {}
        self.content: dict[str, Any] = known.get("content", {})
        with self._content_errors():
            self.start = time.monotonic() - (float(known["seconds"]) if self.content.keys() else 0.0)
        self._next = time.monotonic() + SECONDS_BETWEEN

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def due(self) -> bool:
        """Whether the last `write` is so long ago that the next is worth its time."""
        return time.monotonic() > self._next

    def write(self) -> None:
        """Replace the file."""
        if self.file is not None:
            start = time.monotonic()
            write_state(self.file, {"key": self.key, "seconds": self.seconds, "content": self.content})
            end = time.monotonic()
            self._next = end + max(SECONDS_BETWEEN, (end - start) / WRITING)

    def learn(self, learning: Learning, part: str, say: Callable[[str], None], seconds: float = math.inf) -> None:
        """Learn to the end, or for so many seconds; from where `part` of the state is, and writing it on the way.

        say: called with a line of progress about every `SECONDS_BETWEEN` seconds. What is only needed for further
        steps is not kept at the end.
        """
        steps = learning.how.steps
        if part in self.content:
            with self._content_errors():
                learning.resume(self.content[part])
                if type(learning.step) is not int or not 0 <= learning.step <= steps:
                    raise ValueError(f"it is of step {learning.step!r}, of {steps}")
            say(f"{part}: continuing at step {learning.step} of {steps}")
        start, first = time.monotonic(), learning.step
        done = False
        while not done and (left := start + seconds - time.monotonic()) > 0:
            done = learning.run(min(SECONDS_BETWEEN, left))
            if not done:
                rate = (time.monotonic() - start) / max(1, learning.step - first)
                minutes = min(rate * (steps - learning.step), left) / 60
                say(f"{part}: step {learning.step} of {steps}, about {minutes:.1f} minutes left")
            if self.due:
                self.content[part] = learning.state()
                self.write()
        self.content[part] = learning.state() | {"moments": {}}
        self.write()

    @contextmanager
    def _content_errors(self) -> Iterator[None]:
        """Turn an error of a content that does not fit into a StoreError that names the file."""
        try:
            yield
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise StoreError(f"{self.file} does not fit the model ({reason}); delete it to start again") from error

    def remove(self) -> None:
        """Delete the file: a result has taken its place."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
