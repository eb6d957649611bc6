"""Studies on Ray: no run is lost when a node dies, none is done twice, and the results are those of this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from lab.engine.clusters import EPOCHS, STUDY, ray_cluster, results
from regard.core import ConfigError, DeviceError
from regard.lab.engine.executors import find_place
from regard.lab.engine.executors.ray_cluster import RayCluster, _execute
from regard.lab.engine.progress import Event
from regard.lab.engine.run_study import run_study
from regard.lab.results.results import Results
from waiting import wait_until

QUICKSTART = [sys.executable, "-m", "regard", "study", "run", "quickstart", "--rows", "w/o", "--seeds", "1"]


@pytest.fixture(autouse=True)
def quiet_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of these tests report nothing."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.slow
def test_a_node_is_killed_and_one_is_added(tmp_path: Path) -> None:
    events: list[Event] = []
    with ray_cluster(3) as cluster:
        victim, *_ = cluster.worker_nodes

        def watch(event: Event) -> None:
            events.append(event)
            if cluster.worker_nodes and victim in cluster.worker_nodes and begun(tmp_path / "ray", 3):
                cluster.remove_node(victim, allow_graceful=False)
                cluster.add_node(num_cpus=1, object_store_memory=80_000_000)

        store = Results(tmp_path / "ray")
        counts = run_study(STUDY, "smoke", store, place=RayCluster(address=cluster.address), watch=watch)
        assert victim not in cluster.worker_nodes
    assert counts == {"done": 6, "failed": 0, "stopped": 0, "died": 0, "busy": 0}
    ends = Counter((event.row, event.seed) for event in events if event.kind == "done")
    starts = Counter((event.row, event.seed) for event in events if event.kind == "start")
    assert set(ends.values()) == {1}
    assert sorted(starts.values()) == [1, 1, 1, 1, 1, 2], "one run was on the node, and was executed again"
    assert not list(store.root.glob(".cluster-*"))
    run_study(STUDY, "smoke", Results(tmp_path / "local"), workers=0)
    assert results(tmp_path / "ray") == results(tmp_path / "local")


def begun(root: Path, number: int) -> bool:
    """Whether so many runs have trained some epochs, and none has ended."""
    files = list(root.glob("*/metrics.csv"))
    epochs = [len(path.read_text().splitlines()) - 1 for path in files]
    return len(files) >= number and all(2 <= count < EPOCHS for count in epochs)


@pytest.mark.slow
def test_the_command_ends_with_its_cluster_and_goes_on_with_another(tmp_path: Path) -> None:
    command = [*QUICKSTART, "--scale", "desk", "--results", str(tmp_path / "r"), "--on"]
    with ray_cluster(1) as cluster:
        process = subprocess.Popen([*command, f"ray://{cluster.address}"], stderr=subprocess.PIPE, text=True)
        wait_until(lambda: list(tmp_path.glob("r/*/metrics.csv")), process)
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=300)
        seconds = time.monotonic() - killed
    assert process.returncode == 1
    assert seconds < 60
    (line,) = errors.splitlines()
    assert line.startswith("regard: the Ray cluster at ")
    assert "the same command continues it on a new cluster" in line
    epochs = (next(tmp_path.glob("r/*/metrics.csv"))).read_text().splitlines()
    with ray_cluster(1) as cluster:
        done = subprocess.run([*command, f"ray://{cluster.address}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (next(tmp_path.glob("r/*/metrics.csv"))).read_text().splitlines()
    shared = len(epochs) - 1  # the last line may not be whole
    values = [[line.split(",")[:-2] for line in given[:shared]] for given in (epochs, lines)]
    assert values[0] == values[1], "the same bits, from its last checkpoint or from the beginning; times differ"


@pytest.mark.slow
def test_a_stopped_command_saves_and_a_client_continues(tmp_path: Path) -> None:
    """Through the head's address, then through Ray's client server."""
    command = [*QUICKSTART, "--scale", "desk", "--results", str(tmp_path / "r"), "--on"]
    with ray_cluster(1, client_port=23111) as cluster:
        process = subprocess.Popen([*command, f"ray://{cluster.address}"], stderr=subprocess.PIPE, text=True)
        wait_until(lambda: list(tmp_path.glob("r/*/metrics.csv")), process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
        assert "stopped; finished work is kept. Continue with: " in errors
        (key,) = (path.name for path in tmp_path.glob("r/*") if (path / "run.json").exists())
        assert Results(tmp_path / "r").status(key) == "begun"
        assert (tmp_path / "r" / key / "last.ckpt").exists()
        done = subprocess.run([*command, "ray://127.0.0.1:23111"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with pytest.raises(DeviceError, match="no node of the cluster has the 5 CPUs of a run"):
            RayCluster(address=cluster.address, cpus=5).open(Results(tmp_path / "s"), 1, 1)


@pytest.mark.parametrize("address", ["head", "head:port", ":6379"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is ray://HOST:PORT, not 'ray://"):
        RayCluster(address=address)


@pytest.mark.parametrize("word", ["ray://user:word@host:6379", "ray://user:wo@rd@host", "rey://user:word@host:6379",
                                  "user:word@host:6379"])  # fmt: skip
def test_a_password_in_an_address_is_not_repeated(word: str) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\*@host") as caught:
        find_place(word)
    assert not {"user", "wo"} & set(re.findall(r"\w+", str(caught.value)))
    assert "word" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"--on ray://\*\*\*@host:6379 takes"):
        find_place("ray://user:word@host:6379", workers=2)


def test_an_address_where_nothing_answers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers at 127.0.0.1:9"):
        RayCluster(address="127.0.0.1:9").open(Results(tmp_path), 1, 1)


def test_a_node_that_does_not_see_the_results_executes_nothing(tmp_path: Path) -> None:
    state, _, text = _execute(None, str(tmp_path), 1, str(tmp_path / "elsewhere" / ".cluster-0"))
    assert state == "stopped"
    assert text.startswith(f"a node does not see the folder {tmp_path / 'elsewhere'}; choose one that all nodes share")


def test_variables_of_regard_reach_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.lab.engine.executors.ray_cluster import _variables

    monkeypatch.setenv("REGARD_DATA", "/shared/data")
    monkeypatch.setattr(sys, "path", [*sys.path, os.getcwd()])
    variables = _variables(RayCluster(cpus=4))
    assert (variables["REGARD_DATA"], variables["OMP_NUM_THREADS"]) == ("/shared/data", "4")
    assert variables["PYTHONPATH"].split(os.pathsep)[-1] == os.getcwd()
