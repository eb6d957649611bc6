"""Images per second of one core that decodes and augments: Regard's feeds beside a bare loader of timm.

python benchmarks/loading.py --images 256
Writes JPEG files of 500x375 pixels into a temporary folder, and again as a stream of eight archives. A loader has one
worker process and timm's training transform at 224x224; the turns alternate, and the medians are compared.
"""

import argparse
import io
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image

from regard.images.augment import transform
from regard.images.feed import Batches
from regard.images.imagenet import OriginalSizes
from regard.images.images import Images
from regard.images.rows import Paths
from regard.lab.data.streamed.feed import Stream, StreamBatches
from regard.lab.data.streamed.load import splits

SIZE, BATCH = (224, 224), 32
SHARDS = 8


def write(folder: Path, count: int) -> list[Path]:
    """JPEG files of smooth noise, in two class folders."""
    rng, files = np.random.default_rng(0), []
    for number in range(count):
        file = folder / str(number % 2) / f"{number:05d}.jpg"
        file.parent.mkdir(exist_ok=True)
        small = Image.fromarray(rng.integers(0, 255, (47, 63, 3), np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(file, quality=90)
        files.append(file)
    return files


def stream_of(files: list[Path], folder: Path) -> Stream:
    """The same files in archives of WebDataset."""
    folder.mkdir()
    for split, parts in (("train", np.array_split(np.arange(len(files)), SHARDS)), ("test", [np.arange(2)])):
        for number, part in enumerate(parts):
            with tarfile.open(folder / f"{split}-{number}.tar", "w") as archive:
                for row in part.tolist():
                    archive.add(files[row], f"{row}.jpg")
                    label = tarfile.TarInfo(f"{row}.cls")
                    label.size = 1
                    archive.addfile(label, io.BytesIO(str(row % 2).encode()))
    return Stream.of(splits(f"stream:{folder}")[1]["train"], 2, (256, 256))


def seconds(batches: Iterable[object]) -> float:
    """Of all batches after the first, which waits for the start of the worker."""
    started = 0.0
    for number, _ in enumerate(batches):
        if number == 0:
            started = time.perf_counter()
    return time.perf_counter() - started


def main() -> None:
    """Print images per second of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        files = write(Path(name), options.images)
        paths = Paths.of(files)
        images = Images(OriginalSizes(paths, paths, (256, 256)), np.arange(len(files)) % 2)
        steps = len(files) // BATCH
        policy = "timm"
        feed = Batches(images, SIZE, BATCH, policy, 0, transform=transform(policy, SIZE, 3))
        stream = StreamBatches(
            stream_of(files, Path(other) / "shards"), SIZE, BATCH, policy, 0, transform(policy, SIZE, 3)
        )
        dataset = timm.data.create_dataset("", name)
        loader = timm.data.create_loader(
            dataset, (3, *SIZE), BATCH, is_training=True, num_workers=1,
            use_prefetcher=False, persistent_workers=False, device=torch.device("cpu"), pin_memory=False,
        )  # fmt: skip
        times: dict[str, list[float]] = {"regard": [], "stream": [], "timm": []}
        for _ in range(options.turns):
            times["regard"].append(seconds(feed.between(0, steps, workers=1)))
            times["stream"].append(seconds(stream.between(0, steps, workers=1)))
            times["timm"].append(seconds(loader))
    counted = (steps - 1) * BATCH
    rates = {name: counted / statistics.median(values) for name, values in times.items()}
    print(f"{platform.machine()}, torch {torch.__version__}, timm {timm.__version__}, {options.turns} turns")
    for name, values in times.items():
        spread = ", ".join(f"{counted / value:.0f}" for value in values)
        print(f"{name}: {rates[name]:.1f} images/s per core ({spread})")
    print(f"ratio {rates['regard'] / rates['timm']:.3f}, of the stream {rates['stream'] / rates['timm']:.3f}")


if __name__ == "__main__":
    main()
