"""The user's own files: their digest, and what is refused before it hangs, vanishes or damages a result."""

import dataclasses
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from layouts_of_boxes import picture
from regard.core import ConfigError, DataError
from regard.images import digest, own
from regard.images.images import decode
from regard.lab.engine.jobs import Job, execute_job
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train.execute import execute
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run

pytestmark = pytest.mark.usefixtures("own_cache")


def class_folders(root: Path, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for label, name in enumerate(classes):
        for number in range(5):
            picture(root / name / f"{number}.png", 100 * label + number, (70, 60))
    return root


def on(data: Path | str, **fields: object) -> Classification:
    return Classification(**{"host": "vit_desk", "data": str(data), "size": (14, 14), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("settled", [True, False])
def test_a_byte_behind_the_first_4_kib_changes_the_key(tmp_path: Path, settled: bool) -> None:
    """Also with the old modification time, and with the digests of a first reading in the cache."""
    root = class_folders(tmp_path / "data")
    file = root / "dog" / "3.png"
    if settled:
        for path in root.rglob("*.png"):
            os.utime(path, (1, 1))
    name = on(root).identity().data
    assert name.startswith("own:of_each_class-2-bytes-")
    status, content = file.stat(), bytearray(file.read_bytes())
    content[6000] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    own.digest.cache_clear()
    assert on(root).identity().data != name
    content[6000] ^= 1
    file.write_bytes(content)
    own.digest.cache_clear()
    assert on(root).identity().data == name


@pytest.mark.parametrize("unsettled", [2.0, -1.0])
def test_changed_files_are_never_cached_under_the_digest_of_the_old_ones(
    tmp_path: Path, unsettled: float, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is computed, the folder changes, and a run trains, all in one process."""
    monkeypatch.setattr(digest, "UNSETTLED", unsettled)
    root = class_folders(tmp_path / "data")
    task = on(root)
    key = Run(task=task).key
    for file in sorted(root.rglob("*.png")):
        Image.new("RGB", (60, 70), (9, 9, 9)).save(file)
    with pytest.raises(DataError, match="have changed since they were first read"):
        task.data_set()  # no key was computed since
    assert not list(own_cache.rglob("*.npy"))
    assert Run(task=task).key != key
    assert (np.asarray(task.train_images().pixels[:]) == 9).all()
    class_folders(tmp_path / "old")
    assert Run(task=on(tmp_path / "old")).key == key
    assert np.asarray(on(tmp_path / "old").train_images().pixels[:]).std() > 10


@pytest.mark.parametrize("unsettled", [2.0, -1.0])
def test_a_key_is_that_of_the_present_files(tmp_path: Path, unsettled: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the old ones were trained on."""
    monkeypatch.setattr(digest, "UNSETTLED", unsettled)
    task = on(class_folders(tmp_path / "data"))
    key, before = Run(task=task).key, np.asarray(task.train_images().pixels[:])
    assert Run(task=task).key == key
    Image.new("RGB", (60, 70)).save(tmp_path / "data" / "dog" / "more.png")
    assert Run(task=task).key != key
    assert len(task.data_set().train) + len(task.data_set().test) == 11
    (tmp_path / "data" / "dog" / "more.png").unlink()
    assert Run(task=task).key == key
    assert np.array_equal(task.train_images().pixels[:], before)


def small_run(tmp_path: Path) -> tuple[Run, Results]:
    task = on(class_folders(tmp_path / "data"), host="vit_desk(patch=2, dim=8, depth=1)")
    return Run(task=task, recipe=Recipe(epochs=1, batch=4, augment="none")), Results(tmp_path / "results")


def test_data_that_change_during_a_run_do_not_become_another_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = small_run(tmp_path)
    key, begun = run.key, []
    record = Classification.record

    def change(self: Classification) -> dict[str, Any]:
        found = record(self)
        Image.new("RGB", (60, 70)).save(tmp_path / "data" / "dog" / "more.png")
        begun.append(key)
        return found

    monkeypatch.setattr(Classification, "record", change)
    state, *_ = execute_job(Job(run, "study", "smoke", "row", 0), str(store.root))
    assert begun
    assert state == "done"
    assert [folder.name for folder in store.root.iterdir() if folder.is_dir()] == [key]
    outcome = store.outcome(key)
    assert (outcome["key"], outcome["study"], outcome["row"]) == (key, "study", "row")
    assert dataclasses.replace(run).key != key


def test_a_run_whose_data_have_changed_is_refused(tmp_path: Path) -> None:
    run, store = small_run(tmp_path)
    key = run.key
    Image.new("RGB", (60, 70)).save(tmp_path / "data" / "dog" / "more.png")
    with pytest.raises(DataError, match=f"the data of run {key} have changed since the run was made: make it again"):
        execute(run, store, device="cpu")
    assert execute(dataclasses.replace(run), store, device="cpu")["status"] == "done"


def test_a_step_of_training_does_not_look_at_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = on(class_folders(tmp_path / "data"))
    name = task.identity().data
    task.data_set()

    def refuse(self: digest.Look) -> bool:
        raise AssertionError

    monkeypatch.setattr(digest.Look, "has_changed", refuse)
    assert task.record()["name"] == name
    assert task.statistics()


def test_long_looks_are_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "QUICK", -1.0)
    look = digest.Look(class_folders(tmp_path / "data"))
    monkeypatch.setattr(digest, "SELDOM", 10**9)
    assert [look.has_changed(), look.has_changed()] == [True, False]


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "UNSETTLED", -1.0)
    root = class_folders(tmp_path / "data")
    files = digest.relative(root, sorted(root.rglob("*.png")))
    first = digest.of_bytes(root, files)
    (root / "cat" / "0.png").write_bytes(b"changed")
    read: list[Path] = []
    opened = Path.open

    def counted(self: Path, *arguments: object, **options: object) -> object:
        read.append(self)
        return opened(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", counted)
    assert digest.of_bytes(root, files) != first
    assert [path.name for path in read if path.suffix == ".png"] == ["0.png"]


@pytest.mark.parametrize("damage", ["[" * 100_000, "{"], ids=["nested", "text"])
def test_a_cache_that_cannot_be_read_is_made_anew(
    tmp_path: Path, damage: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "UNSETTLED", -1.0)
    root = class_folders(tmp_path / "data")
    name = on(root).identity().data
    (cache,) = own_cache.rglob("digests/*.json")
    cache.unlink()
    cache.write_text(damage)
    own.digest.cache_clear()
    assert on(root).identity().data == name


def test_above_the_limit_the_user_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "LIMIT", 1000)
    root = class_folders(tmp_path / "data")
    with pytest.raises(DataError, match="--digest bytes.*--digest index"):
        on(root).identity()
    names = {kind: on(root, digest=kind).identity() for kind in digest.KINDS}
    for kind, task in names.items():
        assert task.data.startswith(f"own:of_each_class-2-{kind}-")
        assert task.digest == ""
        assert on(root, digest=kind).record()["name"] == task.data


def test_folders_that_are_refused_are_not_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all bytes of large data takes minutes."""
    root = class_folders(tmp_path / "data", ("cat",))
    monkeypatch.setattr(digest, "LIMIT", 0)  # reaching the digest would ask for its kind
    with pytest.raises(DataError, match="only one class folder"):
        on(root).identity()


@pytest.mark.untyped
def test_an_unknown_digest_is_refused() -> None:
    with pytest.raises(ConfigError, match="digest is '', bytes or index"):
        on("digits", digest="names")


def test_the_same_data_elsewhere_and_through_links_have_one_digest(tmp_path: Path) -> None:
    one, two = class_folders(tmp_path / "one"), class_folders(tmp_path / "two")
    (tmp_path / "links").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "links" / name).symlink_to(one / name)
    assert own.digest(one) == own.digest(two) == own.digest(tmp_path / "links")


@pytest.mark.parametrize(
    ("orientation", "undo"),
    [(3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90), (8, Image.Transpose.ROTATE_270)],
)
def test_images_are_turned_upright(tmp_path: Path, orientation: int, undo: Image.Transpose) -> None:
    upright = np.zeros((40, 60, 3), np.uint8)
    upright[:10] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(upright).transpose(undo).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(decode(tmp_path / "a.png", None, 3), upright)


def test_hidden_folders_and_files_are_no_data(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "data")
    before = own.digest(root)
    class_folders(root, (".ipynb_checkpoints",))
    (root / "cat" / "._0.png").write_bytes(b"resource fork")
    own.digest.cache_clear()
    assert own.digest(root) == before
    assert on(root).record()["class_names"] == ["cat", "dog"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_that_vanishes_is_an_error(tmp_path: Path, split: str) -> None:
    for part in ("train", "test"):
        class_folders(tmp_path / "data" / part, ("cat", "cow", "dog"))
    for file in (tmp_path / "data" / split / "cow").iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"no {split} image of class cow .* can be read"):
        on(tmp_path / "data", corrupt="skip").record()


def test_a_class_that_only_the_test_has_is_an_error(tmp_path: Path) -> None:
    class_folders(tmp_path / "data" / "train")
    class_folders(tmp_path / "data" / "test", ("cat", "cow"))
    with pytest.raises(DataError, match="cow"):
        on(tmp_path / "data").record()
    with pytest.raises(DataError, match="class b .* has images for the test only"):
        own.check_classes(tmp_path, ("a", "b", "c"), np.array([0, 1]), np.array([0, 2]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "cat" / "link.jpg").symlink_to("link.jpg"), r"link\.jpg"),
        (lambda root: (root / "cat" / "again").symlink_to(root), "a loop; remove the link"),
        (
            lambda root: (root / "cat" / "0.png").rename(os.fsdecode(os.fsencode(root / "cat") + b"/\xff\xfe.png")),
            r"udcff.*is not UTF-8; rename it",
        ),
    ],
    ids=["to itself", "a loop", "bytes"],
)
def test_links_and_names_that_cannot_be_read_are_refused(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(class_folders(tmp_path))
    for corrupt in ("stop", "skip"):
        with pytest.raises(DataError, match=words):
            on(tmp_path, corrupt=corrupt).record()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "the path is empty"),
        ("~nobody-here/data", "this machine has no such user"),
        ("x" * 300, "File name too long"),
        ("/" + "y/" * 3000, "File name too long"),
        ("a\0b", "null character"),
        ("\udcff", "is not UTF-8"),
    ],
    ids=["empty", "user", "name", "long", "null", "bytes"],
)
def test_a_path_that_cannot_be_one_is_refused(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        on(path).identity()


def test_each_reader_of_a_folder_notices_that_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks may read one folder: neither takes the change away from the other."""
    monkeypatch.setattr(digest, "UNSETTLED", -1.0)  # files that were just written count as settled
    (tmp_path / "a").write_text("1")
    readers = [lru_cache(lambda path, mark=mark: mark + (path / "a").read_text()) for mark in "xy"]
    for content in ("1", "22"):
        (tmp_path / "a").write_text(content)
        for mark, read in zip("xy", readers, strict=True):
            digest.forget_if_changed(tmp_path, read)
            assert read(tmp_path) == mark + content
