"""Decoded images on disk."""

import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from regard.images.images import Images, load_or_make, mean_and_deviation


def test_a_full_disk_leaves_nothing_in_the_cache(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the size of files stands for the full disk."""
    made = Images(np.zeros((100, 8, 8, 3), np.uint8), np.zeros(100, np.int64))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        found = load_or_make("full", lambda: made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found is made
    assert "decoded images are not cached" in caplog.text
    assert not [path for path in own_cache.rglob("*") if path.is_file()]
    assert (load_or_make("full", lambda: made).pixels == made.pixels).all()
    assert len([path for path in own_cache.rglob("*") if path.is_file()]) == 2


@pytest.mark.parametrize("ending", ["pixels.npy", "labels.npy"])
def test_one_changed_bit_is_noticed_and_the_images_are_made_again(
    own_cache: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    made = Images(np.arange(192, dtype=np.uint8).reshape(4, 4, 4, 3), np.arange(4))
    load_or_make("bits", lambda: made)
    (file,) = own_cache.rglob(f"*.{ending}")
    content = bytearray(file.read_bytes())
    content[140] ^= 1
    file.write_bytes(content)
    found = load_or_make("bits", lambda: made)
    np.testing.assert_array_equal(found.pixels, made.pixels)
    np.testing.assert_array_equal(found.labels, made.labels)
    assert "is damaged or of another set, and is made again" in caplog.text
    load_or_make("bits", lambda: pytest.fail("whole files are read"))


def test_the_file_of_another_set_is_not_read(own_cache: Path) -> None:
    first, second = (Images(np.full((4, 4, 4, 3), value, np.uint8), np.arange(4)) for value in (1, 2))
    load_or_make("first", lambda: first)
    load_or_make("second", lambda: second)
    (source,), (target,) = own_cache.rglob("second*.pixels.npy"), own_cache.rglob("first*.pixels.npy")
    shutil.copy(source, target)
    assert (load_or_make("first", lambda: first).pixels == 1).all()


def test_mean_and_deviation_count_values_block_by_block() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 5, 6, 3), np.uint8)
    mean, std = mean_and_deviation(pixels[start : start + 8] for start in range(0, 37, 8))
    values = pixels.astype(np.float32) / 255
    np.testing.assert_allclose(mean, values.mean((0, 1, 2), dtype=np.float64), rtol=0, atol=1e-12)
    np.testing.assert_allclose(std, values.std((0, 1, 2), dtype=np.float64), rtol=0, atol=1e-12)
    assert mean_and_deviation([np.full((2, 2, 1), 7, np.uint8)])[1] == [1e-3]
