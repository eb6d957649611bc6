"""All or nothing: a change of a model that fails, or is interrupted by Ctrl-C, leaves the model as it was."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from .layer import Port
from .ports.hugging_face import config_of

OWN_CONTAINERS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""What PyTorch keeps in a module: parameters, buffers, children, hooks."""


Result = TypeVar("Result")


def unchanged_on_error(model: nn.Module, change: Callable[[], Result]) -> Result:
    """The result of a change of a model; after any exception, KeyboardInterrupt too, the model is as it was before.

    The change may assign attributes, children, parameters and hooks, and set `requires_grad` and `training`; it does
    not write into tensors that the model has. No other thread may use the model meanwhile. Inference mode is off, so
    that new parameters can be trained.
    """
    before = _Before(model)
    try:
        with torch.inference_mode(False):
            return change()
    except BaseException:
        done = False
        while not done:  # a second Ctrl-C does not end this
            with suppress(KeyboardInterrupt):
                before.put_back()
                done = True
        raise


class _Before:
    """What modules, parameters and configurations of a model are now."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        configurations = {id(config): config for config in map(config_of, modules) if config is not None}
        self.attributes = [(vars(owner), dict(vars(owner))) for owner in (*modules, *configurations.values())]
        own = [vars(module)[name] for module in modules for name in OWN_CONTAINERS & vars(module).keys()]
        self.empty = [container for container in own if not container]  # the most, and thousands of copies cost time
        self.filled: list[tuple[Any, Any]] = [(container, container.copy()) for container in own if container]
        self.trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        sources = {module.source for module in modules if isinstance(module, Port)}
        self.users = [(source.users, list(source.users)) for source in sources]

    def put_back(self) -> None:
        """Undo all changes; may be called again."""
        for container in self.empty:
            container.clear()
        for now, then in (*self.attributes, *self.filled):
            if not _same(now, then):
                now.clear()
                now.update(then)
        for parameter, trained in self.trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        for users, then in self.users:
            users.clear()
            users.update(then)


def _same(now: Any, then: Any) -> bool:
    """Whether two sets are equal, or two dictionaries hold the same objects in the same order."""
    if isinstance(now, set):
        return now == then
    return list(now) == list(then) and all(now[name] is value for name, value in then.items())
