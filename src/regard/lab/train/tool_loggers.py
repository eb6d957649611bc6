"""Weights & Biases and MLflow behind Fabric's `Logger`. Neither is told of configurations, code or the environment."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_fabric.loggers import Logger

from regard.core import ConfigError, require
from regard.files.atomic import write_atomically

from .child_processes import environment_variables

WANDB_MODES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL")
MLFLOW_ADDRESSES, RETRIES = ("MLFLOW_TRACKING_URI",), "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class _ToolLogger(Logger):
    """What both have in common: a folder, a label, and no hyper-parameters. The tool starts at `experiment`."""

    def __init__(self, folder: Path, label: str) -> None:
        super().__init__()
        self.folder, self.label = folder, label

    @property
    def name(self) -> str:
        """Of the project or experiment, unless the user's environment names one."""
        return "regard"

    @property
    def version(self) -> str:
        """The key of the run."""
        return self.folder.name

    @property
    @abstractmethod
    def experiment(self) -> Any:
        """The tool's own object. Raises: ConfigError if the tool refuses to start."""

    def log_hyperparams(self, *args: Any) -> None:
        """Nothing: run.json has them, and a tool's server should not get paths of this machine."""


class WandbLogger(_ToolLogger):
    """A run of Weights & Biases: offline in the run's folder, unless the user's environment names a mode or a key.

    A continued run goes on under the same id.
    """

    def __init__(self, folder: Path, label: str) -> None:
        require("wandb", "wandb")
        super().__init__(folder, label)

    @cached_property
    def experiment(self) -> Any:
        """A run of the package wandb. Raises: ConfigError."""
        offline = not any(os.environ.get(name) for name in WANDB_MODES)
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it tells its makers when it is imported
        import wandb

        try:
            settings = wandb.Settings(
                disable_git=True, save_code=False, console="off", silent=True, x_disable_stats=True,
                x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
            )  # fmt: skip
            return wandb.init(
                project=os.environ.get("WANDB_PROJECT", self.name), id=self.version, name=self.label, dir=self.folder,
                mode="offline" if offline else None, resume=None if offline else "allow", settings=settings,
            )  # fmt: skip
        except (wandb.Error, OSError, ValueError) as error:  # ValueError: a variable of the environment
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"--log wandb cannot start ({reason}); WANDB_MODE=offline logs without a server"
            ) from error

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a point at a step."""
        self.experiment.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        """Close the run; status: "success" or another word."""
        self.experiment.finish(exit_code=0 if status == "success" else 1)


class MLflowLogger(_ToolLogger):
    """A run of MLflow: a data base in the run's folder, unless the user's environment names a tracking server.

    A continued run goes on in the run whose id the folder keeps.
    """

    def __init__(self, folder: Path, label: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it asks its makers when it is imported
        require("mlflow", "mlflow")
        super().__init__(folder, label)

    @cached_property
    def experiment(self) -> Any:
        """A client of MLflow. Raises: ConfigError."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        given = any(os.environ.get(name) for name in MLFLOW_ADDRESSES)
        if not given:
            require("sqlalchemy", "mlflow")  # which the package mlflow-skinny does not bring
        try:
            client = MlflowClient(None if given else f"sqlite:///{(self.folder / 'mlflow.db').resolve()}")
            tries = os.environ.get(RETRIES, "1")  # a server that does not answer is not asked for minutes
            with environment_variables({RETRIES: tries}):
                self.run_id = self._continue_run(client) or self._create_run(client)
        except (MlflowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"--log mlflow cannot start ({reason}); without MLFLOW_TRACKING_URI it logs into the run's folder"
            ) from error
        return client

    def _continue_run(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException, OSError):
            run_id = (self.folder / "mlflow-run").read_text().strip()
            client.update_run(run_id, status="RUNNING")
            return run_id
        return ""

    def _create_run(self, client: Any) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.name)
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else client.create_experiment(name)
        tags = {"regard.key": self.version, "mlflow.user": ""}
        run_id: str = client.create_run(number, run_name=self.label, tags=tags).info.run_id
        write_atomically(self.folder / "mlflow-run", run_id)
        return run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a point at a step."""
        client = self.experiment
        for name, value in metrics.items():
            client.log_metric(self.run_id, name, float(value), step=step)

    def finalize(self, status: str) -> None:
        """Close the run; status: "success" or another word."""
        self.experiment.set_terminated(self.run_id, "FINISHED" if status == "success" else "FAILED")
