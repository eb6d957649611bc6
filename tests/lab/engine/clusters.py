"""A small study for the tests of clusters, and what of its results must be equal wherever it was executed."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.lab.engine.study import Row, Setting, Study
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train.recipe import Recipe
from regard.mixers.softmax import Softmax

EPOCHS = 30
STUDY = Study(
    name="tiny",
    title="Tiny",
    source="tests",
    question="?",
    baseline="softmax",
    settings={
        "smoke": Setting(
            task=Classification(
                host="vit_desk(size=12, patch=4, dim=16, depth=1, heads=2)", data="digits-canvas", size=(12, 12)
            ),
            recipe=Recipe(epochs=EPOCHS, batch=32, augment="none"),
            rows=(Row("softmax", Softmax()), Row("w/o", None, control=True, removed=True)),
            seeds=3,
        )
    },
)


def results(root: Path) -> dict[str, Any]:
    """What does not depend on the machine: scores, single predictions and the losses of all epochs, by key."""
    found = dict[str, Any]()
    for outcome in Results(root).outcomes():
        lines = list(csv.DictReader((root / outcome["key"] / "metrics.csv").open()))
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
