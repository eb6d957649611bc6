"""Functions that run at once."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at once in threads; an exception of one is raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def work(index: int) -> None:
        try:
            start.wait(20)
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
