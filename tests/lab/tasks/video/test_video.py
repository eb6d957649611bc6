"""Video: clips from folders of frames and video files, the generated set, and a run from a folder to a prediction."""

import dataclasses
import json
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import regard
from regard import MiTA, Softmax
from regard.cli.app import run as command
from regard.core import ConfigError, DataError
from regard.images import clips
from regard.images.augment import augment_batch
from regard.images.images import decode
from regard.images.streams import generator
from regard.lab.data import moving
from regard.lab.tasks import Video
from regard.lab.tasks.check_data import check_data
from regard.lab.train.recipe import Recipe

pytestmark = pytest.mark.usefixtures("own_cache")
TASK = Video(host="vit_desk_video", data=moving.NAME, size=(28, 28))


def write_frames(folder: Path, number: int, value: int = 0, size: tuple[int, int] = (20, 24)) -> Path:
    """A clip whose frame i is of the grey value + i."""
    folder.mkdir(parents=True)
    for frame in range(number):
        Image.fromarray(np.full((*size, 3), value + frame, np.uint8)).save(folder / f"frame_{frame}.png")
    return folder


def write_video(file: Path, number: int, size: tuple[int, int] = (32, 48)) -> Path:
    """A video whose frame i is of the grey 10 i."""
    av = pytest.importorskip("av")
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for frame in range(number):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((*size, 3), 10 * frame % 256, np.uint8))))
        container.mux(stream.encode())
    return file


def write_set(folder: Path, each: int = 5) -> Path:
    """Two classes, bright and dark, of clips of 6 frames."""
    for label, value in (("bright", 200), ("dark", 20)):
        for clip in range(each):
            write_frames(folder / label / f"clip{clip}", 6, value + clip)
    return folder


def test_the_middle_of_equal_parts_in_the_order_of_numbers(tmp_path: Path) -> None:
    clip = clips.Clip(write_frames(tmp_path / "a", 16), 4)
    assert [Path(str(part)).stem for part in clip.parts()] == ["frame_2", "frame_6", "frame_10", "frame_14"]
    pixels = decode(clip, None, 12)
    assert pixels.shape == (20, 24, 12)
    assert pixels[0, 0].tolist() == [value for value in (2, 6, 10, 14) for _ in range(3)]
    assert clips.Clip(tmp_path / "a", 16).parts() == clips.frame_files(tmp_path / "a")
    apart = clips.frames_apart(torch.from_numpy(pixels).permute(2, 0, 1)[None], 4)
    assert apart.shape == (1, 3, 4, 20, 24)
    assert apart[0, 1, :, 0, 0].tolist() == [2, 6, 10, 14]
    for first in (True, False):
        images = torch.rand(2, 12, 3, 5)
        torch.testing.assert_close(clips.frames_joined(clips.frames_apart(images, 4, first), first), images)


@pytest.mark.parametrize(
    ("stems", "refused"),
    [
        (("0.1", "0.15", "0.2"), True), (("0.10", "0.15", "0.20"), False), (("0.5", "1.0", "10.5"), False),
        (("shot_1.9", "shot_1.10", "shot_2.1"), False), (("1.2_a3.5", "1.15_a3.5"), False),
    ],
)  # fmt: skip
def test_times_of_frames_are_not_taken_for_whole_numbers(stems: tuple[str, ...], refused: bool, tmp_path: Path) -> None:
    for stem in stems:
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / f"{stem}.png")
    if refused:
        with pytest.raises(DataError, match=r"0\.2\.png lies before 0\.15\.png by whole numbers"):
            clips.frame_files(tmp_path)
    else:
        assert [file.stem for file in clips.frame_files(tmp_path)][: len(stems)] == list(stems)


def test_a_video_file_is_read_as_its_frames(tmp_path: Path) -> None:
    clip = clips.Clip(write_video(tmp_path / "a.mp4", 12), 4)
    pixels = decode(clip, None, 12)
    assert pixels.shape == (32, 48, 12)
    assert np.abs(pixels.reshape(-1, 4, 3).mean((0, 2)) - [10, 40, 70, 100]).max() < 4
    assert clips.measure(tmp_path / "a.mp4")[:2] == (12, {(32, 48)})


@pytest.mark.parametrize(
    ("matrix", "corners"),  # (a, b, c, d), and where the four corners are then seen
    [
        ((1, 0, 0, 1), "ABCD"), ((-1, 0, 0, -1), "DCBA"), ((-1, 0, 0, 1), "BADC"), ((1, 0, 0, -1), "CDAB"),
        ((0, 1, -1, 0), "CADB"), ((0, -1, 1, 0), "BDAC"), ((0, 1, 1, 0), "ACBD"), ((0, -1, -1, 0), "DBCA"),
    ],
)  # fmt: skip
def test_a_video_is_turned_and_mirrored_as_players_do(tmp_path: Path, matrix: tuple[int, ...], corners: str) -> None:
    """By the matrix in its header, which maps (x, y) to (a x + c y, b x + d y)."""
    av = pytest.importorskip("av")
    image = np.kron(np.array([[10, 90], [170, 250]], np.uint8), np.ones((16, 24), np.uint8))  # A, B above C, D
    file = write_video(tmp_path / "a.mp4", 0)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.repeat(image[..., None], 3, -1))))
        container.mux(stream.encode())
    content = bytearray(file.read_bytes())
    start = content.index(b"tkhd") + 44
    a, b, c, d = (65536 * part for part in matrix)
    content[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    file.write_bytes(content)
    frame = decode(clips.Clip(file, 2), None, 6)
    assert frame.shape[:2] == ((32, 48) if matrix[0] else (48, 32))
    rows, columns = frame.shape[0] // 4, frame.shape[1] // 4
    seen = [frame[row, column, 0] for row in (rows, 3 * rows) for column in (columns, 3 * columns)]
    assert "".join("ABCD"[int((value - 10) / 80 + 0.5)] for value in map(float, seen)) == corners


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_video_that_is_cut_or_empty_is_refused(tmp_path: Path, suffix: str) -> None:
    av = pytest.importorskip("av")
    file = tmp_path / f"a{suffix}"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("gif" if suffix == ".gif" else "mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "rgb8" if suffix == ".gif" else "yuv420p"
        for frame in range(20):
            pixels = np.full((32, 48, 3), 10 * frame, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels).reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    content = file.read_bytes()
    assert len(clips.Clip(file, 8).parts()) == 8
    for part, said in ((content[: len(content) // 2], "cut|no video|no pictures"), (b"", "empty|its end is missing")):
        file.write_bytes(part)
        with pytest.raises(ValueError, match=said):
            clips.Clip(file, 8).parts()


def test_all_frames_of_a_clip_change_alike() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (8, 12, 12, 1), np.uint8)
    changed = augment_batch(np.repeat(frame, 5, -1), (12, 12), "crop", False, generator("x"))
    assert (changed == changed[..., :1]).all()
    assert not (changed[..., :1] == frame).all()


def answer_of(clip: np.ndarray) -> int:
    """The class of the digit that moves where a square rests, else of the one that rests: of all digits, the one that
    fits best to what moves by some step, or to what stays."""
    bunch = load_digits()
    tiles = np.zeros((len(bunch.target), 28, 28))
    tiles[:, :8, :8] = bunch.images * (255 / 16)
    frames = clip.astype(np.float64)
    still = np.minimum.reduce(frames, -1)
    square = np.fft.ifft2(np.fft.fft2(still == 255) * np.conj(np.fft.fft2(np.pad(np.ones((4, 4)), (0, 24))))).real.max()
    ways = moving.STEPS if square > 15.5 else np.zeros((1, 2), int)
    best = (-np.inf, -1)
    for step in ways:
        back = [np.roll(frames[..., frame], tuple(-frame * step), (0, 1)) for frame in range(8)]
        seen = np.minimum.reduce(back)  # a digit that moves so is whole in it, others are not
        inner = np.fft.ifft2(np.fft.fft2(seen) * np.conj(np.fft.fft2(tiles))).real.max((1, 2))
        distance = inner - (tiles**2).sum((1, 2)) / 2  # largest for the digit itself
        best = max(best, (float(distance.max()), int(bunch.target[distance.argmax()])))
    return best[1]


def test_the_generated_answer_is_the_digit_that_is_asked_for() -> None:
    found = moving.load()
    assert found.train.pixels.shape == (16_000, 28, 28, 8)
    assert np.bincount(found.train.labels).min() > 1_450
    right = [answer_of(clip) == label for clip, label in zip(found.test.pixels[:60], found.test.labels, strict=False)]
    assert np.mean(right) >= 0.95


def test_the_host_gets_frames_and_the_statistics_of_all() -> None:
    model = TASK.model(MiTA(m=(2, 2, 2), k=8), 0)
    (clip,) = TASK.example()
    assert clip.shape == (1, 1, 8, 28, 28)
    assert model(clip).shape == (1, 10)
    mean, std = TASK.statistics()
    assert len(mean) == 8
    assert len(set(mean)) == len(set(std)) == 1
    images, _ = moving.load().test.pixels[:1], None
    torch.testing.assert_close(
        clip[0, 0, 3], (torch.from_numpy(images[0, ..., 3].copy()).float() / 255 - mean[0]) / std[0]
    )
    assert model.blocks[0].attn.mixer.site.grid == regard.Grid(4, 4, depth=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frames": 0}, "frames is at least 1"),
        ({"frames": 4}, "moving_digits has 8 frames of 28x28, not 4 of 28x28"),
        ({"cut": True}, "cut and download are for images"),
        ({"data": "moving"}, "unknown data set 'moving'"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        dataclasses.replace(TASK, **fields).data_set()


def test_a_host_of_other_frames_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes 4 frames, the task has 8: make them equal"):
        dataclasses.replace(TASK, host="vit_desk_video(frames=4)").model(Softmax(), 0)
    with pytest.raises(ConfigError, match="8 frames cannot be cut into tubes of 3"):
        dataclasses.replace(TASK, host="vit_desk_video(tube=3)").model(Softmax(), 0)


@pytest.mark.parametrize("field", ["cutmix", "erasing"])
def test_what_changes_single_frames_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"has no {field}"):
        TASK.check(dataclasses.replace(Recipe(augment="none"), **{field: 0.5}))
    with pytest.raises(ConfigError, match="augment of --task video is one of none, flip"):
        TASK.check(Recipe(augment="timm"))


def own(folder: Path, **fields: Any) -> Video:
    return Video(host="vit_desk_video(patch=8, dim=16, depth=1)", data=str(folder), size=(16, 16), frames=4, **fields)


def test_clips_of_class_folders_are_divided_and_recognised(tmp_path: Path) -> None:
    task = own(write_set(tmp_path / "clips"))
    found = task.data_set()
    assert found.classes == ("bright", "dark")
    assert (len(found.train), len(found.test)) == (8, 2)
    assert found.train.pixels.shape[1:] == (18, 18, 12)
    key = task.identity().data
    assert key.startswith("own:of_each_class-")
    write_frames(tmp_path / "clips" / "dark" / "more", 6)
    assert task.identity().data != key


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write_set(tmp_path / "clips", 3)


def test_bad_clips_are_named_in_one_sentence(broken: Path) -> None:
    write_frames(broken / "dark" / "short", 1)
    with pytest.raises(DataError, match=r"short cannot be read as a clip \(it has 1 frame, 4 are taken; frames=1"):
        own(broken).data_set()
    report = check_data(str(broken), "video")
    assert report.warnings[0].endswith("short has one frame, in which nothing moves")
    assert "clips have fewer frames than the 8 of task.frames, at which a training stops" in report.problems[0]
    assert "clips have 1 to 6 frames, and as many of each are taken" in report.warnings[1]
    assert [row["frames"] for row in report.rows if row["split"] == "train"] == ["6", "1 to 6"]
    assert len(report.problems) == 1


def test_what_lies_in_a_wrong_place_is_named(broken: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_frames(broken / "dark" / "clip0" / "inner", 3)
    (broken / "dark" / "empty").mkdir()
    own(broken).data_set()
    assert "inner lies among the frames of a clip" in caplog.text
    assert "empty is empty" in caplog.text
    (broken / "stray.mp4").write_bytes(b"")
    with pytest.raises(DataError, match="stray.mp4 lies beside class folders"):
        clips.read_splits(broken)


def test_a_check_reads_every_frame_and_finds_copies(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_set(tmp_path / "clips" / split, 2)
    (tmp_path / "clips" / "train" / "dark" / "clip0" / "frame_3.png").write_bytes(b"no image")
    Image.new("RGB", (9, 9)).save(tmp_path / "clips" / "train" / "dark" / "clip1" / "frame_5.png")
    report = check_data(str(tmp_path / "clips"), "video")
    assert "frame_3.png cannot be read as an image" in report.problems[0]
    assert any("frames of" in text and "9x9 and 20x24" in text for text in report.warnings)
    assert sum("the same clip in" in text for text in report.warnings) == 2


def test_a_cut_video_is_damaged(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.mkv", 60)
    file.write_bytes(file.read_bytes()[: 2 * file.stat().st_size // 3])
    with pytest.raises(ValueError, match="of its 60 frames can be read: it is damaged, or cut"):
        clips.measure(file)


def test_a_name_like_an_address_asks_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        folder = Path(f"http:/127.0.0.1:{server.getsockname()[1]}")
        folder.mkdir(parents=True)
        write_video(tmp_path / "a.mp4", 4).rename(folder / "a.mp4")
        assert clips.measure(folder / "a.mp4")[0] == 4
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_host_of_images_takes_no_clips() -> None:
    with pytest.raises(ConfigError, match="does not take inputs of"):
        dataclasses.replace(TASK, host="vit_desk(size=28, patch=7)").model(Softmax(), 0)


def test_positions_are_resampled_within_frames() -> None:
    task = dataclasses.replace(TASK, host="vit_desk_video(dim=16, depth=1)")
    model = task.model(None, 0)
    before = model.pos_embed.detach().clone()
    model.set_input_size((28, 28))
    assert model.pos_embed.equal(before)
    model.set_input_size((42, 28))
    assert model(torch.randn(1, 1, 8, 42, 28)).shape == (1, 10)
    frames = model.pos_embed[0].unflatten(0, (8, 6, 4)).mean((1, 2))
    assert torch.allclose(frames, before[0].unflatten(0, (8, 4, 4)).mean((1, 2)), atol=0.05)


def test_a_damaged_video_is_named(broken: Path) -> None:
    pytest.importorskip("av")
    (broken / "dark" / "noise.mp4").write_bytes(b"no video" * 100)
    with pytest.raises(DataError, match="noise.mp4 cannot be read as a clip.*it is no video that PyAV reads"):
        own(broken).data_set()
    report = check_data(str(broken))  # recognised by the file
    assert report.kind == "video"
    assert "noise.mp4 cannot be read as a clip" in report.problems[0]
    (broken / "dark" / "noise.mp4").unlink()
    (broken / "dark" / "noise.mp4").symlink_to(broken / "gone.mp4")
    assert "noise.mp4 cannot be read as a clip" in check_data(str(broken), "video").problems[0]
    (broken / "dark" / "noise.mp4").unlink()
    (broken / "dark" / "noise.mp4").write_bytes(b"no video" * 100)
    with pytest.raises(DataError, match="no test image of class dark in .* can be read"):  # it is all of that part
        own(broken, corrupt="skip").data_set()


def test_frames_in_a_class_folder_are_refused(broken: Path) -> None:
    for frame in (broken / "dark" / "clip0").iterdir():
        frame.rename(broken / "dark" / frame.name)
    with pytest.raises(DataError, match="dark has frames itself; expected one folder for each class, and in it"):
        own(broken).data_set()


def test_from_a_folder_to_a_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "clips", 9)
    options = ["--set", "task.frames=4", "--size", "16x16", "--host", "vit_desk_video(patch=8, dim=16, depth=1)"]
    quick = ["--set", "recipe.epochs=30", "--set", "recipe.batch=4", "--set", "recipe.lr=1e-2"]
    assert command(["train", "Softmax()", "--task", "video", "--data", "clips", *options, *quick]) == 0
    (run,) = Path("results").glob("*/run.json")
    assert command(["predict", run.parent.name, "clips/dark", "clips/bright/clip4", "--out", "seen"]) == 0
    predictions = json.loads(Path("seen/predictions.json").read_text())
    assert [Path(one["file"]).name for one in predictions] == [*(f"clip{number}" for number in range(9)), "clip4"]
    assert [one["label"] for one in predictions] == ["dark"] * 9 + ["bright"]
    drawn = sorted(Path("seen").glob("*.png"))
    assert len(drawn) == 10
    assert Image.open(drawn[0]).width >= 4 * 16
    assert command(["maps", run.parent.name, "clips/dark/clip0", "--out", "maps.png"]) == 0
    assert Image.open("maps.png").width > 300
    assert command(["advise", run.parent.name, "--data", "clips", "--budget", "macs=0.95x", "--minutes", "0.2"]) == 0
    few = ["--steps", "1", "--output-steps", "0", "--images", "16", "--out", "taught"]
    assert command(["distill", run.parent.name, "--plan", "SKA()", "--data", "clips", *few]) == 0
    assert command(["predict", "taught", "clips/dark/clip0", "--out", "again"]) == 0
    write_set(tmp_path / "others", 2)
    for trained in (run.parent.name, "taught"):
        assert command(["eval", trained, "--data", "others"]) == 0
    once = ["--set", "recipe.epochs=1", "--set", "recipe.batch=4"]
    assert command(["finetune", run.parent.name, "--data", "clips", "--size", "24x16", *once]) == 0
