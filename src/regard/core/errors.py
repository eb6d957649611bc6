"""The errors for users: a message says what was passed, what was expected and what to do."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module

INSTEAD_OF_TORCHSCRIPT = "use torch.export.export, or for ONNX torch.onnx.export(..., dynamo=True)"
"""The end of a message to someone who traces or scripts a model."""


class RegardError(Exception):
    """Base of every error that Regard raises on purpose; the command line prints it without a traceback."""


class ConfigError(RegardError, ValueError):
    """A configuration has an impossible value, an unknown field or an unknown name."""


class DeviceError(ConfigError):
    """This machine lacks something: devices, a precision, a compiler. Another machine may have it."""


class ShapeError(RegardError, ValueError):
    """Tensors that do not fit together."""


class GridError(ShapeError):
    """Tokens that do not fit the grid."""


class UnsupportedError(RegardError, NotImplementedError):
    """A combination that the mechanism cannot do, such as a causal mask for a mechanism of channels."""


class SwapError(RegardError, ValueError):
    """A swap that has nothing to change, or has no effect."""


class MissingExtra(RegardError, ImportError):
    """An optional dependency that is not installed; the message has the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; pip install 'regard[{extra}]'")


class DataError(RegardError, ValueError):
    """A data set that is missing, empty, corrupt or of the wrong kind."""


class NetworkError(DataError, OSError):
    """Data that cannot be read over the network now: an error of the machine, after which a run continues."""


class DataProblems(DataError):
    """Several things that are wrong in a data set: the arguments are a sentence for each. The message is the first one,
    and how many more there are."""

    def __str__(self) -> str:
        first, *more = map(str, self.args)
        return f"{first} ({len(more)} more like this: `regard data check` lists them)" if more else first


class Problems(list[str]):
    """Sentences about what is wrong in a data set, found in one part after another and raised together."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add the `DataError` of the block, which ends there, instead of raising it."""
        try:
            yield
        except DataError as error:
            self.extend(map(str, error.args))

    def raise_all(self) -> None:
        """Raises: DataProblems if there are any."""
        if self:
            raise DataProblems(*self)


class StoreError(RegardError, OSError):
    """Results or checkpoints that cannot be read or written."""


def require(package: str, extra: str = "lab") -> None:
    """Import an optional package, or say how it is installed. Called where the package is used, not at the import of a
    module, so that everything else works without it.

    Raises: MissingExtra if the package, or one that it needs, is not installed.
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or package, extra) from error


CLOSE, APART = 0.5, 0.25
"""Likenesses, between 0 and 1: the least of a suggestion, and how far others may lie below the best one."""


def nearest(name: object, options: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest options, or all of them when they are few.

    name: what came, a string or not.
    """
    options = sorted(options)
    close = _closest(name, options) if isinstance(name, str) else []
    if not close and isinstance(name, str):
        lower = {option.lower(): option for option in options}
        close = [lower[match] for match in _closest(name.lower(), lower)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    between = "; " if any("," in option for option in options) else ", "
    if len(options) <= 40:
        return f"known: {between.join(options)}"
    return f"there are {len(options)} names, such as {between.join(options[:: len(options) // 3][:3])}"


def check_known(name: object, options: Collection[str], message: str) -> None:
    """Raises: ConfigError for a name that is not among the options: the message, and `nearest`."""
    if name not in options:
        raise ConfigError(f"{message}; {nearest(name, options)}")


def _closest(name: str, options: Iterable[str]) -> list[str]:
    """At most three options that are like a name, the closest first; none that is much less like it than the first."""
    close = difflib.get_close_matches(name, options, n=3, cutoff=CLOSE)
    likeness = [difflib.SequenceMatcher(None, option, name).ratio() for option in close]
    return [option for option, ratio in zip(close, likeness, strict=True) if ratio > likeness[0] - APART]
