"""Non-linear embeddings: codes and their tie, counts of the paper's tables. Beside torch and timm: tests/external."""

import copy
import io

import pytest
import torch
from torch import nn

from operators import check_error, count_flops
from regard.core import ConfigError, Grid, Site
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.xca import XCA
from regard.projections.linear import LinearQKV
from regard.projections.sne import FSNE, PSNE, SNE, Codes, fsne_reference

F64 = torch.float64
GRID = Grid(3, 5, 1)
SITE = Site(dim=12, heads=3, grid=GRID)
CONFIGS = (SNE(), SNE(layers=1), SNE(layers=4, width=5), PSNE(), FSNE(code=5), FSNE(code=5, width=7, tied=False))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def built(config, roles="qkv", site=SITE, shared=None):
    """The projection in float64 with all its parameters drawn, biases too."""
    made = config.build(site, roles, shared).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def tokens(batch=3, site=SITE):
    return torch.randn(batch, site.grid.tokens, site.dim, dtype=F64)


def channels(made, x, roles="qkv"):
    return [y.transpose(1, 2).flatten(2) for y in made(x, roles)]


def literal(made, x, role):
    """F-SNE as the paper writes it: the code beside every token."""
    codes = made.codebook.rows(role)
    return fsne_reference(x, codes, made.weight1, made.bias1, made.weight2, made.bias2)[0]


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_fused_fsne_equals_the_literal_form(qkv_bias):
    site = Site(dim=12, heads=3, grid=GRID, qkv_bias=qkv_bias)
    made, x = built(FSNE(code=5, width=7), site=site), tokens()
    for role, y in zip("qkv", channels(made, x), strict=True):
        assert torch.allclose(y, literal(made, x, role), atol=1e-12)


def test_the_literal_form_is_the_equation_by_hand():
    """Two tokens of one channel, codes of one number: ReLU(x w + c u + b) w2 + b2."""
    x, codes = torch.tensor([[[1.0], [-3.0]]]), torch.tensor([[2.0], [-5.0]])
    weight1, bias1 = torch.tensor([[2.0, 3.0]]), torch.tensor([1.0])
    first, second = fsne_reference(x, codes, weight1, bias1, torch.tensor([[10.0]]), torch.tensor([0.5]))
    assert first.flatten().tolist() == [90.5, 10.5]  # 2 + 6 + 1, -6 + 6 + 1
    assert second.flatten().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_fsne_loses_no_precision(dtype):
    exact, x = built(FSNE(code=5, width=7)), tokens()
    made = copy.deepcopy(exact).to(dtype)
    for role in "qkv":
        want = literal(exact, x, role)
        slack = 4 * (literal(made, x.to(dtype), role) - want).abs().max() + 1e-7
        assert (channels(made, x.to(dtype), role)[0] - want).abs().max() <= slack


@pytest.mark.parametrize("config", CONFIGS, ids=spell)
def test_subsets_of_roles_are_the_same_tensors(config):
    made, x = built(config), tokens()
    whole = dict(zip("qkv", made(x, "qkv"), strict=True))
    for roles in ("q", "kv", "qv", "v", "kq", ""):
        part = made(x, roles)
        assert len(part) == len(roles)
        for role, y in zip(roles, part, strict=True):
            assert y.shape == (3, 3, 16, 4)
            assert torch.allclose(y, whole[role], atol=1e-12)


@pytest.mark.parametrize("roles", ["qkv", "qv", "v"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("config", [*CONFIGS, SNE(hidden_bias=False), FSNE(hidden_bias=False)], ids=spell)
def test_cost_counts_what_is_built_and_run(config, bias, roles):
    site = Site(dim=12, heads=2, width=5, grid=GRID, qkv_bias=bias)
    shared = config.shared(roles)
    made = config.build(site, roles, shared)
    cost = config.cost(site, roles)
    assert cost.params == sum(p.numel() for p in made.parameters())
    assert cost.flops == count_flops(made, torch.randn(1, 16, 12), roles)


def test_cross_attention_asks_for_queries_of_one_input_and_the_rest_of_another():
    site = Site(dim=12, heads=3, grid=Grid.sequence(4), memory=GRID)
    layer = Softmax(projection=FSNE(code=5)).build_cross(site).double()
    x, memory = torch.randn(2, 4, 12, dtype=F64), tokens(2)
    out = layer(x, Grid.sequence(4), memory=memory, memory_grid=GRID)
    q, k, v = (
        y.unflatten(-1, (3, 4)).transpose(1, 2)
        for y in (literal(layer.qkv, x, "q"), literal(layer.qkv, memory, "k"), literal(layer.qkv, memory, "v"))
    )
    expected = (q @ k.mT / 2).softmax(-1) @ v
    assert torch.allclose(out, layer.proj(expected.transpose(1, 2).flatten(2)), atol=1e-12)


def test_initial_values_follow_xcit_and_codes_are_never_zero():
    site = Site(dim=64, heads=4, grid=GRID)
    for config in (SNE(), PSNE(), FSNE()):
        made = config.build(site, "qkv")
        for name, p in made.named_parameters():
            if name.startswith("weight"):
                assert 0.018 < p.std() < 0.022, name
            elif name.startswith("bias"):
                assert not p.any(), name
    norms = torch.cat([Codes("qkv", 8).weight for _ in range(50)]).norm(dim=1)
    assert 2.5 < norms.mean() < 3.0  # about sqrt(8)


def test_kaiming_keeps_the_variance():
    site = Site(dim=64, heads=4, grid=GRID)
    x = torch.randn(64, 16, 64)
    for config in (SNE(init="kaiming"), PSNE(init="kaiming"), FSNE(init="kaiming", code=64)):
        for y in config.build(site, "qkv")(x, "qkv"):
            assert 0.6 < y.square().mean() < 1.8, spell(config)


def test_reset_draws_the_weights_anew_and_leaves_shared_codes():
    codes = Codes("qkv", 8)
    before = codes.weight.detach().clone()
    made = FSNE().build(SITE, "qkv", codes)
    first = made.weight1.detach().clone()
    made.reset_parameters()
    assert not torch.equal(first, made.weight1)
    assert torch.equal(before, codes.weight)
    alone = FSNE().build(SITE, "qkv")
    before = alone.codes.weight.detach().clone()
    alone.reset_parameters()
    assert not torch.equal(before, alone.codes.weight)


class Owner(nn.Module):
    """A model of two layers that have their codes in common."""

    def __init__(self):
        super().__init__()
        config = Softmax(projection=FSNE(code=5))
        self.regard_shared = config.shared()
        self.layers = nn.ModuleList(config.build(SITE, self.regard_shared) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, GRID)
        return x


def tied(model):
    return all(layer.qkv.codebook is model.regard_shared for layer in model.layers)


def test_codes_are_saved_once():
    model = Owner()
    assert [name for name in model.state_dict() if "code" in name or "shared" in name] == ["regard_shared.weight"]
    assert sum(p.numel() for p in model.parameters()) == 15 + sum(
        Softmax(projection=FSNE(code=5)).cost(SITE).params for _ in range(2)
    )
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})


def test_copies_keep_the_tie_and_have_their_own_codes():
    model = Owner()
    other = copy.deepcopy(model)
    assert tied(model)
    assert tied(other)
    assert other.regard_shared is not model.regard_shared
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert tied(torch.load(buffer, weights_only=False))
    assert tied(model.double())


def test_functional_call_replaces_the_codes_of_every_layer():
    model = Owner().double()
    x = tokens()
    state = {name: value + 0.1 for name, value in model.state_dict().items()}
    moved = copy.deepcopy(model)
    moved.load_state_dict(state)
    assert torch.allclose(torch.func.functional_call(model, state, x), moved(x), atol=1e-12)


def test_one_training_step_moves_the_codes_that_all_layers_see():
    model = Owner().double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    before = model.regard_shared.weight.detach().clone()
    x = tokens()
    model(x).square().mean().backward()
    whole = model.regard_shared.weight.grad.clone()
    # the gradient is the sum over layers: each layer with codes of its own
    parts = []
    for i in range(2):
        other = copy.deepcopy(model)
        own = Codes("qkv", 5).double()
        own.load_state_dict(model.regard_shared.state_dict())
        other.layers[i].qkv._shared = (own,)
        other(x).square().mean().backward()
        parts.append(own.weight.grad)
    assert torch.allclose(whole, sum(parts), atol=1e-12)
    assert min(part.norm() for part in parts) > 1e-6
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(before, model.regard_shared.weight)
    assert tied(model)


def test_own_codes_are_registered_where_nothing_is_shared():
    alone = FSNE(code=5).build(SITE, "qkv")
    assert "codes.weight" in alone.state_dict()
    assert alone.codes.no_weight_decay() == {"weight"}
    untied = FSNE(code=5, tied=False)
    assert untied.shared("qkv") is None
    assert "codes.weight" in untied.build(SITE, "qkv").state_dict()
    assert untied.cost(SITE, "qkv").params == FSNE(code=5).cost(SITE, "qkv").params + 15


def test_biases_are_vectors():
    """An optimiser that decays matrices only must not decay biases."""
    for config in CONFIGS:
        for name, p in config.build(SITE, "qkv").named_parameters():
            assert p.ndim == (1 if name.startswith("bias") else 2), name


@pytest.mark.parametrize(
    ("config", "nano", "tiny"),
    [
        (SNE(), 64, 96),
        (PSNE(), 96, 144),
        (FSNE(code=8), 128, 192),
        (SNE(width="matched"), 64, 96),
        (PSNE(width="matched"), 96, 144),
        (FSNE(code=8, width="matched"), 186, 282),
        (FSNE(code=16, width="matched"), 180, 276),
        (SNE(layers=3), 53, None),
        (SNE(layers=4), 46, None),
    ],
    ids=lambda value: spell(value) if not isinstance(value, int | None) else str(value),
)
def test_hidden_widths_of_the_paper(config, nano, tiny):
    for dim, width in ((128, nano), (192, tiny)):
        if width is not None:
            assert config.hidden(Site(dim=dim, heads=4, grid=GRID), "qkv") == width


@pytest.mark.parametrize("config", [SNE(), SNE(layers=4), PSNE(), FSNE(code=3)], ids=spell)
@pytest.mark.parametrize("roles", ["qkv", "qv"])
def test_matched_is_the_widest_that_is_no_larger_than_linear(config, roles):
    site = Site(dim=20, heads=3, width=8, grid=GRID, qkv_bias=False)
    fields = {field: getattr(config, field) for field in ("layers", "code") if hasattr(config, field)}
    h = type(config)(width="matched", **fields).hidden(site, roles)
    counts = [type(config)(width=w, **fields).cost(site, roles).params for w in (h, h + 1)]
    linear = LinearQKV().cost(site, roles).params
    assert counts[0] <= linear < counts[1]


# Table 2, XCiT-N12 and XCiT-T12 with 1000 classes: parameters with biases in (both, second, no) layers
XCIT = {"nano": (128, 3053224, 1.1019), "tiny": (192, 6716272, 2.4603)}
TABLE = [
    ("nano", SNE(width=64), (3055528, 3053224, 3048616), 1.1019),
    ("nano", PSNE(width=96), (3053608, 3050152, 3048616), 1.2175),
    ("nano", FSNE(code=8), (2867392, 2865856, 2864320), 1.1790),
    ("nano", FSNE(code=8, width=186), (3051832, 3049600, 3048064), 1.3188),
    ("nano", FSNE(code=16), (2879704, 2878168, 2876632), 1.1791),
    ("nano", FSNE(code=16, width=182), (3056608, 3054424, 3052888), 1.3092),
    ("nano", FSNE(code=32), (2904328, 2902792, 2901256), 1.1793),
    ("nano", FSNE(code=64), (2953576, 2952040, 2950504), 1.1796),
    ("tiny", SNE(width=96), (6719728, 6716272, 6709360), 2.4603),
    ("tiny", PSNE(width=144), (6716848, 6711664, 6709360), 2.7204),
    ("tiny", FSNE(code=8), (6290056, 6287752, 6285448), 2.6338),
    ("tiny", FSNE(code=8, width=282), (6714496, 6711112, 6708808), 2.9590),
    ("tiny", FSNE(code=16), (6308512, 6306208, 6303904), 2.6339),
    ("tiny", FSNE(code=16, width=276), (6712720, 6709408, 6707104), 2.9375),
    ("tiny", FSNE(code=32), (6345424, 6343120, 6340816), 2.6341),
    ("tiny", FSNE(code=64), (6419248, 6416944, 6414640), 2.6346),
]


@pytest.mark.parametrize(("size", "config", "counts", "gflops"), TABLE)
def test_xcit_counts_of_table_2(size, config, counts, gflops):
    dim, base, base_gflops = XCIT[size]
    fields = {f: getattr(config, f) for f in ("width", "code") if hasattr(config, f)}
    shared = 3 * config.code if isinstance(config, FSNE) else 0
    for (hidden, bias), count in zip(((True, True), (False, True), (True, False)), counts, strict=True):
        site = Site(dim=dim, heads=4, grid=Grid(14, 14), qkv_bias=bias)
        plain = XCA().cost(Site(dim=dim, heads=4, grid=Grid(14, 14))).params
        row = XCA(projection=type(config)(hidden_bias=hidden, **fields)).cost(site)
        assert base + 12 * (row.params - plain) + shared == count
    site = Site(dim=dim, heads=4, grid=Grid(14, 14))
    more = XCA(projection=config).cost(site).flops - XCA().cost(site).flops
    assert base_gflops + 12 * more / 1e9 == pytest.approx(gflops, abs=1.1e-4)


@pytest.mark.parametrize(
    ("projection", "count"),
    [
        (SNE(width=96), 5720872),
        (PSNE(width=144), 5717992),
        (FSNE(code=8), 5291200),
        (FSNE(code=8, width=282), 5715640),
    ],
    ids=spell,
)
def test_deit_tiny_counts(projection, count):
    site = Site(dim=192, heads=3, grid=Grid(14, 14, 1))
    more = Softmax(projection=projection).cost(site).params - Softmax().cost(site).params
    shared = 3 * projection.code if isinstance(projection, FSNE) else 0
    assert 5717416 + 12 * more + shared == count


def test_timm_xcit_nano_has_the_base_count():
    timm = pytest.importorskip("timm")
    model = timm.create_model("xcit_nano_12_p16_224")
    assert sum(p.numel() for p in model.parameters()) == XCIT["nano"][1]


def test_autocast_gives_half_precision_roles():
    made = FSNE().build(SITE, "qkv")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {y.dtype for y in made(torch.randn(2, 16, 12), "qkv")} == {torch.bfloat16}


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SNE(width=0), "at least 1"),
        (lambda: PSNE(width="half"), "matched"),
        (lambda: FSNE(width=2.5), "whole number"),
        (lambda: FSNE(code=0), "code=0"),
        (lambda: SNE(layers=0), "layers=0"),
        (lambda: SNE(layers=1, width=64), "layers=1 has no hidden layer, so no width=64"),
        (lambda: SNE(init="zeros"), "trunc_normal"),
        (lambda: SNE(activation="tanh"), "relu"),
        (lambda: SNE().build(Site(dim=1, heads=1, grid=GRID), "qkv"), "pass width="),
        (lambda: FSNE(code=8).build(SITE, "qkv", Codes("qkv", 4)), "needs codes of the roles 'qkv'"),
        (lambda: FSNE(code=8).build(SITE, "qkv", Codes("qv", 8)), "not 'qv' of 8"),
        (lambda: FSNE(code=8).build(SITE, "qkv", nn.Linear(2, 2)), "not Linear"),
    ],
)
def test_wrong_use_says_what_was_expected(make, words):
    check_error(ConfigError, words, make)


@pytest.mark.untyped
def test_compiles_as_one_graph():
    model = Owner().double()
    x = tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-12)
    with torch.no_grad():
        model.regard_shared.weight.add_(1.0)
    assert torch.allclose(compiled(x), model(x), atol=1e-12)
