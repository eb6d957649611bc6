"""What Regard does without the extra `lab`. `make release` runs it where only the base dependencies are installed,
tests/test_base_install.py where the packages of `lab` are hidden."""

import contextlib
import io
import tempfile
from pathlib import Path

WORKS = (
    "--help", "--version", "list", "list hosts", "list studies", "list data", "card MiTA",
    "cost host SKA MiTA --host vit_desk", "bench Softmax SKA --grid 4x4 --dim 8 --seconds 0.001",
    "swap-check vit_desk SKA", "advise vit_desk --mixers SKA --seconds 0.001 --batch 1",
    "advise --tokens 4096 --dim 384", "taxonomy", "taxonomy --svg table.svg", "maps vit_desk photos/0.png",
    "swap-check saved SKA --data photos --images 16",
    "advise saved --data photos --images 16 --minutes 0.02 --mixers None --budget macs=0.999x",
    "distill saved --plan SKA --data photos --images 16 --steps 2 --output-steps 1",
    "maps distilled photos/1.png",
)  # fmt: skip
NEEDS_LAB = (
    "train SKA --data digits --set recipe.epochs=1", "study run quickstart --scale smoke --seeds 1 --workers 0",
    "maps vit_desk flower",
)  # fmt: skip
LAB_NAMES = ("regard.lab.Results('results').frame()",)


def output(command: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    from regard.cli.app import run

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run(command.split())
    return code, out.getvalue(), errors.getvalue()


def swapped() -> None:
    """A model of timm with another mechanism, forward and backward, and traced as a whole by `torch.compile`."""
    import torch

    from regard import MiTA, create_model, restore, swap

    model = create_model("deit_tiny_patch16_224", None, img_size=64).eval()
    images = torch.randn(2, 3, 64, 64)
    plain = model(images)
    swap(model, MiTA(m=4, k=4))
    out = model(images)
    out.sum().backward()
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")  # which needs no compiler
    if not torch.allclose(traced(images), out, atol=1e-4):
        raise SystemExit("torch.compile: other logits")
    restore(model)
    if not torch.equal(model(images), plain):
        raise SystemExit("restore: other logits")


def written() -> None:
    """A folder of images, and a saved model."""
    import numpy as np
    from PIL import Image

    from regard import create_model, save

    Path("photos").mkdir()
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save(f"photos/{number}.png")
    save(create_model("vit_desk", None, size=32), "saved")


def every_name() -> None:
    """All public names, also by `from regard import *`, and one operator."""
    import torch

    names: dict[str, object] = {}
    exec("from regard import *", names)
    import regard

    if lost := set(regard.__all__) - names.keys():
        raise SystemExit(f"missing names: {sorted(lost)}")
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    if not torch.isfinite(regard.ops.softmax(q, k, v)).all():
        raise SystemExit("operator: not finite")


def main() -> None:
    """Check everything in an empty folder. Raises: SystemExit with what is wrong."""
    import regard.lab

    every_name()
    swapped()
    written()
    Path("results").mkdir()
    for command in WORKS:
        code, _, errors = output(command)
        if code != 0:
            raise SystemExit(f"regard {command}: exit {code}: {errors}")
    for command in NEEDS_LAB:
        code, _, errors = output(command)
        lines = [line for line in errors.splitlines() if line.startswith("regard: ")]
        if code != 2 or len(lines) != 1 or "pip install 'regard[lab]'" not in lines[0] or "Traceback" in errors:
            raise SystemExit(f"regard {command}: exit {code}: {errors}")
    for name in LAB_NAMES:
        try:
            eval(name, {"regard": regard})
        except regard.RegardError as error:
            if "pip install 'regard[lab]'" in str(error):
                continue
            raise
        raise SystemExit(f"{name} needs no extra")
    print(f"{len(WORKS)} commands work, {len(NEEDS_LAB)} name the extra")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        main()
