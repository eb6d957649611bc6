"""Maps of each factor: against the layer's own weights, the plain logits, and what each term can depend on."""

import pytest
import torch
from torch import nn

from regard.core import ConfigError, Grid, GridError, UnsupportedError
from regard.explain.factor_terms import TermMaps, term_maps
from regard.explain.layer_inputs import effective_cells, layers_of, query_cells, select_parts
from regard.mixers.factors.factors import Factors, FactorsOperator, factor_logits
from regard.mixers.factors.inputs import strided_tokens
from regard.mixers.softmax import Softmax
from regard.models.create import create_model
from regard.swapping.swap import swap

VIT = "vit_desk(size=(12, 20), patch=4, dim=16, depth=2, heads=2)"  # 3 rows, 5 columns
CLASS = "vit_tiny_patch16_224(img_size=(32, 48), patch_size=8, depth=1, embed_dim=16, num_heads=2, reg_tokens=1)"
ALL_TERMS = [f"{number:04b}" for number in range(16)]
CASES = {
    "plain": (VIT, {}),
    "class token and register": (CLASS, {}),
    "window": (VIT, {"window": 3}),
    "stride and window": (VIT, {"stride": 2, "window": 5}),
    "mmcv": (CLASS, {"preset": "mmcv"}),
    "scale of heads": (VIT, {"scale": None, "base": 100.0}),
}


def factors_model(host: str, config: Factors | Softmax, spread: float = 0.4) -> nn.Module:
    """In float64, with weights large enough that maps differ."""
    torch.manual_seed(0)
    model = create_model(host, config).double().eval()
    for value in model.parameters():
        nn.init.normal_(value, std=spread)
    return model


def image(host: str = VIT, seed: int = 1) -> torch.Tensor:
    size = (32, 48) if host == CLASS else (12, 20)
    return torch.randn(3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inside(model: nn.Module, x: torch.Tensor) -> dict:
    """What the first operator was called with: the operator, q, k, v and its keywords."""
    visible: dict = {}
    operator = next(module for module in model.modules() if isinstance(module, FactorsOperator))

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        visible.update(operator=module, q=args[0], k=args[1], v=args[2], **kwargs)

    handle = operator.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(x[None])
    handle.remove()
    return visible


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("terms", ["1111", "0110", "1001", "0001", "0000"])
def test_all_terms_together_are_the_map_of_the_layer(terms: str, case: str) -> None:
    host, options = CASES[case]
    if terms == "0000":  # which has no positions
        options = {name: value for name, value in options.items() if name != "base"}
    model, x = factors_model(host, Factors(terms=terms, **options)), image(host)
    maps = term_maps(model, x, (2, 1))[0]
    visible = inside(model, x)
    grid, operator = visible["grid"], visible["operator"]
    with torch.no_grad():
        rows = operator.weights(visible["q"], visible["k"], visible["v"], grid=grid)[
            0, :, grid.prefix + 2 * grid.width + 1
        ]
    assert maps.cell == (2, 1)
    assert rows.shape == maps.weights("all").shape
    assert torch.allclose(maps.weights("all"), rows, rtol=0, atol=1e-12)
    kept = strided_tokens(grid, operator.stride, rows.device)
    hidden = torch.ones(grid.tokens, dtype=torch.bool).index_fill(0, kept, False)
    assert not maps.weights("all")[:, hidden].any()


def test_layers_are_named_after_the_port_alone() -> None:
    swapped = swap(create_model("vit_desk(dim=16, depth=1)", None), Factors())
    model = nn.ModuleDict({"body": nn.ModuleDict({"regard_vit": swapped})})
    assert list(layers_of(model, FactorsOperator)) == ["body.regard_vit.blocks.0.attn"]


@pytest.mark.parametrize("terms", [terms for terms in ALL_TERMS if terms != "0000"])
def test_every_term_has_the_logits_of_the_plain_form(terms: str) -> None:
    model, x = factors_model(CLASS, Factors(terms=terms, scale=0.7)), image(CLASS)
    (maps,), visible = term_maps(model, x, (3, 4)), inside(model, x)
    grid, operator = visible["grid"], visible["operator"]
    with torch.no_grad():
        tables = operator.tables(grid, grid)
        plain = factor_logits(
            visible["q"], visible["k"], terms=terms, grid=grid, tables=tables, u=operator.u, t=operator.t
        )
    assert list(maps.logits) == list(plain) == [f"E{i + 1}" for i in range(4) if terms[i] == "1"]
    for name, logits in plain.items():
        expected = 0.7 * logits[0, :, grid.prefix + 3 * grid.width + 4]
        assert torch.allclose(maps.logits[name], expected, rtol=0, atol=1e-12)
        assert torch.allclose(maps.weights(name), expected.softmax(-1), rtol=0, atol=1e-12)
    assert maps.names == (*plain, "all")


def test_extra_tokens_get_a_share_but_no_position() -> None:
    maps = term_maps(factors_model(CLASS, Factors(terms="0110")), image(CLASS))[0]
    assert (maps.keys.prefix, maps.keys.cells) == (2, 24)
    assert (maps.logits["E2"][:, :2] == 0).all()
    assert (maps.logits["E3"][:, :2] != 0).all()
    assert 0.5 < float(maps.map("E2").sum((1, 2)).max()) < 1


def test_where_queries_have_a_stride_the_cell_that_asks_looks() -> None:
    model, x = factors_model(VIT, Factors(terms="1111", query_stride=2)), image()
    maps, exact = term_maps(model, x, (1, 3))[0], term_maps(model, x, (0, 2))[0]
    assert maps.cell == (0, 2)
    assert torch.equal(maps.weights("all"), exact.weights("all"))
    twin = factors_model(VIT, Factors(terms="1111"))
    twin.load_state_dict(model.state_dict())
    assert torch.allclose(term_maps(twin, x, (0, 2))[0].weights("all"), exact.weights("all"), rtol=0, atol=1e-12)


def test_layers_of_a_resnet_look_from_the_cell_below() -> None:
    host = "attended_resnet18(channels=(8, 8, 16, 16), stem=1, img_size=(12, 20), stages=(2, 3), heads=2)"
    model = create_model(host, Factors(terms="0010"))
    maps = term_maps(model.eval(), torch.randn(3, 12, 20), (5, 4))
    assert [(one.layer, one.grid.height, one.grid.width, one.cell) for one in maps] == [
        ("layer2.0.attn", 6, 10, (5, 4)),
        ("layer2.1.attn", 6, 10, (5, 4)),
        ("layer3.0.attn", 3, 5, (2, 2)),
        ("layer3.1.attn", 3, 5, (2, 2)),
    ]
    assert [one.layer for one in term_maps(model, torch.randn(3, 12, 20), layers="layer3.*")] == [
        "layer3.0.attn",
        "layer3.1.attn",
    ]


def test_the_model_is_left_as_it_was() -> None:
    model = factors_model(VIT, Factors(terms="1010")).train()
    model.blocks[0].eval()  # type: ignore[union-attr, index, operator]
    before = [module.training for module in model.modules()]
    term_maps(model, image())
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules() if isinstance(module, FactorsOperator))


def test_what_has_no_terms_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no layer with Factors"):
        term_maps(factors_model(VIT, Softmax()), image())
    model = factors_model(VIT, Factors(terms="0010"))
    with pytest.raises(ConfigError, match="blocks.0.attn, blocks.1.attn"):
        term_maps(model, image(), layers="stages.*")
    with pytest.raises(GridError, match="rows 0 to 2, columns 0 to 4"):
        term_maps(model, image(), (3, 0))


def test_windows_of_a_swin_transformer_have_no_map_of_the_image() -> None:
    host = "swin_tiny_patch4_window7_224(img_size=32, window_size=4, depths=(1,), embed_dim=8, num_heads=(2,))"
    model = swap(create_model(host, None), Factors(terms="0011"))
    with pytest.raises(UnsupportedError, match="in parts"):
        term_maps(model, torch.randn(3, 32, 32))


# where a query lies, how far weights spread, which heads


def test_cells_lie_below_the_centre_of_the_query() -> None:
    grids = {"a": Grid(6, 10), "b": Grid(3, 5), "c": Grid(2, 2, prefix=1)}
    assert query_cells(grids, (0, 9)) == {"a": (0, 9), "b": (0, 4), "c": (0, 1)}
    assert query_cells(grids, (3, 4)) == {"a": (3, 4), "b": (1, 2), "c": (1, 0)}
    assert query_cells(grids, None)["a"] == (3, 5)


def test_equal_weights_cover_all_their_cells() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    assert torch.allclose(effective_cells(weights), torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64))


def test_heads_are_picked_by_mean_number_or_all() -> None:
    values = torch.tensor([[1.0], [3.0]])
    assert [(name, float(value)) for name, value in select_parts(values, "all", "head")] == [
        ("mean of 2 heads", 2.0),
        ("head 0", 1.0),
        ("head 1", 3.0),
    ]
    assert [float(value) for _, value in select_parts(values, "1", "head")] == [3.0]
    with pytest.raises(ConfigError, match="mean or 0 to 1"):
        select_parts(values, "2", "head")


def test_the_bias_of_a_mask_joins_the_sum_and_hides_keys() -> None:
    logits = {"E3": torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)}
    bias = torch.tensor([[1.0, 0.0, -torch.inf]], dtype=torch.float64)
    maps = TermMaps(layer="", grid=Grid(1, 3), keys=Grid(1, 3), cell=(0, 0), logits=logits, bias=bias)
    assert torch.allclose(maps.weights("all")[0, :2], torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert torch.allclose(maps.weights("E3")[0, :2], torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(-1))
    assert maps.weights("E3")[0, 2] == maps.weights("all")[0, 2] == 0


def test_frames_lie_side_by_side() -> None:
    model = create_model("vit_desk_video(size=(14, 21), frames=4, patch=7, dim=16, depth=1)", Factors()).double()
    clip = torch.randn(3, 4, 14, 21, dtype=torch.float64)
    (maps,) = term_maps(model, clip, (1, 7))  # of frame 2, column 1
    visible = inside(model, clip)
    grid = visible["grid"]
    rows = visible["operator"].weights(visible["q"], visible["k"], visible["v"], grid=grid)[0, :, (2 * 2 + 1) * 3 + 1]
    assert torch.allclose(maps.weights("all"), rows, rtol=0, atol=1e-12)
    assert maps.map("all").shape == (2, 2, 12)
    assert torch.equal(maps.map("all")[:, 1, 7], maps.weights("all")[:, (2 * 2 + 1) * 3 + 1])
    assert (grid.sides, maps.grid) == ((4, 2, 3), Grid(2, 12))
