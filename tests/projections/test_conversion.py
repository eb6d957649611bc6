"""A start that keeps a linear projection, from scratch and in a swap; fusing where there is no activation."""

import copy

import pytest
import torch
from torch import nn

from operators import check_error
from regard.core import ConfigError, Grid, ShapeError, Site, UnsupportedError
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.projections.conversion import fuse, warm_start
from regard.projections.linear import LinearQKV, project_roles
from regard.projections.sne import FSNE, PSNE, SNE
from regard.swapping.swap import restore, swap

F64 = torch.float64
SITE = Site(dim=12, heads=3, grid=Grid(3, 5, 1))
DESK = "vit_desk(size=(16, 24), dim=24, depth=2, heads=2)"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def drawn(config, roles="qkv", site=SITE):
    made = config.build(site, roles).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def furthest(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        SNE(layers=1),
        SNE(width=24),
        SNE(width=31),
        SNE(width=24, hidden_bias=False),
        SNE(width=25, activation="gelu"),
        SNE(width=12),
        SNE(width=13, activation="none"),
        PSNE(width=24),
        PSNE(width=12),
    ],
    ids=spell,
)
@pytest.mark.parametrize("roles", ["qkv", "qv"])
def test_e6_and_e7_wide_enough_it_is_the_linear_projection(config, roles):
    linear, made, x = drawn(LinearQKV(), roles), drawn(config, roles), torch.randn(3, 16, 12, dtype=F64)
    wrong = warm_start(made, linear.weight, linear.bias)
    assert list(wrong) == list(roles)
    assert max(wrong.values()) < 1e-14
    assert furthest(made(x, roles), project_roles(linear, x, roles, roles, 3)) < 1e-12


def test_e6_holds_for_tokens_of_any_size_and_e7_does_not():
    linear, x = drawn(LinearQKV()), 100 * torch.randn(3, 16, 12, dtype=F64)
    made = {width: drawn(SNE(width=width)) for width in (12, 24)}
    for one in made.values():
        warm_start(one, linear.weight, linear.bias)
    assert furthest(made[24](x, "qkv"), project_roles(linear, x, "qkv", "qkv", 3)) < 1e-11
    assert furthest(made[12](x, "qkv"), project_roles(linear, x, "qkv", "qkv", 3)) > 1
    warm_start(made[12], linear.weight, linear.bias, tokens=x)
    assert furthest(made[12](x, "qkv"), project_roles(linear, x, "qkv", "qkv", 3)) < 1e-9


def test_e7_below_the_width_it_is_the_best_map_of_that_rank():
    """Eckart-Young: the error is what the singular values beyond the rank say."""
    site = Site(dim=12, heads=3, grid=SITE.grid, qkv_bias=True)
    linear, made = drawn(LinearQKV()), drawn(SNE(width=5), site=site)
    nn.init.zeros_(linear.bias)
    wrong = warm_start(made, linear.weight, linear.bias)
    x = torch.randn(1, 200, 12, dtype=F64)
    for i, role in enumerate("qkv"):
        weight = linear.weight[12 * i : 12 * i + 12]
        s = torch.linalg.svdvals(weight)
        assert wrong[role] == pytest.approx((s[5:].norm() / s.norm()).item())
        u, values, vh = torch.linalg.svd(weight)
        best = x @ (u[:, :5] * values[:5] @ vh[:5]).T
        assert torch.allclose(made(x, role)[0].transpose(1, 2).flatten(2), best, atol=1e-12)


def test_of_low_rank_weights_nothing_is_lost():
    linear, made, x = drawn(LinearQKV()), drawn(SNE(width=5)), torch.randn(2, 16, 12, dtype=F64)
    with torch.no_grad():
        for block in linear.weight.chunk(3):
            block.copy_(torch.randn(12, 5, dtype=F64) @ torch.randn(5, 12, dtype=F64))
    assert max(warm_start(made, linear.weight, linear.bias).values()) < 1e-13
    assert furthest(made(x, "qkv"), project_roles(linear, x, "qkv", "qkv", 3)) < 1e-11


def test_psne_below_the_width_takes_the_directions_that_matter_to_all_roles():
    linear, made = drawn(LinearQKV()), drawn(PSNE(width=9))
    nn.init.zeros_(linear.bias)
    wrong = warm_start(made, linear.weight, linear.bias)
    s = torch.linalg.svdvals(torch.cat(list(linear.weight.chunk(3)), 1))
    lost = sum(wrong[r] ** 2 * w.square().sum().item() for r, w in zip("qkv", linear.weight.chunk(3), strict=True))
    assert lost == pytest.approx(s[9:].square().sum().item())


def test_units_that_are_left_free_can_learn():
    linear, made = drawn(LinearQKV()), SNE(width=31).build(SITE, "qkv").double()
    warm_start(made, linear.weight, linear.bias)
    made(torch.randn(2, 16, 12, dtype=F64), "q")[0].square().sum().backward()
    assert made.weight2.grad[:12, 24:].norm() > 0


@pytest.mark.parametrize(
    "config", [SNE(init="svd"), SNE(init="svd", width=12), PSNE(init="svd"), SNE(init="svd", layers=1)]
)
def test_from_scratch_it_starts_as_a_linear_projection_does(config):
    """Additive and of the variance of LinearQKV: f(x + y) = f(x) + f(y), as biases are 0."""
    site = Site(dim=32, heads=2, grid=SITE.grid)
    made = (type(config)(**{**vars(config), "width": None if config.width is None else 32})).build(site, "qkv").double()
    x, y = torch.randn(2, 4, 16, 32, dtype=F64)
    for a, b, both in zip(made(x, "qkv"), made(y, "qkv"), made(x + y, "qkv"), strict=True):
        assert torch.allclose(a + b, both, atol=1e-6)
        assert 0.1 < a.square().mean() < 0.5  # a uniform matrix of variance 1 / (3 C): 1/3, less what the rank cuts


@pytest.mark.parametrize("config", [SNE(layers=3), PSNE(), FSNE(code=5), SNE(layers=1, activation="relu")], ids=spell)
@pytest.mark.parametrize("bias", [True, False])
def test_without_activation_everything_is_fused(config, bias):
    fields = {**vars(config), "activation": "none" if getattr(config, "layers", 2) > 1 else "relu"}
    site = Site(dim=12, heads=2, width=5, grid=SITE.grid, qkv_bias=bias)
    made, x = drawn(type(config)(**fields), "qv", site), torch.randn(3, 16, 12, dtype=F64)
    fused = fuse(made)
    assert furthest(project_roles(fused, x, "qv", "vq", 2), made(x, "vq")) < 1e-12
    assert not {id(p) for p in fused.parameters()} & {id(p) for p in made.parameters()}


def test_fusing_shared_codes_leaves_them_as_they_are():
    config = FSNE(code=5, activation="none")
    codes = config.shared("qkv")
    made = config.build(SITE, "qkv", codes)
    fused = fuse(made)
    assert codes.weight.dtype == torch.float32
    x = torch.randn(2, 16, 12)
    assert furthest(project_roles(fused, x, "qkv", "qkv", 3), made(x, "qkv")) < 1e-6


@pytest.mark.parametrize("mixer", [Softmax, SKA])
def test_a_swap_starts_from_the_hosts_weights(mixer):
    host = create_model(DESK, None).double().eval()
    for parameter in host.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 3, 16, 24, dtype=F64)
    plain, made = (
        swap(copy.deepcopy(host), mixer(projection=projection))
        for projection in (LinearQKV(), SNE(init="svd", width=48))
    )
    others = {key: value for key, value in plain.state_dict().items() if "regard" in key and "qkv" not in key}
    made.load_state_dict(others, strict=False)  # what SKA draws for itself
    assert torch.allclose(made(x), plain(x), atol=1e-10)
    back = restore(made)
    assert torch.equal(back.blocks[0].attn.qkv.weight, host.blocks[0].attn.qkv.weight)


def test_a_plain_initialisation_takes_nothing_from_the_host():
    host = create_model(DESK, None)
    nn.init.constant_(host.blocks[0].attn.qkv.weight, 7.0)
    made = swap(host, Softmax(projection=SNE()))
    assert made.blocks[0].attn.regard.qkv.weight1.abs().max() < 0.2


def test_a_trained_embedding_is_kept_when_only_the_mechanism_changes():
    made = create_model(DESK, Softmax(projection=SNE(init="svd")))
    nn.init.constant_(made.blocks[1].attn.regard.qkv.weight1, 0.3)
    made = swap(made, Softmax(projection=SNE(init="svd"), scale=0.5))
    assert (made.blocks[1].attn.regard.qkv.weight1 == 0.3).all()


def test_saving_and_loading_keep_the_weights(tmp_path):
    made = create_model(DESK, Softmax(projection=PSNE(init="svd"))).eval()
    with torch.no_grad():
        made.blocks[0].attn.regard.qkv.weight1.add_(1.0)
    x = torch.randn(2, 3, 16, 24)
    assert torch.equal(load(save(made, tmp_path / "model"))(x), made(x))


@pytest.mark.parametrize("projection", [SNE(), PSNE(), FSNE(code=4)], ids=spell)
def test_checkpoints_of_host_and_swapped_model_differ_by_named_keys(projection):
    host, made = create_model(DESK, None), create_model(DESK, Softmax(projection=projection))
    own = {key for key in made.state_dict() if "regard" in key}
    found = made.load_state_dict(host.state_dict(), strict=False)
    assert set(found.missing_keys) == own
    assert not found.unexpected_keys
    back = host.load_state_dict(made.state_dict(), strict=False)
    assert set(back.unexpected_keys) == own
    assert all("attn.qkv" in key for key in back.missing_keys)
    check_error(RuntimeError, r"regard\.qkv\.weight1", made.load_state_dict, host.state_dict())
    check_error(RuntimeError, r"regard\.qkv\.weight1", host.load_state_dict, made.state_dict())


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: warm_start(drawn(FSNE()), torch.zeros(36, 12), None), UnsupportedError, "only SNE and P-SNE"),
        (lambda: warm_start(drawn(SNE(layers=3)), torch.zeros(36, 12), None), UnsupportedError, "two layers"),
        (lambda: warm_start(drawn(SNE()), torch.zeros(24, 12), None), ShapeError, r"\(36, 12\) here, not \(24, 12\)"),
        (lambda: warm_start(drawn(SNE()), torch.zeros(36, 12), torch.zeros(12)), ShapeError, "bias"),
        (lambda: warm_start(bare(), torch.zeros(36, 12), torch.zeros(36)), ConfigError, "without biases"),
        (lambda: warm_start(bare(1), torch.zeros(36, 12), None), ConfigError, "width=2"),
        (lambda: fuse(drawn(SNE())), UnsupportedError, "'relu'.*not linear"),
        (lambda: FSNE(init="svd"), ConfigError, "no init='svd'"),
        (lambda: SNE(init="svd", layers=3), ConfigError, "1 or 2 layers"),
        (lambda: SNE(layers=2.0), ConfigError, "layers=2.0"),
        (lambda: SNE(layers=True), ConfigError, "layers=True"),
        (lambda: FSNE(code=1.5), ConfigError, "code=1.5"),
        (lambda: drawn(SNE()).load_state_dict(drawn(LinearQKV()).state_dict()), RuntimeError, "warm_start"),
        (
            lambda: drawn(FSNE()).load_state_dict(drawn(LinearQKV()).state_dict(), strict=False),
            RuntimeError,
            "of a linear",
        ),
        (
            lambda: layer(LinearQKV()).load_state_dict(layer(SNE()).state_dict()),
            RuntimeError,
            r"qkv.weight1 belongs to an embedding with hidden layers.*load it into a model with the projection that",
        ),
    ],
)
def test_wrong_use_says_what_was_expected(make, error, words):
    check_error(error, words, make)


def layer(projection):
    return Softmax(projection=projection).build(SITE)


def bare(width=12):
    return drawn(SNE(width=width), site=Site(dim=12, heads=3, grid=SITE.grid, qkv_bias=False))
