"""CSKA with a stride: fewer keys, values that are means of blocks; against loops over queries, keys and taps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import CSKA, ConfigError, Grid, Mask, Site, UnsupportedError, spell
from regard.mixers.static_keys.strided import block_values
from regard.testing.subject import gap, perturb

F64 = torch.float64
GRIDS = (Grid(5, 7, 1, 2), Grid(4, 3))
LOGITS = (
    CSKA(stride=2),
    CSKA(stride=3, rows="centre", cols="conv"),
    CSKA(stride=2, factorised=True, kernel=5),
    CSKA(stride=2, activation="relu", normalise="1/N"),
)
EVERY = (*LOGITS, CSKA(stride=2, reading="key"), CSKA(stride=9, reading="key", bias=False))


def operator_of(config: CSKA, grid: Grid) -> torch.nn.Module:
    return perturb(config.operator(Site(dim=8, heads=2, grid=grid)))


def inputs(grid: Grid) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 2, grid.tokens, 4, dtype=F64), torch.randn(3, 2, grid.tokens, 4, dtype=F64)


def naive_values(v: Tensor, grid: Grid, stride: int, keep: Tensor) -> tuple[Tensor, Tensor]:
    """v (B, H, N, e), keep (B, N): prefix values, the mean of each block, suffix values; and which keys are kept."""
    blocks = [[] for _ in range(grid.every(stride).cells)]
    for y in range(grid.height):
        for x in range(grid.width):
            block = y // stride * -(-grid.width // stride) + x // stride
            blocks[block].append(grid.prefix + y * grid.width + x)
    ends = [[i] for i in (*range(grid.prefix), *range(grid.prefix + grid.cells, grid.tokens))]
    members = [*ends[: grid.prefix], *blocks, *ends[grid.prefix :]]
    values, kept = torch.zeros(*v.shape[:2], len(members), v.shape[-1], dtype=F64), []
    for key, tokens in enumerate(members):
        for image in range(len(v)):
            own = [token for token in tokens if keep[image, token]]
            if own:
                values[image, :, key] = v[image][:, own].mean(1)
        kept.append(keep[:, tokens].any(1))
    return values, torch.stack(kept, 1)


def naive(operator: torch.nn.Module, q: Tensor, v: Tensor, grid: Grid, keep: Tensor) -> Tensor:
    """The logits reading, one product of a query and a tap at a time."""
    config, keys = operator.config, grid.every(operator.config.stride)
    values, kept = naive_values(v, grid, config.stride, keep)
    made, kernel, m = operator.on(keys), config.kernel, keys.tokens
    if config.factorised:
        taps = made["keys"][..., None, None] * made["kernel"].view(2, 1, 4, kernel, kernel)
    else:
        taps = made["weight"].view(2, m, 4, kernel, kernel)
    q = q * keep[:, None, :, None]
    logits = torch.zeros(3, 2, grid.tokens, m, dtype=F64)
    for token in range(grid.tokens):
        cell = token - grid.prefix
        if not 0 <= cell < grid.cells:
            logits[:, :, token] = torch.einsum("bhd,hmd->bhm", q[:, :, token], made["rows"])
            logits[:, :, token] += made["row_bias"][:, 0] if "row_bias" in made else 0.0
            continue
        for i in range(kernel):
            for j in range(kernel):
                y, x = cell // grid.width + i - kernel // 2, cell % grid.width + j - kernel // 2
                if 0 <= y < grid.height and 0 <= x < grid.width:
                    near = q[:, :, grid.prefix + y * grid.width + x]
                    logits[:, :, token] += torch.einsum("bhd,hmd->bhm", near, taps[..., i, j])
        logits[:, :, token] += made["bias"].view(2, m) if "bias" in made else 0.0
    logits = (logits / 2).masked_fill(~kept[:, None, None], -torch.inf)
    weights = logits.softmax(-1) if config.activation == "softmax" else logits.relu()
    return weights @ (values / m if config.normalise == "1/N" else values)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("config", LOGITS, ids=spell)
def test_keys_of_blocks_equal_loops_over_queries_and_taps(config: CSKA, grid: Grid) -> None:
    operator, (q, v) = operator_of(config, grid), inputs(grid)
    keep = torch.rand(3, grid.tokens) > 0.4
    keep[0] = True
    keep[1, grid.prefix : grid.prefix + 2 * grid.width] = False  # whole blocks
    for mask in (None, Mask(keep=keep)):
        expected = naive(operator, q, v, grid, torch.ones_like(keep) if mask is None else keep)
        assert gap(operator(q, None, v, grid=grid, mask=mask), expected) < 1e-12
        assert gap(operator.reference(q, None, v, grid=grid, mask=mask), expected) < 1e-12


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_convolution_of_reading_key_takes_every_second_patch_token(grid: Grid) -> None:
    """Its keys are those without a stride at the upper left patch token of each block."""
    (q, v), every = inputs(grid), torch.ones(3, grid.tokens, dtype=torch.bool)
    operator = operator_of(CSKA(reading="key", stride=2), grid)
    full = operator_of(CSKA(reading="key"), grid)
    full.load_state_dict(operator.state_dict())
    keys = full._with_keys(q, grid, None, plain=False)[1]
    cells = [y * grid.width + x for y in range(0, grid.height, 2) for x in range(0, grid.width, 2)]
    chosen = [*range(grid.prefix), *(grid.prefix + c for c in cells), *range(grid.tokens - grid.suffix, grid.tokens)]
    values = naive_values(v, grid, 2, every)[0]
    expected = torch.softmax(q @ keys[:, :, chosen].mT / 2, -1) @ values
    assert gap(operator(q, None, v, grid=grid), expected) < 1e-12


@pytest.mark.parametrize("config", EVERY, ids=spell)
def test_gradients_are_those_of_finite_differences(config: CSKA) -> None:
    grid = Grid(3, 4, 1)
    operator = operator_of(config, grid).requires_grad_(True)
    names = list(dict(operator.named_parameters()))
    q, v = (x[:1].clone().requires_grad_() for x in inputs(grid))

    def run(q: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        state = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(operator, state, (q, None, v), {"grid": grid})

    assert torch.autograd.gradcheck(run, (q, v, *operator.parameters()), fast_mode=True)


@pytest.mark.parametrize("config", EVERY, ids=spell)
def test_another_grid_padding_and_an_empty_batch_run_in_both_forms(config: CSKA) -> None:
    layer = perturb(config.build(Site(dim=8, heads=2, grid=Grid(3, 4, 1))))
    grid = Grid(7, 5, 1)
    x, keep = torch.randn(3, grid.tokens, 8, dtype=F64), torch.rand(3, grid.tokens) > 0.5
    for mask in (None, Mask(keep=keep)):
        assert gap(layer(x, grid, mask), layer.reference(x, grid, mask)) < 1e-12
    assert layer(x[:0], grid).shape == layer.reference(x[:0], grid).shape == (0, grid.tokens, 8)


def test_hidden_values_have_no_effect() -> None:
    grid = Grid(3, 5)
    _, v = inputs(grid)
    keep = torch.rand(3, 15) > 0.5
    bad = v.masked_fill(~keep[:, None, :, None], torch.nan)
    for plain in (True, False):
        assert torch.equal(*(block_values(x, grid, 2, Mask(keep=keep), plain)[0] for x in (v, bad)))


def test_stride_1_has_the_spelling_and_the_parameters_of_before() -> None:
    assert spell(CSKA(stride=1)) == "CSKA()"
    site = Site(dim=8, heads=2, grid=Grid(5, 7, 1))
    sizes = {name: tuple(p.shape) for name, p in CSKA(stride=2).operator(site).named_parameters()}
    assert sizes == {  # 12 blocks
        "weight": (24, 4, 3, 3), "bias": (24,), "col_keys": (2, 1, 4), "row_keys": (2, 12, 4),
        "extra_row_keys": (2, 1, 4),
    }  # fmt: skip


def test_frozen_keys_of_blocks_are_those_of_the_tokens_grid() -> None:
    operator, grid = operator_of(CSKA(stride=2), Grid(5, 7, 1)), Grid(8, 3, 1)
    q, v = inputs(grid)
    before = operator(q, None, v, grid=grid)
    operator.freeze(grid)
    assert torch.equal(operator(q, None, v, grid=grid), before)


def test_cross_attention_has_the_blocks_of_the_memory() -> None:
    grid, memory = Grid(2, 3), Grid(5, 4, 1)
    site = Site(dim=8, heads=2, grid=grid, memory=memory)
    operator = perturb(CSKA(stride=2).operator(site))
    q, (_, v) = torch.randn(3, 2, 6, 4, dtype=F64), inputs(memory)
    values = naive_values(v, memory, 2, torch.ones(3, memory.tokens, dtype=torch.bool))[0]
    plain = CSKA().operator(replace(site, memory=memory.every(2))).double()
    plain.load_state_dict(operator.state_dict())
    expected = plain(q, None, values, grid=grid, memory=memory.every(2))
    assert gap(operator(q, None, v, grid=grid, memory=memory), expected) < 1e-12


def test_what_a_stride_cannot_do_is_an_error() -> None:
    for options in ({"stride": 0}, {"stride": 2, "resize": "window"}, {"stride": 2, "init": "calibrate"}):
        with pytest.raises(ConfigError, match="stride"):
            CSKA(**options)
    layer = CSKA(stride=2).build(Site(dim=8, heads=2, grid=Grid(2, 2)))
    with pytest.raises(UnsupportedError, match="bias"):
        layer(torch.randn(1, 4, 8), mask=Mask(bias=torch.zeros(4, 4)))
