"""A small study for the tests of clusters, and what of its results must be equal wherever it was executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.engine.test_study import STUDY as SHORT
from lab.engine.test_study import TASK
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.train.recipe import Recipe

EPOCHS = 30
RECIPE = Recipe(epochs=EPOCHS, batch=32, augment="none")
SETTING = replace(SHORT.setting("smoke"), task=replace(TASK, limit=0), recipe=RECIPE, seeds=3)
STUDY = replace(SHORT, settings={"smoke": SETTING})


def results(root: Path) -> dict[str, Any]:
    """What does not depend on the machine: scores, single predictions and the losses of all epochs, by key."""
    found = dict[str, Any]()
    for outcome in Results(root).outcomes():
        lines = Metrics(root / outcome["key"] / "metrics.csv").read()
        losses = [(line["epoch"], line["train_loss"]) for line in lines]
        found[outcome["key"]] = (outcome["metrics"], outcome["bits"], outcome["row"], outcome["seed"], losses)
    return found


@contextmanager
def ray_cluster(nodes: int, client_port: int | None = None) -> Iterator[Any]:
    """A cluster of Ray on this machine with so many nodes of one CPU, which notices a dead node within seconds."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    health = {
        "health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3,
    }  # fmt: skip
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "_system_config": health, "ray_client_server_port": client_port},
    )
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        yield cluster
    finally:
        cluster.shutdown()
