"""Streams: images that are read in order come in batches that depend on (seed, epoch, step) alone."""

import gzip
import io
import shutil
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from torch import Tensor

from regard.core import ConfigError, DataError, DeviceError, MissingExtra, NetworkError
from regard.images import own
from regard.images import shards as archives
from regard.lab.data import catalog
from regard.lab.data.streamed import files, load, tables
from regard.lab.data.streamed.feed import StreamBatches
from regard.lab.data.streamed.names import Name, parse
from regard.lab.data.streamed.shards import Shards
from regard.lab.tasks import Classification, Detection, Segmentation
from regard.lab.tasks.check_data import check_data
from regard.lab.train.recipe import Recipe
from streams import encoded, equal_batches, joined, write_archive, write_stream, write_table

pytestmark = pytest.mark.usefixtures("own_cache")
HOST = "vit_desk(size=(14, 28), patch=7, dim=16, depth=1, heads=2)"
SIZE = (14, 28)
KINDS = ("parquet", "tar", "tar.gz")
SIZES = (26, 30, 20, 20)
IMAGES, BATCH = 96, 8
STEPS = 2 * IMAGES // BATCH
"""Of two epochs."""


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """96 images in four shards of different sizes, and 12 for the test."""
    return write_stream(tmp_path / "data", request.param, SIZES)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """The same for what does not depend on the kind of the shards."""
    return write_stream(tmp_path / "data", "tar", SIZES)


def task(folder: Path, **fields) -> Classification:
    return Classification(host=HOST, data=f"stream:{folder}", size=SIZE, **fields)


def feed(folder: Path, augment: str = "shift", seed: int = 3, batch: int = BATCH, part=(0, 1)) -> StreamBatches:
    batches = task(folder).feed(Recipe(batch=batch, augment=augment), seed, part)
    assert isinstance(batches, StreamBatches)
    return batches


def contents(batches: list[tuple[Tensor, Tensor]]) -> list[bytes]:
    """The bytes of each image, in order."""
    return [image.numpy().tobytes() for images, _ in batches for image in images]


def test_an_epoch_has_each_image_once_in_an_order_of_its_own(folder: Path) -> None:
    images = contents(list(feed(folder, "none").between(0, STEPS)))
    first, second = images[:IMAGES], images[IMAGES:]
    assert len(set(first)) == IMAGES
    assert set(first) == set(second)
    assert first != second
    assert first != contents(list(feed(folder, "none", seed=4).between(0, STEPS // 2)))


def test_images_of_a_batch_come_from_all_over_the_stream(folder: Path) -> None:
    batches = feed(folder)
    assert batches.lanes == (8 if list(folder.glob("*.parquet")) else 4)  # 11 row groups, or 4 archives
    spread = batches._shards_of(0)
    shards = {spread.place(batches._span(lane, 0)[0])[0] for lane in range(batches.lanes)}
    assert len(shards) >= 3


def test_shards_stand_in_another_order_in_each_epoch(tars: Path) -> None:
    orders = [tuple(feed(tars, seed=seed)._shards_of(epoch).order) for seed in (3, 4) for epoch in range(4)]
    assert len(set(orders[:4])) > 1
    assert orders[:4] != orders[4:]
    assert all(sorted(order) == list(range(len(order))) for order in orders)


def test_augmentation_depends_on_the_place_alone(tars: Path) -> None:
    """Of batches on seed, lane and step; of single images on seed, epoch and number."""
    rows = list(feed(tars)._shards_of(0).rows(0, 4))

    def batch(seed: int, lane: int, step: int) -> bytes:
        return feed(tars, seed=seed)._images(rows, lane, step).numpy().tobytes()

    def single(seed: int, epoch: int, number: int) -> bytes:
        return feed(tars, "randaugment+crop", seed)._transform_row((number, rows[0][1]), epoch).numpy().tobytes()

    for pixels in (batch, single):
        assert len({pixels(*place) for place in ((3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 1))}) == 4
        assert pixels(3, 0, 0) == pixels(3, 0, 0)


def test_what_is_left_of_an_epoch_is_less_than_a_batch(tars: Path) -> None:
    batches = feed(tars, "none", batch=20)
    assert (batches.per_epoch, batches.lanes) == (4, 4)
    images = contents(list(batches.between(0, 8)))
    assert len(set(images[:80])) == len(set(images[80:])) == 80
    assert set(images[:80]) != set(images[80:])


@pytest.mark.parametrize(
    ("kind", "augment", "count"),
    [("parquet", "shift", 4), ("tar", "shift", 2), ("tar.gz", "shift", 4), ("tar", "randaugment+crop", 4)],
)
def test_batches_do_not_depend_on_processes_and_workers(tmp_path: Path, kind: str, augment: str, count: int) -> None:
    """Three workers are cut to two, which divide the lanes equally; those of a part divide its own lanes."""
    folder, steps = write_stream(tmp_path, kind, SIZES), IMAGES // BATCH + 3
    whole = list(feed(folder, augment).between(0, steps))
    assert equal_batches(whole, feed(folder, augment).between(0, steps, workers=3))
    parts = [list(feed(folder, augment, part=(i, count)).between(0, steps, workers=5 * (i == 1))) for i in range(count)]
    assert equal_batches(whole, joined(parts))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Shard and name of each image that is read from now on."""
    found = list[tuple[int, str]]()
    original = Shards._samples

    def counted(self: Shards, shard: int, skip: int) -> Iterator[tuple[str, bytes, int]]:
        for sample in original(self, shard, 0):
            found.append((shard, sample[0]))
            if (skip := skip - 1) < 0:
                yield sample

    monkeypatch.setattr(Shards, "_samples", counted)
    return found


def test_a_run_reads_on_at_its_shards(folder: Path, reads: list[tuple[int, str]], capsys) -> None:
    whole = list(feed(folder).between(0, STEPS))
    for step in (5, IMAGES // BATCH + 7):
        reads.clear()
        batches = feed(folder)
        again = list(batches.between(step, STEPS))
        assert equal_batches(whole[step:], again)
        # beside what is used, each lane reads the beginning of at most one shard for each epoch in which it starts
        starts = -(-(STEPS - step) * BATCH // IMAGES)
        most = starts * batches.lanes * int(batches.stream.shards.counts.max())
        assert len(again) * BATCH <= len(reads) <= len(again) * BATCH + most
        epoch = step * BATCH // IMAGES + 1
        assert f"epoch {epoch} continues at its shards, up to " in capsys.readouterr().err


def test_a_part_reads_the_shards_of_its_lanes_alone(tmp_path: Path, reads: list[tuple[int, str]]) -> None:
    folder = write_stream(tmp_path / "data", "tar", sizes=[24] * 4)
    _ = task(folder).data_set()
    reads.clear()
    list(feed(folder, part=(1, 4)).between(0, IMAGES // BATCH))
    assert len({shard for shard, _ in reads}) == 1
    assert len(reads) == 24


def test_shards_that_change_are_read_again(tmp_path: Path) -> None:
    folder = write_stream(tmp_path / "data", "tar", SIZES)
    before, classes = task(folder).identity(), task(folder).data_set().classes
    archive = next(folder.rglob("*train*.tar"))
    write_archive(archive, range(4), classes=4)
    assert task(folder).identity() != before
    assert len(task(folder).data_set().classes) == len(classes) + 1


def test_compression_changes_nothing(tmp_path: Path) -> None:
    plain, packed = (write_stream(tmp_path / kind.replace(".", ""), kind) for kind in ("tar", "tar.gz"))
    assert equal_batches(feed(plain).between(0, 20), feed(packed).between(0, 20))


def test_the_test_split_is_the_same_from_tables_and_archives(tmp_path: Path) -> None:
    sets = [task(write_stream(tmp_path / kind.replace(".", ""), kind)).data_set() for kind in KINDS]
    for other in sets[1:]:
        assert np.array_equal(sets[0].test.pixels, other.test.pixels)
        assert sets[0].test.labels.tolist() == other.test.labels.tolist() == [number % 3 for number in range(100, 112)]
    assert sets[0].classes == ("class 0", "class 1", "class 2")
    assert sets[1].classes == ("0", "1", "2")
    folder = tmp_path / "tar"
    indexed = own.load(folder, SIZE, "stop")
    assert np.array_equal(indexed.test.pixels, sets[1].test.pixels)
    assert len(indexed.train) == len(sets[1].train) == 100


def test_a_large_test_split_is_decoded_when_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = task(folder).test_images()
    monkeypatch.setattr(own, "IN_MEMORY", 0)
    catalog._load_stream.cache_clear()
    found = task(folder).test_images()
    assert isinstance(found.pixels, own.Lazy)
    assert np.array_equal(found.pixels[2:9:3], expected.pixels[2:9:3])
    assert "test" in str(found.pixels.names[3])


def test_a_stream_has_no_single_training_images(tars: Path) -> None:
    images = task(tars).train_images()
    assert len(images) == IMAGES
    for use in (lambda: images.pixels[0], lambda: images.take(slice(0, 2)), lambda: images.labels[0]):
        with pytest.raises(DataError, match="a stream is read in order"):
            use()


def test_the_identity_is_of_the_shards_and_not_of_their_place(tars: Path, tmp_path: Path) -> None:
    first = task(tars).identity().data
    copy = shutil.copytree(tars, tmp_path / "copy")
    assert task(copy).identity().data == first
    assert first.startswith("stream:2-index-")
    assert str(tars) not in first
    (copy / "notes.txt").write_text("beside the shards")
    shutil.copy(next(tars.glob("train-00*")), copy / next(tars.glob("train-00*")).name.replace("00", "09"))
    load._find_splits.cache_clear()
    assert task(copy).identity().data != first
    assert task(tars, digest="bytes").identity().data != first


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_a_damaged_header_ends_no_archive_without_a_word(tmp_path: Path, kind: str) -> None:
    folder = write_stream(tmp_path / "data", kind)
    file = folder / f"train-02.{kind}"
    unpack, pack = (gzip.decompress, gzip.compress) if kind == "tar.gz" else (bytes, bytes)
    data = unpack(file.read_bytes())
    place = data.index(b"0060.png")
    file.write_bytes(pack(data[:place] + b"x" * 512 + data[place + 512 :]))
    with pytest.raises(DataError, match=rf"train-02.{kind} is damaged after 0059"):
        task(folder).data_set()
    file.write_bytes(pack(data)[: len(pack(data)) // 2])
    with pytest.raises(DataError, match=rf"train-02.{kind} is damaged after 00"):
        task(folder).data_set()


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    folder = write_stream(tmp_path / "data")
    file = folder / "train-02.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train-02.parquet cannot be read as parquet"):
        task(folder).data_set()


OTHERS = r"train-01\.\S+ (has other images than the \d+ that were counted|has no row group 1)"


@pytest.mark.parametrize(
    ("kind", "size", "classes", "message"),
    [
        *((kind, size, 3, OTHERS) for kind in ("parquet", "tar") for size in (10, 20)),
        ("tar", 15, 4, r"\d+\.png in .*train-01\.tar has label 3, outside 0\.\.2"),
    ],
)
def test_a_shard_that_changes_under_a_run_is_named(
    tmp_path: Path, kind: str, size: int, classes: int, message: str
) -> None:
    folder = write_stream(tmp_path / "data", kind, sizes=[15] * 4)
    batches = feed(folder, batch=15)
    write = write_table if kind == "parquet" else write_archive
    write(folder / f"train-01.{kind}", range(size), classes=classes)
    with pytest.raises(DataError, match=message):
        list(batches.between(0, 4))


def test_a_shard_that_changed_is_counted_again(tmp_path: Path) -> None:
    """Names, sizes and first bytes are the same, so nothing but the time of change tells it."""
    folder = write_stream(tmp_path / "data", "tar")
    first = load.splits(f"stream:{folder}")[0]
    before = load.identity(f"stream:{folder}")
    write_archive(folder / "train-00.tar", range(26), classes=4)
    load._find_splits.cache_clear()
    assert load.identity(f"stream:{folder}") == before
    assert (first, load.splits(f"stream:{folder}")[0]) == (("0", "1", "2"), ("0", "1", "2", "3"))


def test_a_test_split_that_changed_is_copied_again(tmp_path: Path) -> None:
    folder = write_stream(tmp_path / "data", "tar.gz")
    for classes in (3, 2):
        plain = write_archive(tmp_path / "test.tar", range(6, 18), classes)
        (folder / "test-00.tar.gz").write_bytes(gzip.compress(plain.read_bytes(), 0, mtime=0))
        load._find_splits.cache_clear()
        assert load.load(f"stream:{folder}", SIZE).test.labels.tolist() == [n % classes for n in range(6, 18)]


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of the third shard are none."""
    original = Shards._samples

    def damaged(self: Shards, shard: int, skip: int) -> Iterator[tuple[str, bytes, int]]:
        for name, image, label in original(self, shard, skip):
            yield name, image if shard != 2 else b"no image", label

    monkeypatch.setattr(Shards, "_samples", damaged)


def test_a_damaged_image_is_named_with_its_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = feed(folder)
    damage(monkeypatch)
    place = r"(\d+.png|row \d+ of row group \d) in .*train-0\d\.\S+"
    with pytest.raises(DataError, match=rf"{place} cannot be read as an image"):
        list(batches.between(0, STEPS))


@pytest.mark.slow
def test_what_a_worker_meets_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits for ten seconds when it gives up the loader of a worker that failed."""
    batches = feed(write_stream(tmp_path / "data", "tar"), batch=4)
    damage(monkeypatch)
    with pytest.raises(DataError, match=r"\.png in .*tar cannot be read as an image") as info:
        list(batches.between(0, STEPS, 2))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_test_that_is_not_there_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"has no nope split"):
        catalog.identity(f"stream:{write_stream(tmp_path, kind, (4,))}?test=nope")


def test_labels_outside_the_classes_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = write_stream(tmp_path / "data", "tar")
    write_archive(folder / "test-00.tar", range(12), classes=4)
    with pytest.raises(DataError, match=r"test-00.tar: label 3 is outside 0..2 \(3 classes\); \?test=NAME evaluates"):
        task(folder).data_set()
    with pytest.raises(DataError, match="the task allows 2"):
        task(write_stream(tmp_path / "other", "tar"), classes=2).data_set()
    one = write_stream(tmp_path / "one", "tar")
    for file in one.iterdir():
        write_archive(file, range(4), classes=1)
    with pytest.raises(DataError, match="has only one class"):
        task(one).data_set()


def with_columns(folder: Path, extra: str) -> Path:
    """A stream whose tables have a second column of labels, with four classes."""
    from datasets import ClassLabel, Dataset

    for file in list(folder.glob("*.parquet")):
        table = Dataset.from_parquet(str(file), cache_dir=str(folder.parent / "datasets"))
        feature = ClassLabel(names=["a", "b", "c", "d"])
        values = [number % 4 for number in range(len(table))]
        table.add_column(extra, values).cast_column(extra, feature).to_parquet(file)
    return folder


def test_columns_are_chosen_by_the_user_where_there_are_several(tmp_path: Path) -> None:
    folder = with_columns(write_stream(tmp_path / "data"), "coarse")
    with pytest.raises(DataError, match=r"several columns of labels \(label, coarse\).*choose with \?label=COLUMN"):
        task(folder).data_set()
    chosen = Classification(host=HOST, data=f"stream:{folder}?label=coarse", size=SIZE)
    assert chosen.data_set().classes == ("a", "b", "c", "d")
    assert chosen.identity().data.endswith("?label=coarse")
    with pytest.raises(DataError, match=r"no column picture.*its columns are image, label, coarse"):
        Classification(host=HOST, data=f"stream:{folder}?label=label&image=picture", size=SIZE).data_set()


def test_a_column_of_another_kind_is_named_in_a_short_line(tmp_path: Path) -> None:
    folder = write_stream(tmp_path / "data", sizes=(10,))
    for choice, message in (
        ("label=image", r"column 'image' has the label .{,42}, expected a whole number from 0 on; \?label=COLUMN"),
        ("image=label", r"row 0 of row group 0 of \S+ has no image bytes in 'label', but int; \?image=COLUMN"),
    ):
        with pytest.raises(DataError, match=message):
            load.load(f"stream:{folder}?{choice}", SIZE)
    with pytest.raises(DataError, match=r"has archives, which have no columns; leave label=y out"):
        catalog.identity(f"stream:{write_stream(tmp_path / 'tars', 'tar', (4,))}?test=test&label=y")


def test_tables_without_notes_have_the_columns_of_own_tables(tmp_path: Path) -> None:
    for split, count in (("train", 40), ("val", 10)):
        content = {"img": [encoded(n) for n in range(count)], "target": [n % 2 for n in range(count)]}
        table = pyarrow.table(content, metadata={"class_names": '["cat", "dog"]'})
        (tmp_path / split).mkdir()
        pyarrow.parquet.write_table(table, tmp_path / split / "0.parquet", row_group_size=16, write_statistics=False)
    image_set = task(tmp_path).data_set()
    assert (image_set.classes, len(image_set.train), len(image_set.test)) == (("cat", "dog"), 40, 10)
    assert tables.measure(str(tmp_path / "train/0.parquet"), tables.Columns("img", "target", ())) == [
        (0, 16, 0, 1), (1, 16, 0, 1), (2, 8, 0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"val": 0.1}, r"val=0.1 is not possible for a stream: name a test split"),
        ({"limit": 5}, "limit=5 is not possible for a stream"),
        ({"split": "held"}, "split='held' is not possible for a stream"),
        ({"corrupt": "skip"}, "corrupt='skip' is not possible for a stream"),
    ],
    ids=str,
)
def test_what_needs_single_images_is_refused(fields, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        task(tmp_path, **fields)


@pytest.mark.parametrize("kind", [Segmentation, Detection])
def test_other_tasks_refuse_streams(kind) -> None:
    with pytest.raises(ConfigError, match=r"does not read streams \(hf://a/b\): give a folder"):
        kind(host="resnet18", data="hf://a/b", size=(32, 32))


def test_processes_that_do_not_divide_the_lanes_are_refused(tars: Path) -> None:
    with pytest.raises(DeviceError, match=r"have 4 lanes, which 3 processes cannot divide equally"):
        feed(tars, batch=12, part=(0, 3))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-0.tar"], "has no test"),
        (["test-0.tar"], "shards for the test only"),
        (["train-0.tar", "test-0.parquet"], "has files of other kinds"),
        ([], "has no shards"),
    ],
    ids=str,
)
def test_a_folder_that_is_no_stream_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=message):
        catalog.identity(f"stream:{tmp_path}")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("hf://a/b", Name(True, "a/b")),
        ("hf://datasets/a/b.c-d@v1", Name(True, "a/b.c-d", "v1")),
        ("hf://a/b?test=val&config=x", Name(True, "a/b", "", (("test", "val"), ("config", "x")))),
        ("stream:~/shards?label=y", Name(False, "~/shards", "", (("label", "y"),))),
        ("hf://b", "names no data set of the Hugging Face hub; expected hf://OWNER/NAME"),
        ("hf://a/b?label", "expected KEY=VALUE after the question mark, not 'label'"),
        ("hf://a/b?labels=x", "did you mean label"),
        ("hf://a/b?test=x&test=y", "makes a choice twice"),
        ("stream:", "names no folder"),
        ("stream:a?config=x", "only sets of the Hugging Face hub have a config"),
    ],
)
def test_names_are_read(data: str, expected: Name | str) -> None:
    if isinstance(expected, Name):
        assert parse(data) == expected
    else:
        with pytest.raises(DataError, match=expected):
            parse(data)
    assert parse("hf://a/b?test=v&config=x").chosen == "?config=x&test=v"


@pytest.mark.parametrize("kind", ["parquet", "tar"])  # it does not recognise a folder of .tar.gz
def test_files_and_splits_of_a_hub_set_are_those_that_datasets_finds(tmp_path: Path, kind: str) -> None:
    """`datasets` finds the files of a folder as it finds those of the hub."""
    folder, commit = write_stream(tmp_path, kind, SIZES), "0123456789" * 4
    found = files.at_commit(Name(True, str(folder)), commit)
    assert found.identity == f"hf:{folder}@{commit}"
    local = files.find(Name(False, str(folder)))
    assert found.splits == local.splits
    other = files.at_commit(Name(True, str(folder), "", (("test", "train"),)), commit)
    assert other.splits["test"] == other.splits["train"]
    assert other.identity.endswith("?test=train")


def test_a_hub_that_cannot_be_reached_is_said_in_one_line() -> None:
    with pytest.raises(DataError, match=r"hub cannot be reached .*hf:// needs the network") as info:
        catalog.identity("hf://nobody/nothing")
    assert "\n" not in str(info.value)
    with pytest.raises(DataError, match=r"a/b@v1/0.tar cannot be read over the network \(") as info:
        files.open_file("hf://datasets/a/b@v1/0.tar")
    assert "\n" not in str(info.value)


def test_a_hub_set_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"datasets is not installed; pip install 'regard\[streams\]'"):
        catalog.identity("hf://nobody/nothing")


def test_a_file_of_the_hub_is_read_like_one_of_this_machine(tmp_path: Path) -> None:
    """The hub's files are opened by its own library; what stands between it and the reader is tried on local files."""
    archive = write_archive(tmp_path / "a.tar.gz", range(9))
    remote = io.BufferedReader(files.Remote("hf://a.tar.gz", archive.open("rb")), 100)
    with archive.open("rb") as local:
        assert list(archives.in_order("a.tar.gz", remote)) == list(archives.in_order("a.tar.gz", local))
    table = write_table(tmp_path / "a.parquet", range(30))
    remote = io.BufferedReader(files.Remote("hf://a.parquet", table.open("rb")), 100)
    assert pyarrow.parquet.read_table(remote).equals(pyarrow.parquet.read_table(table))
    stream = archive.open("rb")
    broken = files.Remote("hf://a.tar.gz", stream)
    stream.close()
    with pytest.raises(NetworkError, match=r"hf://a.tar.gz cannot be read over the network \(.*closed file"):
        list(archives.in_order("a.tar.gz", io.BufferedReader(broken)))


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """Six times the shards, and the largest memory while all are read is the same.

    The smallest of three passes counts: threads that other tests left behind allocate memory now and then.
    """

    def peak(batches: StreamBatches) -> int:
        tracemalloc.start()
        for _ in batches.chunks(0, 0, batches.per_epoch):
            pass
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest

    peaks = []
    for count in (2, 12):
        batches = feed(write_stream(tmp_path / str(count), "tar", sizes=[20] * count), "none", batch=4)
        peaks.append(min(peak(batches) for _ in range(3)))
    assert peaks[1] < 1.1 * peaks[0] + 20_000


def test_shards_of_one_class_each_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_stream(tmp_path / "data", "tar")
    for number in range(4):
        write_archive(folder / f"train-{number:02d}.tar", range(number % 3, 60, 3))
    task(folder).data_set()
    assert "4 of 4 shards" in caplog.text


def test_a_stream_is_checked_image_by_image(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_data(f"stream:{tars}")
    counts = [(row["split"], row["images"], row["unreadable"]) for row in report.rows]
    assert counts == [("train", 32, 0)] * 3 + [("test", 4, 0)] * 3
    assert (report.problems, report.warnings) == ([], [])
    damage(monkeypatch)
    problems = check_data(f"stream:{tars}").problems
    assert "cannot be read as an image" in problems[0]
    with pytest.raises(ConfigError, match="does not read streams"):
        check_data(f"stream:{tars}", "detection")


@pytest.mark.parametrize("data", ["stream:/no/such/folder", "stream:\0"])
def test_a_path_that_is_none_is_refused(data: str) -> None:
    with pytest.raises(DataError):
        catalog.identity(data)
