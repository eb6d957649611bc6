"""Weights & Biases and MLflow behind Fabric's `Logger`. Neither is told of configurations, code or the environment."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fabric.loggers import Logger

from regard.core import ConfigError

WANDB_MODES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL")
MLFLOW_ADDRESSES = ("MLFLOW_TRACKING_URI",)


class _ToolLogger(Logger):
    """What both have in common: a name, no hyper-parameters, and errors with a remedy."""

    name = "regard"

    @property
    def version(self) -> str:
        return self.folder.name

    def __init__(self, folder: Path, label: str) -> None:
        super().__init__()
        self.folder, self.label = folder, label

    def log_hyperparams(self, *args: Any) -> None:
        """Nothing: run.json has them, and a tool's server should not get paths of this machine."""


class WandbLogger(_ToolLogger):
    """A run of Weights & Biases: offline in the run's folder, unless the user's environment names a mode or a key.

    A continued run goes on under the same id. Raises: ConfigError if wandb refuses to start.
    """

    def __init__(self, folder: Path, label: str) -> None:
        super().__init__(folder, label)
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = None if any(os.environ.get(name) for name in WANDB_MODES) else "offline"
        settings = wandb.Settings(
            disable_git=True, save_code=False, console="off", silent=True, x_disable_stats=True, x_disable_meta=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "regard"), id=folder.name, name=label, dir=folder,
                mode=mode, resume="allow" if mode is None else None, settings=settings,
            )  # fmt: skip
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"--log wandb cannot start ({error}); WANDB_MODE=offline logs without a server"
            ) from error

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.run.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "success" else 1)


class MLflowLogger(_ToolLogger):
    """A run of MLflow: files in the run's folder, unless the user's environment names a tracking server.

    A continued run goes on in the run whose id the folder keeps. Raises: ConfigError if MLflow refuses to start.
    """

    def __init__(self, folder: Path, label: str) -> None:
        super().__init__(folder, label)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        folder.mkdir(parents=True, exist_ok=True)
        given = any(os.environ.get(name) for name in MLFLOW_ADDRESSES)
        try:
            self.client = MlflowClient(None if given else f"sqlite:///{(folder / 'mlflow.db').resolve()}")
            self.run_id = self._continued() or self._created()
        except (MlflowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--log mlflow cannot start ({reason}); unset MLFLOW_TRACKING_URI for files") from error

    def _continued(self) -> str:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException, OSError):
            run_id = (self.folder / "mlflow-run").read_text().strip()
            self.client.update_run(run_id, status="RUNNING")
            return run_id
        return ""

    def _created(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.name)
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        run_id = self.client.create_run(number, run_name=self.label, tags={"regard.key": self.folder.name}).info.run_id
        (self.folder / "mlflow-run").write_text(run_id)
        return run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, float(value), step=step)

    def finalize(self, status: str) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if status == "success" else "FAILED")
