"""Loggers of other tools, behind Fabric's `Logger`: the metrics of a run by step. They never decide a run's key."""

from pathlib import Path
from typing import Any

from regard.core import ConfigError, require

from .torchrun import launch

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


def loggers(name: str, folder: Path, label: str) -> tuple[Any, ...]:
    """The logger of a name, () for "". folder: of the run; label: what the run attends with.

    CSV and TensorBoard write into `folder`; Weights & Biases and MLflow go where the user's configuration of the tool
    says, and without one stay in `folder`, without network. All begin with the training, not here.
    Raises: ConfigError for an unknown name; MissingExtra without the tool's package.
    """
    if not name:
        return ()
    if name not in LOGGERS:
        raise ConfigError(f"--log is one of {', '.join(LOGGERS)}, not {name!r}")
    with launch().environment():
        require("lightning_fabric")
        from lightning_fabric.loggers import CSVLogger, TensorBoardLogger

    if name == "csv":
        return (CSVLogger(folder, name="log"),)
    if name == "tensorboard":
        require("tensorboard", "tensorboard")
        return (TensorBoardLogger(folder, name="log"),)
    from .tool_loggers import MLflowLogger, WandbLogger

    return ((WandbLogger if name == "wandb" else MLflowLogger)(folder, label),)
