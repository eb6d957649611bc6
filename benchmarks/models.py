"""Whole models of timm with swapped attention beside the models as they were: time and peak memory, default settings.

`python benchmarks/models.py --rounds 7 --models vit_tiny_patch16_224,512,1 --mixer 'MiTA(m=25, k=25)'`
The two models take turns; a ratio is of medians of CPU time in one thread, of prediction (without gradients) and of
training (forward and backward, without the optimizer). Peaks are of one pass above what the process holds before, each
in a fresh process whose allocator returns memory at once; they need Linux. For times the allocator is as it is.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from goals import goals, verdict
from peaks import in_fresh_process, peak_growth
from turns import in_turns

if TYPE_CHECKING:
    import torch

RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""An allocator that returns memory at once, so that a pass before does not hide the memory of the next."""
MODELS = ("vit_small_patch16_224,224,2", "vit_tiny_patch16_224,512,1", "vit_tiny_patch16_224,768,1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds after one warm-up")
    parser.add_argument("--models", nargs="+", default=MODELS, help="model,size of images,images")
    parser.add_argument("--mixer", default="MiTA(m=25, k=25)", help="the spelling of a mechanism")
    options = parser.parse_args(arguments)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    import torch

    from regard.measure.bench import conditions

    print(f"{options.mixer}, torch {torch.__version__}, one thread; {'; '.join(conditions())}")
    print(f"{'model':<24} {'size':>5} {'images':>6} {'predict':>8} {'train':>7} {'memory':>7} {'train':>7}")
    for case in options.models:
        name, size, images = case.split(",")
        arrange = (name, int(size), int(images))
        runs = {mixer: build(*arrange, mixer) for mixer in ("", options.mixer)}
        times, _ = in_turns({mixer: run for mixer, (run, _) in runs.items()}, [], options.rounds)
        ratios = [times[options.mixer, part] / times["", part] for part in ("f", "fb")]
        peaks = {
            (mixer, trained): in_fresh_process(peak, *arrange, mixer, trained, **RETURNING)
            for mixer in runs
            for trained in (False, True)
        }
        memory = [peaks[options.mixer, trained] / peaks["", trained] for trained in (False, True)]
        numbers = " ".join(f"{ratio:>7.3f}" for ratio in (*ratios, *memory))
        print(f"{name:<24} {size:>5} {images:>6}  {numbers}  {verdict(ratios, goals('models').get(f'{name},{size}'))}")
    print("ratios to the model as it was: time, then peak memory")
    return 0


def build(name: str, size: int, images: int, mixer: str) -> "tuple[Callable[[], torch.Tensor], torch.nn.Module]":
    """A pass over random images, and its model; mixer: "" for the model as it is."""
    import timm
    import torch

    from regard import swap

    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, num_classes=10)
    if mixer:
        swap(model, mixer)
    x = torch.randn(images, 3, size, size)

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return model(x)

    return run, model


def peak(name: str, size: int, images: int, mixer: str, trained: bool) -> float:
    """Bytes that a pass adds at its peak, after one that warms up."""
    import torch

    run, _ = build(name, size, images, mixer)

    def once() -> None:
        with torch.set_grad_enabled(trained):
            out = run()
        if trained:
            out.sum().backward()

    once()
    return peak_growth(once)


if __name__ == "__main__":
    sys.exit(main())
