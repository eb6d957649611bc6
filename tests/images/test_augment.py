"""Windows of images: the ones that were asked for, and each possible one as often as any other."""

import random

import numpy as np
import pytest
from PIL import Image

from regard.core import ConfigError
from regard.images.augment import augment_batch, by_image, centre, check_augment, random_windows, transform, windows
from regard.images.streams import generator, seed_all

PIXELS = np.arange(4 * 6 * 9 * 2, dtype=np.uint16).reshape(4, 6, 9, 2)


def test_a_window_begins_at_its_corner() -> None:
    """Rows before columns, an own corner for each image."""
    top, left = np.array([0, 2, 1, 2]), np.array([5, 0, 3, 4])
    made = windows(PIXELS, top, left, (4, 3))
    assert made.shape == (4, 4, 3, 2)
    for i in range(4):
        assert np.array_equal(made[i], PIXELS[i, top[i] : top[i] + 4, left[i] : left[i] + 3])


def test_the_centre_is_in_the_middle_of_both_sides() -> None:
    assert np.array_equal(centre(PIXELS, (4, 3)), PIXELS[:, 1:5, 3:6])


def places(made: np.ndarray, whole: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """How often the window at (row, column) of `whole` was cut, counted by its first value."""
    rows, columns = whole.shape[0] - size[0] + 1, whole.shape[1] - size[1] + 1
    corner = {int(whole[y, x, 0]): (y, x) for y in range(rows) for x in range(columns)}
    counts = np.zeros((rows, columns), int)
    for window in made:
        y, x = corner[int(window[0, 0, 0])]
        assert np.array_equal(window, whole[y : y + size[0], x : x + size[1]])
        counts[y, x] += 1
    return counts


@pytest.mark.parametrize("size", [(4, 3), (6, 2), (1, 9)])
def test_every_window_is_cut_equally_often(size: tuple[int, int]) -> None:
    """The last row and column too; 400 expected a place, five deviations allowed."""
    whole = np.arange(6 * 9, dtype=np.uint8).reshape(6, 9, 1)
    number = 400 * (7 - size[0]) * (10 - size[1])
    counts = places(random_windows(np.repeat(whole[None], number, 0), size, generator("windows")), whole, size)
    assert np.abs(counts - 400).max() <= 5 * 20


def test_training_cuts_larger_images_anywhere_and_the_test_in_the_middle() -> None:
    whole = np.arange(6 * 9, dtype=np.uint8).reshape(6, 9, 1)
    many = np.repeat(whole[None], 500, 0)
    made = augment_batch(many, (5, 7), "crop", False, generator("cut"))
    kept = made[made[:, 0, 0, 0] < made[:, 0, 1, 0]]  # those that were not mirrored
    assert 150 < len(kept) < 350
    assert (places(kept, whole, (5, 7)) > 0).all()
    assert np.array_equal(augment_batch(many, (4, 3), "none", False, generator("cut")), centre(many, (4, 3)))


def test_padding_is_zero_on_all_sides() -> None:
    """Padding 4 and a window of the old size: a shift by -4 .. 4 in each direction, zeros where the image ends."""
    images = np.full((3000, 5, 6, 1), 255, np.uint8)
    filled = augment_batch(images, (5, 6), "crop", False, generator("pad")).mean((0, 3)) / 255
    rows = [sum(0 <= y + shift < 5 for shift in range(-4, 5)) / 9 for y in range(5)]
    columns = [sum(0 <= x + shift < 6 for shift in range(-4, 5)) / 9 for x in range(6)]
    assert np.abs(filled - np.outer(rows, columns)).max() < 0.05


def test_pad_shifts_and_never_mirrors() -> None:
    """Columns that rise from left to right go on rising wherever the image is."""
    images = np.tile(np.arange(10, 22, dtype=np.uint8)[None, None, :, None], (200, 9, 1, 1))
    made = augment_batch(images, (9, 12), "pad", False, generator("pad")).astype(int)[..., 0]
    inside = (made[:, :, 1:] > 0) & (made[:, :, :-1] > 0)
    assert (np.diff(made, axis=2)[inside] == 1).all()
    assert not np.array_equal(made[0], made[1])
    assert (
        np.diff(augment_batch(images, (9, 12), "crop", False, generator("pad")).astype(int)[..., 0], axis=2) == -1
    ).any()


@pytest.mark.parametrize(("name", "mirrors"), [("randaugment+crop", True), ("randaugment+pad", False)])
def test_torchvisions_policy_ends_in_a_crop(name: str, mirrors: bool) -> None:
    """The right half stays the lighter one, but for a rare far shift, until half of the images are mirrored."""
    pixels = np.zeros((16, 20, 3), np.uint8)
    pixels[:, 10:] = 200
    change = transform(name, (16, 20), 3)
    assert ("RandomHorizontalFlip" in str(change)) == mirrors
    assert str(change).index("RandAugment") < str(change).index("RandomCrop")
    made = []
    for seed in (0, 0, *range(1, 40)):
        seed_all("test", seed)
        made.append(change(Image.fromarray(pixels)).numpy())
    assert made[0].shape == (3, 16, 20)
    assert made[0].dtype == np.uint8
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])
    lighter = sum(image[:, :, 10:].mean() > image[:, :, :10].mean() for image in made[1:])
    assert 10 < lighter < 30 if mirrors else lighter > 35


def test_augmentations_that_go_image_by_image() -> None:
    names = ["crop", "pad", "randaugment+pad", "timm", "timm:3a"]
    assert [name for name in names if by_image(name)] == names[2:]
    with pytest.raises(ConfigError, match=r"randaugment\+crop"):
        check_augment("randaugment+crops")


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m3-w3", "original", "v0", "3a"])
def test_policies_take_grey_images(policy: str) -> None:
    random.seed(0)
    augment = transform(f"timm:{policy}", (28, 28), 1)
    for number in range(100):
        pixels = np.random.default_rng(number).integers(0, 256, (28, 28), np.uint8)
        assert augment(Image.fromarray(pixels)).shape == (1, 28, 28)


@pytest.mark.parametrize("policy", ["rand-xx", "rand-mnine", "rand-m9-inc"])
def test_a_section_without_a_number_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"timm does not know the policy of augment='timm:{policy}'"):
        transform(f"timm:{policy}", (8, 8), 3)


def test_the_policy_of_papers_augments_any_image() -> None:
    """timm asks Pillow for no bits now and then, which Pillow 13 refuses: pyproject.toml asks for Pillow < 13."""
    random.seed(0)
    augment = transform("timm:rand-m9-mstd0.5-inc1", (8, 8), 3)
    image = Image.new("RGB", (8, 8), (9, 99, 200))
    for _ in range(1000):
        assert augment(image).shape == (3, 8, 8)
