"""Lines on standard error about long reading."""

import sys
import time


class ProgressLine:
    """`show(text)` prints a line from the second second on, then every ten seconds; in between it does nothing."""

    def __init__(self) -> None:
        self.next = time.monotonic() + 2

    def show(self, text: str) -> None:
        """Print the line if it is time."""
        if time.monotonic() > self.next and sys.stderr is not None:
            self.next = time.monotonic() + 10
            print(text, file=sys.stderr, flush=True)
