"""Parts of `gpu.py` about operators: what their kernels compute beside the plain forms, and how long they take."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dense_factors import as_mmcv

GOALS = {"1024": 1.5, "2048": 2.5, "4096": 5.0, "16384": 18.0}
"""MiTA: times faster than softmax attention, forward and backward, by tokens. Terms of Factors: 4 times mmcv's form."""


class Result(NamedTuple):
    """What a part found: sentences, and timings of `regard bench` as dictionaries."""

    notes: list[str]
    timings: list[dict[str, Any]]


class Setting(NamedTuple):
    """small: tiny sizes, on the CPU."""

    small: bool

    @property
    def device(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def dtype(self) -> Any:
        import torch

        return torch.float32 if self.small else torch.bfloat16


# checks


def check_mita(setting: Setting) -> Result:
    """MiTA: the kernels with and without a given plan, several experts, prefix tokens, padding; varlen."""
    import torch

    from regard import Grid, Mask
    from regard.mixers.mita.mita import mita, mita_reference
    from regard.mixers.mita.routing import mita_plan
    from regard.mixers.shared.landmarks import pool_landmarks

    notes = []
    side, m, top = (4, 4, 5) if setting.small else (32, 64, 64)
    for grid in (Grid(side, side + 2), Grid(side + 1, side, 1))[setting.small :]:
        q, k, v = leaves(setting, grid, 2)
        landmarks = pool_landmarks(q, grid, m).detach().requires_grad_()
        everything, padded = [q, k, v, landmarks], Mask(keep=_half(grid, setting.device))
        cases: list[tuple[str, str, dict[str, Any]]] = [
            ("triton", "one expert", {}), ("triton", "two experts", {"experts": 2}),
            ("triton", "padding", {"mask": padded}), ("triton", "only keys", {"branches": "route"}),
            ("varlen", "one expert", {}),
        ]  # fmt: skip
        for execution, name, more in cases:
            chosen = {key: more[key] for key in ("experts", "mask") if key in more}
            plan = mita_plan(*(x.detach() for x in (q, k, landmarks)), top, **chosen)
            notes.append(
                _compared(
                    f"MiTA {execution}, {name}, {grid}", everything,
                    lambda *x, e=execution, p=plan, o=more: mita(*x, top, plan=p, execution=e, **o),
                    lambda *x, p=plan, o=more: mita_reference(*x, top, plan=p, **o),
                )
            )  # fmt: skip
        with torch.no_grad():
            found = mita(*everything, top, execution="triton")
            expected = mita(*everything, top, execution="grouped")
        same = ((found - expected).abs().amax(-1) < 0.05).float().mean().item()
        notes.append(f"MiTA triton, what it chooses, {grid}: {same:.1%} of queries as grouped" + _wrong(same > 0.97))
    return Result(notes, [])


def check_blocks(setting: Setting) -> Result:
    """BRA, MoBA and NSA on the routed kernel; grids that blocks do not divide, prefix tokens, padding."""
    from regard import Grid, Mask
    from regard.mixers.bra import bra, bra_plan, bra_reference
    from regard.mixers.moba import moba, moba_plan, moba_reference
    from regard.mixers.nsa import nsa, nsa_reference

    notes = []
    side = 5 if setting.small else 30
    for grid in (Grid(side, side + 1), Grid(side, side, 1))[setting.small :]:
        q, k, v = leaves(setting, grid, 2)
        gates = q[..., :3].detach().clone().requires_grad_()
        fixed = [x.detach() for x in (q, k)]
        for mask in (None, Mask(keep=_half(grid, setting.device))):
            blocks, regions = moba_plan(*fixed, grid, (4, 4), 2, mask=mask), bra_plan(*fixed, grid, 2, 2, mask=mask)
            name = f"{grid}, {'padding' if mask else 'no mask'}"
            notes += [
                _compared(
                    f"MoBA triton, {name}", [q, k, v],
                    lambda *x, g=grid, p=blocks, m=mask: moba(*x, g, (4, 4), 2, plan=p, mask=m, execution="triton"),
                    lambda *x, g=grid, p=blocks, m=mask: moba_reference(*x, g, (4, 4), 2, plan=p, mask=m),
                ),
                _compared(
                    f"BRA triton, {name}", [q, k, v],
                    lambda *x, g=grid, p=regions, m=mask: bra(*x, g, 2, 2, plan=p, mask=m, execution="triton"),
                    lambda *x, g=grid, p=regions, m=mask: bra_reference(*x, g, 2, 2, plan=p, mask=m),
                ),
                _compared(
                    f"NSA triton, {name}", [q, k, v, gates],
                    lambda *x, g=grid, p=blocks, m=mask: nsa(*x, g, (4, 4), 2, 3, plan=p, mask=m, execution="triton"),
                    lambda *x, g=grid, p=blocks, m=mask: nsa_reference(*x, g, (4, 4), 2, 3, plan=p, mask=m),
                ),
            ]  # fmt: skip
    return Result(notes, [])


def check_factors(setting: Setting) -> Result:
    """Factors by FlexAttention, with and without a window, with gradients on a GPU."""
    from regard import Grid
    from regard.mixers.factors.factors import factors, factors_reference

    notes = []
    for grid in (Grid(4, 5, 1),) if setting.small else (Grid(16, 20), Grid(20, 16, 1)):
        q, k, v = leaves(setting, grid, 2)
        rest = positions(setting, grid)
        for terms in ("1111", "0110"):
            for window in (0, 3):
                options = {"terms": terms, "grid": grid, "window": window, "scale": 0.125}
                used = [q, k, v, *rest.values()]
                names = list(rest)

                def call(form: Callable, *x: Any, names: list = names, options: dict = options, **more: str) -> Any:
                    named = dict(zip(names, x[3:], strict=True))
                    tables = (named.pop("x"), named.pop("y"))
                    return form(*x[:3], tables=tables, **named, **options, **more)

                notes.append(
                    _compared(
                        f"Factors {terms} flex, window {window}, {grid}", used,
                        lambda *x, call=call: call(factors, *x, execution="flex"),
                        lambda *x, call=call: call(factors_reference, *x), trains=not setting.small,
                    )
                )  # fmt: skip
    return Result(notes, [])


def check_static(setting: Setting) -> Result:
    """Static keys by fused attention: one set of keys for all images, expanded and not copied."""
    from regard import Grid
    from regard.mixers.static_keys.ska import ska, ska_reference

    q, k, v = leaves(setting, Grid(4, 5) if setting.small else Grid(32, 32), 3)
    keys = k[0].detach().clone().requires_grad_()
    return Result([_compared("SKA, expanded keys", [q, keys, v], ska, ska_reference)], [])


def check_linear(setting: Setting) -> Result:
    """Linear attention's kernel, with features made in it and before it, with and without padding."""
    import torch

    from regard import Grid, Mask
    from regard.mixers.flatten import flatten, flatten_reference
    from regard.mixers.inline import inline, inline_reference
    from regard.mixers.linear import linear, linear_reference
    from regard.mixers.mhla import mhla, mhla_reference
    from regard.mixers.polaformer import polaformer, polaformer_reference

    notes = []
    for grid in (Grid(4, 5),) if setting.small else (Grid(32, 32), Grid(31, 70)):
        q, k, v = leaves(setting, grid, 2)
        power = torch.full((q.shape[1], 1, q.shape[-1]), 2.0, device=q.device)
        mixing = torch.rand(4, 4, device=q.device)
        for mask in (None, Mask(keep=_half(grid, setting.device))):
            forms: dict[str, tuple[Callable, Callable]] = {
                "Linear, elu": (linear, linear_reference),
                "Linear, relu": (partial(linear, feature="relu"), partial(linear_reference, feature="relu")),
                "FLatten": (flatten, flatten_reference),
                "InLine": (inline, inline_reference),
                "MHLA": (
                    lambda *x, g=grid, m=mixing, **more: mhla(*x, m, g, 4, **more),
                    lambda *x, g=grid, m=mixing, **more: mhla_reference(*x, m.to(x[0].dtype), g, 4, **more),
                ),
                "PolaFormer": (
                    lambda *x, p=power, **more: polaformer(*x, p, **more),
                    lambda *x, p=power, **more: polaformer_reference(*x, p.to(x[0].dtype), **more),
                ),
            }
            notes += [
                _compared(
                    f"{name} triton, {grid}, {'padding' if mask else 'no mask'}", [q, k, v],
                    partial(form, mask=mask, execution="triton"), partial(plain, mask=mask),
                )
                for name, (form, plain) in forms.items()
            ]  # fmt: skip
    return Result(notes, [])


# times


def check_window(setting: Setting) -> Result:
    """The kernel of window and neighbourhood attention: even and shifted windows, prefix tokens, with and without
    padding."""
    import torch

    from regard import Grid, Mask
    from regard.mixers.neighbourhood import neighbourhood, neighbourhood_reference
    from regard.mixers.window import window, window_reference

    notes = []
    for grid, size, shift in ((Grid(4, 6), 2, 0), (Grid(5, 7, prefix=1), 3, 1)) if setting.small else (
        (Grid(32, 32), 8, 0), (Grid(31, 40, prefix=1), 7, 3),
    ):  # fmt: skip
        q, k, v = leaves(setting, grid, 2)
        table = torch.randn(q.shape[1], 2 * size - 1, 2 * size - 1, device=q.device, dtype=q.dtype, requires_grad=True)
        offsets = torch.randn(q.shape[1], 5, 5, device=q.device, dtype=q.dtype, requires_grad=True)
        for mask in (None, Mask(keep=_half(grid, setting.device))):

            def run(form: Callable, q: Any, k: Any, v: Any, table: Any, at=(grid, size, shift), mask=mask) -> Any:
                return form(q, k, v, *at[:2], shift=at[2], table=table, mask=mask)

            notes.append(
                _compared(
                    f"Window triton, {grid}, {'padding' if mask else 'no mask'}", [q, k, v, table],
                    partial(run, partial(window, execution="triton")), partial(run, window_reference),
                )
            )  # fmt: skip

            def near(form: Callable, q: Any, k: Any, v: Any, table: Any, grid=grid, mask=mask) -> Any:
                return form(q, k, v, grid, 3, table=table, mask=mask)

            notes.append(
                _compared(
                    f"Neighbourhood triton, {grid}, {'padding' if mask else 'no mask'}", [q, k, v, offsets],
                    partial(near, partial(neighbourhood, execution="triton")), partial(near, neighbourhood_reference),
                )
            )  # fmt: skip
    return Result(notes, [])


def time_mita(setting: Setting, tokens: int, m: int) -> Result:
    """MiTA's executions beside softmax attention."""
    from regard import Grid
    from regard.mixers.mita.mita import mita
    from regard.mixers.shared.landmarks import pool_landmarks

    side = 8 if setting.small else int(tokens**0.5)
    grid = Grid(side, side if setting.small else tokens // side)
    top = m = 4 if setting.small else m
    q, k, v = leaves(setting, grid, 1 if setting.small else 8)
    runs = {"softmax attention": _softmax(q, k, v)}
    for name in ("triton", "varlen", "grouped"):
        runs[f"MiTA(m={m}, k={top}) {name}"] = lambda n=name: mita(
            q, k, v, pool_landmarks(q, grid, m), top, execution=n
        )
    result = _timed(runs, [q, k, v], grid, setting)
    goal = GOALS[str(tokens)]
    for timing in result.timings:
        if timing["backward"] and timing["mixer"].endswith("triton") and not setting.small:
            faster = 1 / timing["ratio"]
            verdict = "met" if faster >= goal else "missed"
            result.notes.append(f"{tokens} tokens, training: {faster:.2f} times as fast, goal {goal}: {verdict}")
    return result


def time_blocks(setting: Setting) -> Result:
    """BRA and MoBA beside softmax attention."""
    from regard import Grid
    from regard.mixers.bra import bra
    from regard.mixers.moba import moba

    notes, timings = [], []
    for side in (8,) if setting.small else (32, 64):
        grid = Grid(side, side)
        q, k, v = leaves(setting, grid, 1 if setting.small else 8)
        runs: dict[str, Callable] = {"softmax attention": _softmax(q, k, v)}
        for name in ("triton", "grouped"):
            runs[f"MoBA {name}"] = lambda n=name, g=grid, x=(q, k, v): moba(*x, g, (4, 4), 3, execution=n)
        for name in ("triton", "regions"):
            runs[f"BRA {name}"] = lambda n=name, g=grid, x=(q, k, v): bra(*x, g, 4, 4, execution=n)
        one = _timed(runs, [q, k, v], grid, setting)
        notes, timings = notes + one.notes, timings + one.timings
    return Result(notes, timings)


def time_factors(setting: Setting) -> Result:
    """The four terms beside mmcv's form, which computes all logits from those of the axes; goal: 4 times as fast."""
    from regard import Grid
    from regard.mixers.factors.factors import factors

    notes, timings = [_without("mmcv", "its layer; the same form is measured as rewritten here")], []
    for terms, window in (("1111", 0), ("1111", 7), ("0110", 0)):
        grid = Grid(8, 8) if setting.small else Grid(64, 64)
        q, k, v = leaves(setting, grid, 1 if setting.small else 2)
        rest = positions(setting, grid)
        tables = (rest.pop("x"), rest.pop("y"))
        options = {"terms": terms, "grid": grid, "window": window, "tables": tables, **rest}

        def run(execution: str, options: dict = options, x: tuple = (q, k, v)) -> Any:
            return factors(*x, **options, execution=execution)

        def dense(run: Callable = run, fused: bool = terms[0] == "1") -> Any:
            with as_mmcv(fused=fused):
                return run("compressed")

        runs: dict[str, Callable] = {f"Factors {terms}, window {window}: as mmcv": dense}
        for name in ("compressed", "flex"):
            runs[f"Factors {terms}, window {window}: {name}"] = partial(run, name)
        one = _timed(runs, [q, k, v], grid, setting)
        notes, timings = notes + one.notes, timings + one.timings
    return Result(notes, timings)


def time_static(setting: Setting) -> Result:
    """Static keys beside softmax attention with keys of each image."""
    from regard import Grid
    from regard.mixers.static_keys.ska import ska

    grid = Grid(6, 6) if setting.small else Grid(32, 32)
    q, k, v = leaves(setting, grid, 2 if setting.small else 16)
    keys = k[0].detach().clone().requires_grad_()
    runs = {"softmax attention": _softmax(q, k, v), "SKA": lambda: ska(q, keys, v)}
    return _timed(runs, [q, k, v, keys], grid, setting)


def time_window(setting: Setting, tokens: int) -> Result:
    """Windows of 8 x 8 cells and neighbourhoods of 7 x 7 by their kernel and cut into tiles, beside softmax attention;
    16 images."""
    import torch

    from regard import Grid
    from regard.mixers.neighbourhood import neighbourhood
    from regard.mixers.window import window

    side, size, near = (6, 3, 3) if setting.small else (int(tokens**0.5), 8, 7)
    grid = Grid(side, side)
    q, k, v = leaves(setting, grid, 2 if setting.small else 16)
    table = torch.zeros(q.shape[1], 2 * size - 1, 2 * size - 1, device=q.device, dtype=q.dtype, requires_grad=True)
    runs: dict[str, Callable] = {"softmax attention": _softmax(q, k, v)}
    for execution in ("triton", "tiles"):
        runs[f"Window {execution}"] = partial(window, q, k, v, grid, size, table=table, execution=execution)
        runs[f"Window {execution}, no table"] = partial(window, q, k, v, grid, size, execution=execution)
        runs[f"Neighbourhood {execution}"] = partial(neighbourhood, q, k, v, grid, near, execution=execution)
    return _timed(runs, [q, k, v, table], grid, setting)


def time_linear(setting: Setting, tokens: int) -> Result:
    """The linear family by its kernel and by products of PyTorch, beside softmax attention; 16 images."""
    import torch

    from regard import Grid
    from regard.mixers.flatten import flatten
    from regard.mixers.inline import inline
    from regard.mixers.linear import linear
    from regard.mixers.mhla import mhla

    side = 6 if setting.small else int(tokens**0.5)
    grid = Grid(side, side)
    q, k, v = leaves(setting, grid, 2 if setting.small else 16)
    runs: dict[str, Callable] = {"softmax attention": _softmax(q, k, v)}
    mixing = torch.rand(16, 16, device=q.device)
    forms: dict[str, Callable] = {
        "Linear": linear, "FLatten": flatten, "InLine": inline,
        "MHLA": lambda *x, **more: mhla(*x, mixing, grid, 16, **more),
    }  # fmt: skip
    for name, form in forms.items():
        for execution in ("triton", "products"):
            runs[f"{name} {execution}"] = partial(form, q, k, v, execution=execution)
    return _timed(runs, [q, k, v], grid, setting)


def time_dynamic(setting: Setting) -> Result:
    """The sum over taps of dynamic convolution beside softmax attention: one kernel, and tap after tap."""
    import torch
    import torch.nn.functional as F

    from regard import Grid
    from regard.mixers.convolutions.dynamic import Taps
    from regard.mixers.convolutions.dynamic_triton import sum_taps

    grid, sides = (Grid(6, 6), (3, 3)) if setting.small else (Grid(32, 32), (13, 13))
    q, k, v = leaves(setting, grid, 1 if setting.small else 8)
    batch, heads, _, width = v.shape
    maps = v.detach().mT.unflatten(-1, grid.sides).contiguous().requires_grad_()
    kernels = torch.randn(batch, heads, sides[0] * sides[1], *grid.sides, device=v.device, dtype=v.dtype)
    kernels = kernels.softmax(2).requires_grad_()
    padding = [side // 2 for side in reversed(sides) for _ in range(2)]
    runs = {
        "softmax attention": _softmax(q, k, v),
        "DynamicConv triton": lambda: sum_taps(F.pad(maps, padding), kernels, sides),
        "DynamicConv, tap after tap": lambda: Taps.apply(F.pad(maps, padding), kernels, sides),
    }
    return _timed(runs, [q, k, v, maps, kernels], grid, setting)


def time_step(setting: Setting) -> Result:
    """A training step of ViT-S for 512 x 512 pixels, bfloat16 by autocast, beside its own attention."""
    import torch
    from torch import nn

    from regard import MiTA, create_model, swap
    from regard.measure.bench import Candidate
    from regard.mixers.mita.mita import MiTAOperator

    name, size, batch, m = (
        ("vit_tiny_patch16_224", 64, 1, 4) if setting.small else ("vit_small_patch16_224", 512, 16, 64)
    )
    images = torch.randn(batch, 3, size, size, device=setting.device)
    labels = torch.arange(batch, device=setting.device)

    def step(execution: str) -> Callable[[], object]:
        torch.manual_seed(0)
        model = create_model(name, None, img_size=size, depth=1 if setting.small else 12).to(setting.device)
        if execution:
            swap(model, MiTA(m=m, k=m))
            for module in model.modules():
                if isinstance(module, MiTAOperator):
                    module.execution = execution
        optimizer = torch.optim.AdamW(model.parameters(), fused=not setting.small)

        def run() -> None:
            with torch.autocast(setting.device, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return run

    rows = [Candidate("softmax attention", step(""), 1, 1)]
    rows += [Candidate(f"MiTA(m={m}, k={m}) {form}", step(form), 1, 1) for form in ("triton", "grouped")]
    placement = (torch.device(setting.device), torch.bfloat16)
    timings = _measured(rows, f"{size}x{size}", (size // 16) ** 2 + 1, placement, True, setting)
    return Result([f"{name}, {size} pixels, {batch} images"], [dataclasses.asdict(t) for t in timings])


# what parts share


def leaves(setting: Setting, grid: Any, batch: int) -> list[Any]:
    """q, k and v with gradients: 6 heads of 64, or 1 of 16."""
    import torch

    torch.manual_seed(0)
    heads, width = (1, 16) if setting.small else (6, 64)
    shape = (batch, heads, grid.tokens, width)
    return [torch.randn(shape, device=setting.device, dtype=setting.dtype).requires_grad_() for _ in range(3)]


def positions(setting: Setting, grid: Any) -> dict[str, Any]:
    """Tables x and y, u and t, for the heads of `leaves`."""
    import torch

    heads, width = (1, 16) if setting.small else (6, 64)
    sizes = {"x": (heads, 2 * grid.width - 1, width), "y": (heads, 2 * grid.height - 1, width)}
    sizes |= {name: (heads, width) for name in "ut"}
    return {
        name: (torch.randn(size, device=setting.device, dtype=setting.dtype) * 0.3).requires_grad_()
        for name, size in sizes.items()
    }


def _half(grid: Any, device: str) -> Any:
    import torch

    return torch.arange(grid.tokens, device=device).expand(2, -1) < torch.tensor(
        [[grid.tokens], [grid.tokens // 2]], device=device
    )


def _softmax(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import torch.nn.functional as F

    return lambda: F.scaled_dot_product_attention(q, k, v)


def _compared(name: str, used: list[Any], form: Callable, plain: Callable, trains: bool = True) -> str:
    """The largest difference of outputs and gradients to those of the plain form in float64, beside its own error."""
    import torch

    from regard.core import UnsupportedError

    double = [x.detach().double().requires_grad_() for x in used]
    found, expected, own = [], [], []
    try:
        with torch.set_grad_enabled(trains):
            for call, inputs, results in ((form, used, found), (plain, double, expected), (plain, used, own)):
                out = call(*inputs)
                results.append(out.detach().double())
                if trains:
                    torch.manual_seed(1)
                    grad = torch.randn(out.shape, device=out.device, dtype=torch.float64)
                    gradients = torch.autograd.grad(out, inputs, grad.to(out.dtype), allow_unused=True)
                    results += [x.double() for x in gradients if x is not None]
    except UnsupportedError as error:
        return f"{name}: left out, {error}"
    worst, plain_error = (
        max(((x - y).norm() / y.norm().clamp_min(1e-9)).item() for x, y in zip(results, expected, strict=True))
        for results in (found, own)
    )
    right = worst <= 4 * plain_error + 1e-6
    return f"{name}: relative difference {worst:.1e}, of the plain form {plain_error:.1e}" + _wrong(right)


def _wrong(right: bool) -> str:
    return "" if right else " WRONG"


def _timed(runs: dict[str, Callable], used: list[Any], grid: Any, setting: Setting) -> Result:
    """Forward, and forward and backward, of passes in turn; those that cannot run here are left out."""
    import torch

    from regard.core import UnsupportedError
    from regard.measure.bench import Candidate, with_gradients

    notes, timings = [], []
    placement = (torch.device(setting.device), setting.dtype)
    for backward in (False, True):
        rows = []
        for name, run in runs.items():
            try:
                once = with_gradients(run, used) if backward else torch.no_grad()(run)
                if not backward:  # `with_gradients` has run the forward pass
                    once()
                rows.append(Candidate(name, once, 1, 1))
            except UnsupportedError as error:
                notes.append(f"{name}, {'training' if backward else 'forward'}: left out, {error}")
        label = f"{grid.height}x{grid.width}"
        timings += _measured(rows, label, grid.tokens, placement, backward, setting)
    return Result(notes, [dataclasses.asdict(timing) for timing in timings])


def _measured(
    rows: list[Any], label: str, tokens: int, placement: tuple[Any, Any], backward: bool, setting: Setting
) -> list[Any]:
    """The timings of candidates in turn; in the interpreter of one pass each."""
    from regard.measure.bench import Timing, time_candidates
    from regard.measure.turns import time_pass

    if not setting.small:
        return time_candidates(rows, label, tokens, placement, backward, 1.0, {})
    seconds = [time_pass(row.run, placement[0]).seconds for row in rows]
    return [
        Timing(
            mixer=row.name, grid=label, tokens=tokens, backward=backward, seconds=once, low=once, high=once,
            ratio=once / seconds[0], bound=0.0, memory=None, exponent=None, rounds=1, faults=0.0, system=0.0,
        )
        for row, once in zip(rows, seconds, strict=True)
    ]  # fmt: skip


def _without(package: str, what: str) -> str:
    from importlib.util import find_spec

    return f"{package} is {'installed' if find_spec(package) else 'not installed'}: {what}"
