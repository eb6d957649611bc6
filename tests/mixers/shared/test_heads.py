"""The layer around an operator: heads, rotary, gate, convolution, dropout, cross-attention, input checks."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat

from operators import check_error
from regard import ConfigError, Grid, Mask, Site, Softmax, ops, parse
from regard.core import ShapeError, UnsupportedError, heads, merge
from regard.lab.tasks.translation.networks.seq2seq import on_sequences
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig, apply_rotary

GRID = Grid(3, 5, 1, 2)
SITE = Site(16, 2, GRID)


PLAIN = Softmax()


def layer(config: Softmax = PLAIN, site: Site = SITE) -> HeadMixer:
    torch.manual_seed(0)
    return config.build(site).double().eval()


def tokens(grid: Grid = GRID) -> torch.Tensor:
    return torch.randn(3, grid.tokens, 16, dtype=torch.float64)


@pytest.mark.parametrize("execution", ["dense", "gather", "grouped", "auto"])
def test_no_images_give_no_outputs_of_any_form(execution: str) -> None:
    q, grid = torch.zeros(0, 2, 196, 16), Grid(14, 14)
    assert ops.mita(q, q, q, ops.PooledQueries(grid, 9), 9, execution=execution).shape == q.shape
    assert ops.topk(q, q, q, 4, execution="gather").shape == q.shape


def test_one_row_of_padding_serves_all_images() -> None:
    grid = Grid(4, 4, prefix=1)
    q, k, v = torch.randn(3, 2, 2, 17, 8, dtype=torch.float64).unbind()
    keep = torch.arange(17) != 5
    one, each = Mask(keep=keep[None]), Mask(keep=keep.expand(2, -1))
    assert torch.equal(ops.bra(q, k, v, grid, 2, 2, mask=one), ops.bra(q, k, v, grid, 2, 2, mask=each))
    plan = ops.lsh_plan(q, torch.randn(2, 8, 2, dtype=torch.float64))
    assert torch.equal(ops.reformer(q, v, plan, 4, mask=one), ops.reformer(q, v, plan, 4, mask=each))


def test_a_convolution_beside_cross_attention_needs_the_same_places() -> None:
    """Also where only their sum is the same: prefix tokens of one, suffix tokens of the other."""
    site = Site(16, 2, Grid(4, 4, prefix=1), memory=Grid(4, 4, suffix=1))
    layer, x = Softmax(dwc=3).build_cross(site), torch.randn(2, 17, 16)
    check_error(ShapeError, "needs dwc=0", layer, x, site.grid, memory=x, memory_grid=site.memory)
    assert layer(x, site.grid, memory=x, memory_grid=site.grid).shape == x.shape


def test_a_memory_of_another_dtype_is_named() -> None:
    site = Site(16, 2, Grid(4, 4), memory=Grid(4, 4))
    layer, x = Softmax().build_cross(site), torch.randn(2, 16, 16)
    said = r"the memory is torch.float64, x is torch.float32; cast them"
    check_error(ShapeError, said, layer, x, site.grid, memory=x.double(), memory_grid=site.grid)


def test_heads_are_consecutive_channels() -> None:
    x = torch.randn(2, 5, 12)
    assert torch.equal(heads(x, 3)[:, 1], x[..., 4:8])
    assert torch.equal(merge(heads(x, 3)), x)


def test_rotary_is_timms_and_does_not_rotate_prefix_and_suffix_tokens() -> None:
    x = torch.randn(3, 2, GRID.tokens, 8, dtype=torch.float64)
    rope = torch.randn(GRID.cells, 16, dtype=torch.float64)
    rotated = apply_rotary(x, rope, GRID)
    expected = apply_rot_embed_cat(x[:, :, GRID.span], rope)
    assert torch.allclose(rotated[:, :, GRID.span], expected, rtol=0, atol=1e-12)
    assert torch.equal(rotated[:, :, :1], x[:, :, :1])
    assert torch.equal(rotated[:, :, -2:], x[:, :, -2:])
    check_error(ShapeError, "14 rows, the grid 15 cells and 18 tokens", apply_rotary, x, rope[:-1], GRID)


def test_gate_and_convolution_are_the_formula() -> None:
    mixer, x = layer(Softmax(dwc=3, gate=True)), tokens()
    qkv = mixer.project_heads(x, GRID)
    out = merge(mixer.operator(**qkv, grid=GRID))
    assert mixer.dwc is not None
    assert mixer.gate is not None
    extra, cells = GRID.to_map(merge(qkv["v"]))
    out = out + GRID.from_map(extra * 0, mixer.dwc(cells))
    assert torch.allclose(mixer(x, GRID), mixer.proj(F.silu(mixer.gate(x)) * out), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_queries_and_keys_are_normalised_per_head(kind: str) -> None:
    mixer = layer(site=Site(16, 2, GRID, qk_norm=kind))  # type: ignore[arg-type]
    q = mixer.project_heads(tokens(), GRID)["q"]
    assert q is not None
    assert torch.allclose(q.square().mean(-1), torch.ones(3, 2, GRID.tokens).double(), atol=1e-3)
    parameters = sum(p.numel() for p in mixer.parameters())
    assert parameters == mixer.config.cost(mixer.site).params


def test_dropout_works_in_training_only() -> None:
    mixer, x = layer(site=Site(16, 2, GRID, drop=0.5)), tokens()
    assert torch.equal(mixer(x, GRID), mixer(x, GRID))
    mixer.train()
    assert (mixer(x, GRID) == 0).double().mean() > 0.3


def test_cross_attention_takes_keys_from_the_memory() -> None:
    memory_grid = Grid(2, 4)
    torch.manual_seed(0)
    mixer = Softmax().build_cross(Site(16, 2, GRID, memory=memory_grid)).double().eval()
    x, memory = tokens(), tokens(memory_grid)
    keep = torch.ones(3, 8, dtype=torch.bool)
    keep[:, 5:] = False
    out = mixer(x, GRID, Mask(keep=keep), memory=memory, memory_grid=memory_grid)
    q, k, v = (heads(y, 2) for y in F.linear(x, mixer.qkv.weight, mixer.qkv.bias).chunk(3, -1))
    _, k, v = (heads(y, 2) for y in F.linear(memory, mixer.qkv.weight, mixer.qkv.bias).chunk(3, -1))
    expected = mixer.proj(merge(ops.softmax_reference(q, k[:, :, :5], v[:, :, :5])))
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    plain = mixer.reference(x, GRID, Mask(keep=keep), memory=memory, memory_grid=memory_grid)
    assert torch.allclose(plain, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dwc", [-1, 2, 4])
def test_even_kernels_are_refused(dwc: int) -> None:
    check_error(ConfigError, "odd kernel", Softmax, dwc=dwc)


@pytest.mark.untyped
def test_input_checks_of_an_operator_name_the_tensors() -> None:
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5, 8)
    check_error(ShapeError, "k has width 8, q has 7; they must be equal", ops.softmax, q[..., :7], k, k)
    check_error(ShapeError, "v has tokens 4, k has 5", ops.softmax, q, k, k[:, :, :4])
    check_error(ShapeError, "v has batch 1, q has 2", ops.softmax, q, k, k[:1])
    check_error(ShapeError, r"k has shape \(3, 5, 8\)", ops.softmax, q, k[0], k)
    check_error(ShapeError, "cast them to one dtype", ops.softmax, q, k.double(), k)


@pytest.mark.untyped
def test_input_checks_of_a_layer_name_the_shape() -> None:
    check_error(ShapeError, r"x has shape \(18, 16\); expected \(batch, tokens, 16\)", layer(), tokens()[0], GRID)
    check_error(ConfigError, "a ProjectionConfig such as LinearQKV", Softmax, projection="linear")


def test_a_mechanism_without_cross_attention_says_so() -> None:
    class SelfOnly(Softmax):
        cross = False

    check_error(UnsupportedError, "SelfOnly has no cross-attention", SelfOnly().build_cross, SITE)


@pytest.mark.parametrize("text", ["Softmax(dwc=3)", "TopK(k=8, dwc=3)", "SKA(dwc=3)", "Factors(axes=1, dwc=3)"])
def test_no_layer_is_causal_with_a_convolution(text: str) -> None:
    grid, config = Grid.sequence(8), parse(text)
    assert isinstance(config, HeadMixerConfig)
    assert replace(config, dwc=0).masks - config.masks == {"causal"}
    layer, said = config.build(Site(16, 2, grid)), r"dwc=3. cannot apply a causal mask: .* give dwc=0"
    check_error(UnsupportedError, said, layer, torch.zeros(1, 8, 16), grid, Mask(causal=True))
    check_error(UnsupportedError, "cannot be causal", on_sequences, config, causal=True)


def test_hidden_tokens_of_a_memory_do_not_pass_through_the_convolution() -> None:
    x, keep = tokens(), torch.arange(18).expand(3, -1) % 4 > 0
    mixer = Softmax(dwc=3).build_cross(Site(16, 2, GRID, memory=GRID)).double().eval()
    hidden = torch.where(keep[..., None], x, torch.nan)
    out, same = (mixer(x, GRID, Mask(keep=keep), memory=memory, memory_grid=GRID) for memory in (x, hidden))
    assert torch.allclose(same, out, rtol=0, atol=1e-12)
