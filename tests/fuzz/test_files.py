"""Files of a run and of a saved model, cut at every byte and with flipped bits: all damage is noticed, nothing is lost.

More examples with `make fuzz`, or by the variable FLIPS for the slow test.
"""

import contextlib
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pilot_store import make_store
from regard import create_model, load, save
from regard.core import RegardError, StoreError
from regard.files.records import read_record, write_record
from regard.files.tensor_files import read_state, write_state
from regard.lab.engine.table import load_snapshot
from regard.lab.results.metrics import Metrics
from regard.lab.results.results import Results
from regard.lab.train import checkpoint
from regard.lab.train.execute import execute
from regard.lab.train.load import load_run, load_trained
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run, read_run
from regard.lab.train.watch import Watch
from regard.mixers.static_keys.ska import SKA
from tiny_task import Tiny

RUN = Run(task=Tiny(limit=64, val=0.5), recipe=Recipe(epochs=2, batch=32, augment="none", ema=0.9), seed=3)
FOLDER = RUN.key
READERS: dict[str, Callable[[Path], Any]] = {
    f"{FOLDER}/last.ckpt": lambda root: load_trained(RUN, Results(root)),
    f"{FOLDER}/best.ckpt": lambda root: load_run(root / FOLDER, (Tiny,), best=True),
    f"{FOLDER}/run.json": lambda root: read_run(Results(root), RUN.key, (Tiny,)),
    f"{FOLDER}/outcome.json": lambda root: Results(root).outcome(RUN.key),
    f"{FOLDER}/metrics.csv": lambda root: Metrics(root / FOLDER / "metrics.csv").read(),
    "model/model.json": lambda root: load(root / "model"),
    "model/model.safetensors": lambda root: load(root / "model"),
    "distill.state": lambda root: read_state(root / "distill.state"),
    "studies/pilot-desk.json": lambda root: load_snapshot(root, "pilot", "desk"),
}
NAMES = ["last", "best", "run", "outcome", "metrics", "model", "weights", "state", "snapshot"]
every_kind = pytest.mark.parametrize("name", READERS, ids=NAMES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, a saved model and a study."""
    root = tmp_path_factory.mktemp("store")
    execute(RUN, Results(root), device="cpu", watch=Watch(save_steps=1))
    save(create_model("vit_desk(size=12, patch=4, dim=16, depth=1, heads=2)", SKA()), root / "model")
    write_state(root / "distill.state", {"key": "of a model", "layers": {"step": 3, "weights": {"a": torch.ones(2)}}})
    make_store(root)
    return root


def noticed(root: Path, name: str, damaged: bytes) -> bool:
    """Whether a file with other content is refused; the file then still has that content, and is restored."""
    path = root / name
    content = path.read_bytes()
    path.write_bytes(damaged)
    said = ""
    try:
        READERS[name](root)
    except StoreError as error:
        said = str(error)
    left = path.read_bytes()
    path.write_bytes(content)
    return bool(said) and "\n" not in said and left == damaged


def flipped(content: bytes, place: int) -> bytes:
    """The content with bit number `place`, modulo their number, inverted."""
    index, bit = divmod(place % (8 * len(content)), 8)
    return content[:index] + bytes([content[index] ^ (1 << bit)]) + content[index + 1 :]


@every_kind
@settings(max_examples=settings.default.max_examples // 5)
@given(place=st.integers(0, 2**40))
def test_a_flipped_bit_is_noticed(root: Path, name: str, place: int) -> None:
    assert noticed(root, name, flipped((root / name).read_bytes(), place))


@every_kind
@settings(max_examples=settings.default.max_examples // 5)
@given(share=st.floats(0, 1, exclude_max=True), tail=st.binary(max_size=9))
@example(share=0.99, tail="θ".encode())
def test_a_cut_is_noticed(root: Path, name: str, share: float, tail: bytes) -> None:
    content = (root / name).read_bytes()
    damaged = content[: int(share * len(content))] + tail
    if damaged == content:
        return
    lines, end, rest = damaged.rpartition(b"\n")
    if name.endswith(".csv") and end and content.startswith(lines + end) and re.fullmatch(rb"[\w.,+-]*", rest):
        return  # what a killed process leaves: complete lines, and one without an end, which is not read
    assert noticed(root, name, damaged)


@every_kind
@pytest.mark.slow
def test_two_hundred_flipped_bits_are_noticed(root: Path, name: str) -> None:
    """At random places of each kind of file, the checksums included. FLIPS: another number."""
    dice, content = random.Random(name), (root / name).read_bytes()
    number = int(os.environ.get("FLIPS", "200"))
    assert sum(noticed(root, name, flipped(content, dice.getrandbits(40))) for _ in range(number)) == number


def test_a_checkpoint_cut_at_every_byte_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two small checkpoints the newer one is cut; then both are, and nothing is trained anew in silence."""
    for step in (1, 2):
        checkpoint.save(tmp_path, {"step": step, "model": {"a": torch.ones(2)}, "ema": None})
    last, previous = tmp_path / checkpoint.LAST, tmp_path / checkpoint.PREVIOUS
    content = last.read_bytes()
    for size in range(len(content)):
        last.write_bytes(content[:size])
        caplog.clear()
        state = checkpoint.load(tmp_path)
        assert state is not None
        assert state["step"] == 1
        assert "last.ckpt cannot be read" in caplog.text
        assert "using the one before it" in caplog.text
    previous.write_bytes(previous.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"no checkpoint can be read: .*restore one from a copy, or delete the folder"):
        checkpoint.load(tmp_path)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(root: Path, content: bytes) -> None:
    for name in READERS:
        if not (name.endswith(".csv") and content == (root / name).read_bytes()[: len(content)]):
            assert noticed(root, name, content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_a_field_of_another_value_never_ends_in_a_traceback(root: Path, data: st.DataObject) -> None:
    """With the checksum of the new content: refused with one sentence, or read."""
    name = data.draw(st.sampled_from([name for name in READERS if name.endswith(".json")]))
    value = read_record(root / name)
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
    content = (root / name).read_bytes()
    try:
        with contextlib.suppress(RegardError):
            write_record(root / name, value)
            READERS[name](root)
    finally:
        (root / name).write_bytes(content)


def test_a_copy_in_another_folder_is_refused(root: Path, tmp_path: Path) -> None:
    """A run's files belong to its key, which is the folder's name."""
    folder = shutil.copytree(root / FOLDER, tmp_path / ("0" * 12))
    for read in (lambda: read_run(Results(tmp_path), folder.name, (Tiny,)), lambda: load_run(folder)):
        with pytest.raises(StoreError, match=f"{FOLDER}"):
            read()
    with pytest.raises(StoreError, match=f"it is of run {FOLDER}"):
        checkpoint.load(folder)
