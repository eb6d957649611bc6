"""Images and targets: one size, flips, scales, and batches that depend on seed and number only."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from regard.core import DataError
from regard.lab.tasks.detection import data
from regard.lab.tasks.detection.feed import (
    Batches,
    Split,
    canvas,
    fitted_size,
    read_pixels,
    reflect,
    resize_image,
    scale_batch,
)
from regard.lab.tasks.detection.scenes import Scene
from small_scenes import SIZE, coco_folder


@pytest.fixture
def scenes(tmp_path: Path, own_cache: Path) -> list[Scene]:
    return list(data.load(str(coco_folder(tmp_path / "own", masks=True)), True, "stop").splits["train"])


def test_fit_keeps_the_shape_and_stretch_does_not() -> None:
    assert fitted_size((480, 640), (192, 256), "stretch") == (192, 256)
    assert fitted_size((480, 640), (256, 256), "fit") == (192, 256)
    assert fitted_size((640, 480), (256, 256), "fit") == (256, 192)
    pixels = np.full((20, 40, 3), 9, np.uint8)
    assert resize_image(pixels, (40, 40), "stretch").min() == 9
    padded = resize_image(pixels, (40, 40), "fit")
    assert padded[:20].min() == 9
    assert padded[20:].max() == 0


@pytest.mark.parametrize("original", [(480, 640), (640, 480), (427, 640), (640, 427), (300, 1200), (1200, 300)])
def test_sides_are_those_of_torchvision(original: tuple[int, int]) -> None:
    """The size inside the tensor, in either orientation, but for rounding."""
    theirs = GeneralizedRCNNTransform(800, 1333, [0.0] * 3, [1.0] * 3)
    expected, _ = theirs([torch.zeros(3, *original)])
    found = fitted_size(original, (800, 1333), "sides")
    assert max(abs(a - b) for a, b in zip(found, expected.image_sizes[0], strict=True)) <= 1
    assert canvas(original, (800, 1333), "sides") == tuple(-(-side // 32) * 32 for side in found)


@pytest.mark.parametrize("resize", ["stretch", "fit"])
def test_boxes_and_masks_fit_the_resized_image(scenes: list[Scene], resize: str) -> None:
    split = Split(scenes, (96, 96), 3, resize)
    image, target, inside = split.item(4)
    assert image.shape == (3, 96, 96)
    assert inside == ((72, 96) if resize == "fit" else (96, 96))
    assert target["masks"].shape == (4, 96, 96)
    for box, mask, label in zip(target["boxes"], target["masks"], target["labels"], strict=True):
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        tight = torch.tensor([columns[0, 0], rows[0, 0], columns[-1, 0] + 1, rows[-1, 0] + 1]).float()
        assert (tight - box).abs().max() <= 1
        centre = (box[:2] + box[2:]) / 2
        grey = image[:, int(centre[1]), int(centre[0])].float().mean()
        others = [other for other in target["masks"] if other is not mask and other[int(centre[1]), int(centre[0])]]
        assert others or (grey > 200 if label == 1 else grey < 50)


def test_a_batch_of_both_orientations_has_the_size_of_its_largest_images(scenes: list[Scene]) -> None:
    """Pixels, boxes and masks are those of each image alone."""
    upright = [replace(scene, source=np.rot90(read_pixels(scene, 3)).copy(), size=SIZE[::-1], objects=scenes[0].objects)
               for scene in scenes[2:4]]  # fmt: skip
    split = Split([*scenes[4:6], *upright], (90, 120), 3, "sides")
    images, targets, insides = Batches(split, 4, "none", 0)[0]
    parts = [Batches(split, 4, "none", 0, part=(index, 4))[0] for index in range(4)]
    assert torch.equal(torch.cat([part[0] for part in parts]), images)
    assert images.shape == (4, 3, 128, 128)
    assert sorted(insides) == [(90, 120), (90, 120), (120, 90), (120, 90)]
    alone = {tuple(inside): [] for inside in insides}
    for row in range(4):
        image, target, inside = split.item(row)
        assert image.shape[1:] == ((96, 128) if row < 2 else (128, 96))
        alone[inside].append((image, target))
    for image, target, inside in zip(images, targets, insides, strict=True):
        height, width = inside
        assert target["masks"].shape[1:] == (128, 128)
        assert image[:, height:].max() == 0
        assert image[:, :, width:].max() == 0
        assert any(
            torch.equal(image[:, :height, :width], one[:, :height, :width])
            and torch.equal(target["boxes"], other["boxes"])
            and torch.equal(target["masks"][:, :height, :width], other["masks"][:, :height, :width])
            for one, other in alone[inside]
        )


def test_an_image_without_objects_has_an_empty_target(scenes: list[Scene]) -> None:
    _, target, _ = Split(scenes, (64, 64), 3).item(0)
    assert {name: tuple(value.shape) for name, value in target.items()} == {
        "boxes": (0, 4), "labels": (0,), "masks": (0, 64, 64),
    }  # fmt: skip


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_flip_moves_boxes_with_their_pixels_and_twice_is_nothing(scenes: list[Scene], axis: int) -> None:
    image, target, inside = Split(scenes, (96, 96), 3, "fit").item(3)
    once, changed = reflect(image, target, inside, axis)
    for box, mask in zip(changed["boxes"], changed["masks"], strict=True):
        assert mask[int((box[1] + box[3]) / 2), int((box[0] + box[2]) / 2)] == 1
    assert not torch.equal(changed["boxes"], target["boxes"])
    assert once[:, inside[0] :].max() == 0
    twice, same = reflect(once, changed, inside, axis)
    assert torch.equal(twice, image)
    torch.testing.assert_close(same["boxes"], target["boxes"])
    assert torch.equal(same["masks"], target["masks"])


def test_another_scale_changes_image_boxes_and_masks(scenes: list[Scene]) -> None:
    batch = Batches(Split(scenes, (96, 128), 3), 3, "none", 0)[0]
    images, targets, sizes = scale_batch(batch, 0.7)
    assert images.shape[-2:] == (64, 96)
    assert sizes == [(64, 96)] * 3
    for one, other in zip(targets, batch[1], strict=True):
        torch.testing.assert_close(one["boxes"], other["boxes"] * torch.tensor([96 / 128, 64 / 96] * 2))
        assert one["masks"].shape[1:] == (64, 96)


def test_batches_are_functions_of_seed_and_number(scenes: list[Scene]) -> None:
    split = Split(scenes, (64, 64), 3)
    made = [Batches(split, 2, "flips", 5, (0.5, 1.0)) for _ in range(2)]
    forward = [made[0][step] for step in range(6)]
    backward = [made[1][step] for step in reversed(range(6))][::-1]
    for one, other in zip(forward, backward, strict=True):
        assert torch.equal(one[0], other[0])
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(one[1], other[1], strict=True))
    assert {tuple(batch[0].shape[-2:]) for batch in forward} == {(32, 32), (64, 64)}
    parts = [Batches(split, 2, "flips", 5, (0.5, 1.0), part=(index, 2)) for index in range(2)]
    assert all(torch.equal(torch.cat([part[n][0] for part in parts]), batch[0]) for n, batch in enumerate(forward))
    other = Batches(split, 2, "flips", 6, (0.5, 1.0))
    assert any(not torch.equal(forward[step][0], other[step][0]) for step in range(6))


def test_decoded_images_are_cached_and_equal(scenes: list[Scene], own_cache: Path) -> None:
    fresh, kept = Split(scenes, SIZE, 3), Split(scenes, SIZE, 3, key="test")
    assert all(np.array_equal(fresh.pixels(row), kept.pixels(row)) for row in range(len(scenes)))
    assert list(own_cache.rglob("detection-test-*.npy"))


def test_damaged_images_and_wrong_sizes_are_named(scenes: list[Scene]) -> None:
    file = Path(str(scenes[2].source))
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match=r"3\.png cannot be read as an image .*corrupt"):
        read_pixels(scenes[2], 3)
    other = Scene(scenes[1].name, scenes[1].source, (48, 65), scenes[1].objects, 2)
    with pytest.raises(DataError, match="has 64x48 pixels .*annotation says 65x48"):
        read_pixels(other, 3)
