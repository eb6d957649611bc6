"""Parts of `gpu.py` that are about whole layers and models: every mechanism on the GPU beside the CPU, and memory."""

import copy
from typing import Any

from gpu_kernels import Result, Setting

ROUNDING = {"float64": 1e-9, "float32": 2e-4}
"""Largest difference to outputs and gradients of the CPU in float64, relative to the largest value or 1."""


def check_mechanisms(setting: Setting) -> Result:
    """Every mechanism as a layer: outputs and gradients beside the CPU's in float64; under bf16 autocast, finite.

    A mechanism that chooses tokens may choose others in float32 where two scores are nearly equal: then nine tokens of
    ten must be equal.
    """
    import torch

    from regard.core import RegardError
    from regard.mixers import MIXERS
    from regard.mixers.spelling import parse, spell

    torch.backends.cudnn.allow_tf32 = False  # convolutions in float32 are rounded to 10 bits by default
    notes, right = [], 0
    for cls in MIXERS:
        for text in cls.samples or (f"{cls.__name__}()",):
            config = parse(text)
            try:
                problems = _problems(config, setting.device)
            except RegardError as error:
                problems = [f"{type(error).__name__}: {error}"]
            right += not problems
            notes += [f"{spell(config)}: {problem} WRONG" for problem in problems]
    return Result([*notes, f"{right} spellings of {len(MIXERS)} mechanisms are as on the CPU"], [])


def _problems(config: Any, device: str) -> list[str]:
    import torch

    from regard.core import ConfigError, Grid, GridError, Site
    from regard.testing.subject import perturb

    for grid in (Grid(6, 4, 1), Grid(4, 4), Grid(9, 7, 1), Grid(8, 8)):
        torch.manual_seed(0)
        try:
            layer = perturb(config.build(Site(32, 2, grid)))
            x = torch.randn(3, grid.tokens, 32).double()
            expected = _run(layer, x, grid)
            break
        except (ConfigError, GridError) as error:
            refusal = error
    else:
        return [f"refuses every grid: {refusal}"]
    problems = []
    for name, allowed in ROUNDING.items():
        dtype = getattr(torch, name)
        there = copy.deepcopy(layer).to(device, dtype)
        found = _run(there, x.to(device, dtype), grid)
        if name == "float32" and 0.9 < _share_close(found[0], expected[0], allowed) < 1.0:
            continue  # a near tie of scores: gradients are those of other keys
        for label, one, other in zip(("output", "gradient of the input", "weights"), found, expected, strict=True):
            if not (worst := _difference(one, other)) <= allowed:
                problems.append(f"{name} {label} differs by {worst:.1e} on {grid}")
    there = copy.deepcopy(layer).to(device, torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out, *gradients = _run(there, x.to(device, torch.float32), grid)
    if not all(torch.isfinite(value).all() for value in (out, *gradients)):
        problems.append(f"not finite under bfloat16 autocast on {grid}")
    elif (worst := (out.double().cpu() - expected[0]).norm() / expected[0].norm()) > 0.2:
        problems.append(f"bfloat16 autocast output differs by {worst:.1e} on {grid}")
    return problems


def _run(layer: Any, x: Any, grid: Any) -> list[Any]:
    """Output, gradient of the input, gradients of all parameters as one vector."""
    import torch

    x = x.detach().requires_grad_()
    out = layer(x, grid)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape).to(out.dtype)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((out * weight).sum(), [x, *parameters], allow_unused=True)
    flat = [g.double().flatten().cpu() for g in gradients[1:] if g is not None]
    return [out.detach(), gradients[0], torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)]


def _share_close(one: Any, other: Any, allowed: float) -> float:
    """The share of tokens whose output is as expected."""
    close = (one.double().cpu() - other).abs().amax(-1) <= allowed * other.abs().max().clamp_min(1.0)
    return close.double().mean().item()


def _difference(one: Any, other: Any) -> float:
    return ((one.double().cpu() - other).abs().max() / other.abs().max().clamp_min(1.0)).item()


def check_compiled(setting: Setting) -> Result:
    """`torch.compile(fullgraph=True)` of a swapped ViT: logits and gradients as without, forward and backward."""
    import torch

    from regard import create_model
    from regard.mixers.spelling import parse

    names = ["Softmax()", "SKA()"]
    if not setting.small:
        names += [
            "MiTA(m=16, k=16)",
            "TopK(k=16)",
            "Factors(terms='1111')",
            "Agent(m=16)",
            "CSKA()",
            "BRA()",
            "Window()",
        ]
    notes = []
    for name in names:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = (
            create_model("vit_tiny_patch16_224", parse(name), depth=1 if setting.small else 2).to(setting.device).eval()
        )
        images = torch.randn(2, 3, 224, 224, device=setting.device)
        results = []
        for form in (model, torch.compile(model, fullgraph=True)):
            model.zero_grad()
            out = form(images)
            out.square().mean().backward()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            results.append((out.detach(), gradients))
        worst = max(((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))
        notes.append(f"{name} compiled: relative difference {worst:.1e}" + ("" if worst < 1e-2 else " WRONG"))
    return Result(notes, [])


def dense_memory(setting: Setting) -> Result:
    """Peak memory of a training step of detection at 800 x 1333 pixels, batch 2, with attention in conv4 and conv5."""
    import torch

    from regard import create_model
    from regard.mixers.spelling import parse

    names = ["none", "Softmax()", "Factors(terms='1111')", "Factors(terms='0110')", "SKA()", "MiTA(m=64, k=64)"]
    size, host, batch = ((96, 128), "attended_resnet18", 1) if setting.small else ((800, 1333), "attended_resnet50", 2)
    notes = []
    for name in names[: 2 if setting.small else None]:
        for precision in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            try:
                model = create_model(host, None if name == "none" else parse(name), img_size=size, num_classes=10)
                found = _peak(model.to(setting.device), size, batch, precision, setting.device)
            except Exception as error:  # one that does not fit, or is refused, is a finding
                found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            notes.append(f"{host}, {name}, {precision}: {found}")
    return Result(notes, [])


def _peak(model: Any, size: tuple[int, int], batch: int, precision: Any, device: str) -> str:
    import time

    import torch

    images = torch.randn(batch, 3, *size, device=device)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = 0.0
    for _ in range(3 if cuda else 1):
        start = time.perf_counter()
        with torch.autocast(device, precision, enabled=precision != torch.float32):
            loss = model(images).square().mean()
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB, " if cuda else ""
    return f"{peak}{seconds * 1e3:.0f} ms a step"
