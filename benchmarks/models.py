"""Whole models with swapped attention beside the models as they were: time and peak memory, default settings.

`python benchmarks/models.py --rounds 7 --models vit_tiny_patch16_224,512,1 --mixer 'MiTA(m=25, k=25)'`
`python benchmarks/models.py --models VJEPA2Model,256,1,64 --blocks 2 --mixer 'MiTA(m=(8, 4, 4), k=128)'`
`python benchmarks/models.py --models 'samvit_base_patch16(depth=2, global_attn_indexes=(0, 1)),1024,1'`
Models are timm's, also with options, or models of clips or volumes with random weights (`video_model`), whose case ends
with the frames of a clip or the slices of a volume.
The two models take turns; a ratio is of medians of CPU time in one thread, of prediction (without gradients) and of
training (forward and backward, without the optimizer). Peaks are of one pass above what the process holds before, each
in a fresh process whose allocator returns memory at once; they need Linux. For times the allocator is as it is.
"""

import argparse
import os
import re
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
CASE = re.compile(r"(.+?),(\d+),(\d+)(?:,(\d+))?")
"""Model, size, images, and frames of a clip."""
MODELS = ("vit_small_patch16_224,224,2", "vit_tiny_patch16_224,512,1", "vit_tiny_patch16_224,768,1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds after one warm-up")
    parser.add_argument("--models", nargs="+", default=MODELS, help="model,size,images or clips[,frames]")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of a video model; 0 = as many as it has")
    parser.add_argument("--mixer", default="MiTA(m=25, k=25)", help="the spelling of a mechanism")
    options = parser.parse_args(arguments)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
    import torch

    from regard.measure.bench import conditions

    print(f"{options.mixer}, torch {torch.__version__}, one thread; {'; '.join(conditions())}")
    print(f"{'model':<24} {'size':>5} {'images':>6} {'predict':>8} {'train':>7} {'memory':>7} {'train':>7}")
    for case in options.models:
        name, size, images, *frames = CASE.fullmatch(case).groups()  # type: ignore[union-attr]
        frames = [number for number in frames if number]
        arrange, clip = (name, int(size), int(images)), (int(frames[0]), options.blocks) if frames else ()
        runs = {mixer: build(*arrange, mixer, *clip) for mixer in ("", options.mixer)}
        times, _ = in_turns({mixer: run for mixer, (run, _) in runs.items()}, [], options.rounds)
        ratios = [times[options.mixer, part] / times["", part] for part in ("f", "fb")]
        peaks = {
            (mixer, trained): in_fresh_process(peak, *arrange, mixer, trained, *clip, **RETURNING)
            for mixer in runs
            for trained in (False, True)
        }
        memory = [peaks[options.mixer, trained] / peaks["", trained] for trained in (False, True)]
        numbers = " ".join(f"{ratio:>7.3f}" for ratio in (*ratios, *memory))
        label = f"{name} {frames[0]} frames" if frames else name.partition("(")[0]
        print(f"{label:<24} {size:>5} {images:>6}  {numbers}  {verdict(ratios, goals('models').get(f'{name},{size}'))}")
    print("ratios to the model as it was: time, then peak memory")
    return 0


def build(
    name: str, size: int, images: int, mixer: str, frames: int = 0, blocks: int = 0
) -> "tuple[Callable[[], torch.Tensor], torch.nn.Module]":
    """A pass over random images, and its model; mixer: "" for the model as it is. frames: of clips, 0 = images."""
    import torch

    from regard import create_model, swap
    from regard.measure.bench_model import output_tensor

    torch.manual_seed(0)
    if frames:
        model, x = video_model(name, size, frames, blocks), torch.randn(images, *clip_shape(name, size, frames))
    else:
        model, x = create_model(name, img_size=size, num_classes=10), torch.randn(images, 3, size, size)
    if mixer:
        swap(model, mixer, example=x[:1])

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return output_tensor(model(x))

    return run, model


def video_model(kind: str, size: int, frames: int, blocks: int) -> "torch.nn.Module":
    """A model of clips or volumes with random weights and no dropout: VideoMAEModel, VivitModel, TimesformerModel or
    the encoder of VJEPA2Model; torchvision:swin3d_t, torchvision:mvit_v2_s; monai:ViT, monai:UNETR, monai:SwinUNETR."""
    library, _, name = kind.rpartition(":")
    if library == "torchvision":
        from torchvision.models import get_model

        return get_model(name, weights=None).eval()
    if library == "monai":
        from monai.networks import nets

        sides = {} if name == "SwinUNETR" else {"img_size": (frames, size, size)}
        more = {"patch_size": 16} if name == "ViT" else {"out_channels": 2}
        return getattr(nets, name)(in_channels=1, **sides, **more).eval()
    import transformers

    architecture = getattr(transformers, kind)
    lengths = {name: frames for name in ("num_frames", "frames_per_clip")}
    options = {"image_size": size, "crop_size": size, **({"num_hidden_layers": blocks} if blocks else {})}
    model = architecture(architecture.config_class(**lengths, **options)).eval()
    return getattr(model, "encoder", model) if kind == "VJEPA2Model" else model


def clip_shape(kind: str, size: int, frames: int) -> tuple[int, ...]:
    """Of one clip or volume, as the model's library orders its axes."""
    first = {"torchvision": (3, frames), "monai": (1, frames)}.get(kind.rpartition(":")[0], (frames, 3))
    return *first, size, size


def peak(name: str, size: int, images: int, mixer: str, trained: bool, frames: int = 0, blocks: int = 0) -> float:
    """Bytes that a pass adds at its peak, after one that warms up."""
    import torch

    run, _ = build(name, size, images, mixer, frames, blocks)

    def once() -> None:
        with torch.set_grad_enabled(trained):
            out = run()
        if trained:
            out.sum().backward()

    once()
    return peak_growth(once)


if __name__ == "__main__":
    sys.exit(main())
