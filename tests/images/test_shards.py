"""WebDataset shards are read by an index: as image files are, to the same bits, and nothing of them is lost."""

import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from regard.core import DataError
from regard.images import own, shards
from regard.images.feed import Batches
from regard.images.own import Lazy
from regard.images.rows import Paths, subset
from regard.lab.data import catalog
from regard.lab.tasks import Classification
from regard.lab.train.recipe import Recipe
from streams import encoded, equal_batches, joined, write_members

HOST = "vit_desk(size=(14, 28), patch=7, dim=16, depth=1, heads=2)"
SIZE = (14, 28)


def sample(number: int, label: int) -> list[tuple[str, bytes]]:
    """Both forms of labels, and members that are neither image nor label."""
    answer = (".cls", str(label).encode()) if number % 2 else (".json", json.dumps({"label": label}).encode())
    extra = [(f"s/{number:03d}.txt", b"a caption")]
    return [(f"s/{number:03d}.png", encoded(number)), *extra, (f"s/{number:03d}{answer[0]}", answer[1])]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The same images as class folders and as shards: 24 for training in three shards, 6 for the test."""
    folders, tars = tmp_path / "folders", tmp_path / "tars"
    for split, first, count in (("train", 0, 24), ("val", 24, 6)):
        for number in range(first, first + count):
            file = folders / split / str((number - first) * 3 // count) / f"{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(number))
        for start in range(first, first + count, 8):
            numbers = range(start, min(start + 8, first + count))
            members = [member for number in numbers for member in sample(number, (number - first) * 3 // count)]
            write_members(tars / f"pets-{split}-{start:04d}.tar", members)
    return folders, tars


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No split is small enough to be decoded at once."""
    monkeypatch.setattr(own, "IN_MEMORY", 0)


def batches(task: Classification, start: int = 0, stop: int = 6, workers: int = 0, part: tuple[int, int] = (0, 1)):
    return list(task.batches(Recipe(batch=6, augment="shift"), 3, start, stop, workers, part))


def test_shards_are_the_images_that_they_hold(both: tuple[Path, Path]) -> None:
    folders, tars = (own.load(path, SIZE, "stop") for path in both)
    assert tars.classes == folders.classes
    for one, other in ((folders.train, tars.train), (folders.test, tars.test)):
        assert one.labels.tolist() == other.labels.tolist()
        assert np.array_equal(one.pixels, other.pixels)
    assert own.digest(both[1]) != own.digest(both[0])


@pytest.mark.usefixtures("on_disk")
def test_shards_train_as_folders_do_from_any_step_and_in_parts(both: tuple[Path, Path]) -> None:
    folders, tars = (Classification(host=HOST, data=str(path), size=SIZE) for path in both)
    assert isinstance(tars.train_images().pixels, Lazy)
    whole = batches(tars)
    assert equal_batches(whole, batches(folders))
    assert equal_batches(whole[3:], batches(tars, 3))
    assert equal_batches(whole, batches(tars, workers=2))
    assert equal_batches(whole, joined([batches(tars, part=(number, 2)) for number in range(2)]))


@pytest.mark.usefixtures("on_disk")
def test_a_part_decodes_its_own_images_alone(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    images = own.load(both[1], SIZE, "stop").train
    decoded = list[int]()
    original = Lazy._decode_row

    def counted(self: Lazy, row: int, size: tuple[int, int] | None) -> np.ndarray:
        decoded.append(row)
        return original(self, row, size)

    monkeypatch.setattr(Lazy, "_decode_row", counted)
    _ = Batches(images, SIZE, 8, "crop", 0, part=(1, 4))[0]
    assert len(decoded) == 2


@pytest.mark.usefixtures("on_disk")
def test_a_shard_without_a_split_is_divided(tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", [member for number in range(40) for member in sample(number, number % 2)])
    image_set = own.load(tmp_path, SIZE, "stop")
    assert (len(image_set.train), len(image_set.test)) == (32, 8)
    assert isinstance(image_set.train.pixels.sources, shards.Members)


def test_val_beside_a_test_is_read_for_a_validation_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, split in enumerate(("train", "val", "test")):
        for part in range(2 - number // 2):
            numbers = (number * 20 + part * 10 + n for n in range(10 - number))
            write_members(tmp_path / f"{split}-{part}.tar", [member for n in numbers for member in sample(n, n % 2)])
    usual, reserved = own.load(tmp_path, SIZE, "stop"), own.load(tmp_path, SIZE, "stop", reserved=True)
    assert usual.held is None
    assert "val of" in caplog.text
    assert reserved.held is not None
    assert [len(part) for part in (reserved.train, reserved.held, reserved.test)] == [20, 18, 8]
    assert own.digest(tmp_path, reserved=True) == own.digest(tmp_path) + own.RESERVED


@pytest.mark.parametrize("name", ["holdout-0.tar", "extra/0.tar"])
def test_a_shard_without_a_word_beside_those_of_training_is_refused(tmp_path: Path, name: str) -> None:
    for file in ("train-0.tar", name):
        write_members(tmp_path / file, [*sample(1, 0), *sample(3, 1)])
    for data in (str(tmp_path), f"stream:{tmp_path}"):
        with pytest.raises(DataError, match=f"{name} lies beside train-0.tar, but has no word of a split"):
            catalog.identity(data)


@pytest.mark.parametrize(
    ("file", "members", "message"),
    [
        ("a.tar", [("a.png", encoded(0))], "sample a in .*a.tar has no label"),
        ("a.tar", [("a.cls", b"1")], "sample a in .*a.tar has no image"),
        ("a.tar", [("a.png", encoded(0)), ("a.cls", b"cat")], "a.cls in .*a.tar has the label 'cat', expected a whole"),
        ("a.tar", [("a.png", encoded(0)), ("a.b.png", encoded(0)), ("a.cls", b"1")], "a.b.png in .* second image"),
        ("a.tar", [("a.png", encoded(0)), ("a.cls", b"1"), ("a.json", b'{"label": 2}')], "sample a in .* 1 and 2"),
        ("a.tar", [*sample(1, 0), *sample(2, 1), *sample(1, 0)], "sample .* occurs twice in .*a.tar"),
        ("a.tar", [("a.png", encoded(0)), ("a.json", b'{"label": 1, "label": 0}')], "a.json in .*a.tar is not JSON"),
        ("a.tar", [("a.png", encoded(0)), ("a.json", b"[" * 100_000)], "a.json in .*a.tar is not JSON"),
        ("a.tar", [("bad.png", b"no image"), ("bad.cls", b"0")], "bad.png in .*a.tar cannot be read"),
        ("val/a.tar", [], "for the test only"),
        ("train-test.tar", [], "train-test.tar has the words train and test"),
    ],
    ids=["no label", "no image", "a word", "two images", "two labels", "a key twice", "a label twice", "brackets",
         "damaged", "test", "two splits"],
)  # fmt: skip
def test_what_is_wrong_in_shards_is_named(
    tmp_path: Path, file: str, members: list[tuple[str, bytes]], message: str
) -> None:
    write_members(tmp_path / file, [*members, *sample(1, 0), *sample(3, 1)])
    with pytest.raises(DataError, match=message):
        own.load(tmp_path, SIZE, "stop")


def test_shards_without_images_are_refused(tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", [("a.txt", b"text")])
    with pytest.raises(DataError, match="train shards of .* have no image"):
        own.load(tmp_path, SIZE, "stop")


@pytest.mark.parametrize("label", ["Infinity", "1e400", "2.7", "true", '"1_0"', '"\\uff11"', "-1", "1048576"])
def test_a_label_is_a_whole_number_in_digits(tmp_path: Path, label: str) -> None:
    write_members(
        tmp_path / "a.tar", [*sample(1, 0), ("a.png", encoded(0)), ("a.JSON", f'{{"label": {label}}}'.encode())]
    )
    with pytest.raises(DataError, match=r"a.JSON in .*a.tar has the label .*, expected a whole number from 0 on"):
        own.read_splits(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_sample_of_links_is_not_left_out(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(write_members(tmp_path / "a.tar", sample(1, 0)), "a") as archive:
        for name in ("b.png", "b.cls"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "s/001" + name[1:]
            archive.addfile(info)
    with pytest.raises(DataError, match=r"b.png in .*a.tar is a link"):
        own.read_splits(tmp_path)


def test_archives_that_were_joined_are_refused(tmp_path: Path) -> None:
    file, other = (write_members(tmp_path / name, sample(1, 0)) for name in ("a.tar", "b.tar"))
    file.write_bytes(file.read_bytes() + other.read_bytes())
    with pytest.raises(DataError, match=r"a.tar goes on after the end of its archive"):
        own.read_splits(tmp_path)


@pytest.mark.parametrize("keep", [0, 3])
def test_a_shard_whose_rest_is_zeros_is_refused(tmp_path: Path, keep: int) -> None:
    write_members(tmp_path / "a.tar", sample(1, 0))
    members = [member for number in range(8) for member in sample(number, 0)]
    file = write_members(tmp_path / "b.tar", members)
    with tarfile.open(file) as archive:
        start = archive.getmembers()[3 * keep].offset
    file.write_bytes(file.read_bytes()[:start] + bytes(20_000))
    with pytest.raises(DataError, match=r"b.tar ends in \d+ zero bytes"):
        own.read_splits(tmp_path)


@pytest.mark.parametrize("word", ["val", "valid", "test"])
def test_no_shard_is_both_validation_and_test(tmp_path: Path, word: str) -> None:
    for split in ("train", word):
        write_members(tmp_path / f"pets-{split}.tar", sample(1, 0))
    assert shards.split_of_shards(tmp_path, shards.files_of(tmp_path)).keys() == {"train", "test"}
    with_both = write_members(tmp_path / f"pets-{'test' if word != 'test' else 'val'}.tar", sample(1, 0))
    assert with_both in sum(shards.split_of_shards(tmp_path, shards.files_of(tmp_path)).values(), [])
    assert shards.split_of_shards(tmp_path, shards.files_of(tmp_path)).keys() == {"train", "test", "val"}


@pytest.mark.parametrize("other", ["cat/1.png", "b.tar.gz", "b.tgz", "train.parquet"])
def test_data_of_another_kind_beside_shards_are_not_left_out(tmp_path: Path, other: str) -> None:
    write_members(tmp_path / "a.tar", sample(1, 0))
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_bytes(b"")
    for read in (own.read_splits, own.digest):
        with pytest.raises(DataError, match=rf"{other} is compressed|has shards \(a.tar\) and also .*{other}"):
            read(tmp_path)


def test_no_sample_of_a_damaged_shard_is_lost_silently(tmp_path: Path) -> None:
    file = write_members(tmp_path / "a.tar", [member for number in range(6) for member in sample(number, number % 2)])
    data = file.read_bytes()
    with tarfile.open(file) as archive:
        places = [member.offset for member in archive]
    for place in (places[9], places[9] + 512, places[9] + 700):
        file.write_bytes(data[:place])
        with pytest.raises(DataError, match=r"a.tar is damaged .*after s/00"):
            own.read_splits(tmp_path)
    file.write_bytes(data[: places[9]] + b"x" * 512 + data[places[9] + 512 :])
    with pytest.raises(DataError, match=r"a.tar is damaged .*after s/002"):
        own.read_splits(tmp_path)
    file.write_bytes(b"no tar file" * 100)
    with pytest.raises(DataError, match="a.tar is damaged after its beginning"):
        own.read_splits(tmp_path)


def test_a_link_to_nothing_is_named_and_a_changed_shard_is_read_again(tmp_path: Path) -> None:
    shard, link = write_members(tmp_path / "a.tar", [*sample(0, 0), *sample(1, 1)]), tmp_path / "b.tar"
    assert len(shards.read([shard])[2]) == 2
    write_members(shard, [*sample(0, 0), *sample(1, 1), *sample(2, 1)])
    assert shards.read([shard])[2].tolist() == [0, 1, 1]
    link.symlink_to(tmp_path / "gone.tar")
    with pytest.raises(DataError, match=r"b.tar cannot be read: No such file"):
        shards.read([shard, link])


@pytest.mark.parametrize("data", ["pipe:cat a.tar", "https://a.b/c.tar", "s3://a/b"])
def test_an_address_is_refused(data: str) -> None:
    with pytest.raises(DataError, match=r"is not read; streams are hf://OWNER/NAME, and stream:FOLDER"):
        catalog.identity(data)


def test_the_package_webdataset_writes_and_reads_the_same(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(6):
            writer.write({"__key__": f"k{number}", "png": encoded(number), "cls": number % 3})
    members, names, labels = shards.read([tmp_path / "a.tar"])
    theirs = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    assert [entry["png"] for entry in theirs] == [members[row] for row in range(len(members))]
    assert [int(entry["cls"]) for entry in theirs] == labels.tolist()
    assert names[4] == f"k4.png in {tmp_path / 'a.tar'}"


def test_the_index_of_many_images_is_a_few_arrays(tmp_path: Path) -> None:
    """Nothing in it is a Python object for each image, and a look at an image keeps nothing."""
    count, file = 100_000, tmp_path / "a.tar"
    file.write_bytes(bytes(2048))
    zeros = np.zeros(count, np.int32)
    members = shards.Members((file,), zeros, np.full(count, 512), zeros + 100)
    assert sum(array.nbytes for array in (members.shard, members.start, members.size)) == 16 * count
    names = [f"/data/train/n01440764/n01440764_{number}.JPEG".encode() for number in range(count)]
    paths = Paths._of(names)
    assert {array.dtype.kind for array in (paths.text, paths.starts)} <= {"u", "i"}
    assert paths.text.nbytes + paths.starts.nbytes == sum(map(len, names)) + 8 * (count + 1)
    assert paths[-1] == Path(names[-1].decode())
    before = pickle.dumps([members, paths])
    for row in range(0, count, 97):
        assert len(members[row]) == 100
        assert paths[row].name.endswith(f"_{row}.JPEG")
    assert pickle.dumps([members, paths]) == before


def test_a_part_of_paths_is_those_paths() -> None:
    paths = [Path(f"/a/é{number}.png") for number in range(7)]
    packed = Paths.of(paths)
    assert list(packed) == paths
    assert list(subset(packed, np.array([5, 1]))) == [paths[5], paths[1]]
    assert list(subset(packed, slice(1, None, 2))) == paths[1::2] == list(subset(paths, slice(1, None, 2)))
    assert subset(paths, np.array([5, 1])) == [paths[5], paths[1]]
    with pytest.raises(IndexError):
        packed[7]
