"""A swapped model in later use: masks, dropout, exchanged parts, copied blocks, tokens that were kept."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.core import GridError, SwapError, UnsupportedError
from regard.swapping.layer import Port
from regard.swapping.swap import plan_swap, restore, swap
from small_hosts import draw_large_weights, vit

WIDE, TALL = torch.ones(1, 3, 32, 64).cumsum(-1).sin(), torch.ones(1, 3, 64, 32).cumsum(-2).cos()


class Encoder(nn.Module):
    """nn.TransformerEncoder on 4 x 6 patches."""

    def __init__(self, registers: int = 0) -> None:
        super().__init__()
        self.img_size, self.patch_embed = (32, 48), nn.Conv2d(3, 32, 8, 8)
        self.registers = nn.Parameter(torch.randn(1, registers, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).mT
        return torch.cat([x, self.registers.expand(len(x), -1, -1)], 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(self.tokens(images))  # type: ignore[no-any-return]


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "boolean": lambda hidden: hidden,
    "of -inf": lambda hidden: torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf),
    "of -1e9": lambda hidden: hidden * -1e9,
}
READERS = (
    "Softmax(dwc=3)", "CSKA()", "SKA(dwc=3)", "Factors(dwc=3)", "TopK(k=5, indexer='lightning')",
    "TopK(k=5, indexer='spark', rank=2)", "Sparsifiner(m=8, k=5)", "MiTA(m=4, k=4)", "Agent(m=4)", "Linear()",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("given", MASKS)
@pytest.mark.parametrize("mixer", READERS)
def test_no_part_of_a_layer_reads_tokens_that_a_mask_hides(mixer: str, given: str) -> None:
    """Local branches, indexers and landmarks read tokens apart from the logits, to which torch adds the mask."""
    torch.manual_seed(0)
    model: Any = swap(Encoder().train(), mixer)  # training has no fast path
    draw_large_weights(model)
    hidden = torch.zeros(2, 24, dtype=torch.bool)
    hidden[1, 15:] = True
    x = model.tokens(torch.randn(2, 3, 32, 48))
    y = x.masked_fill(hidden[..., None], 5.0)
    results = [model.encoder(each, src_key_padding_mask=MASKS[given](hidden))[~hidden] for each in (x, y)]
    assert torch.equal(*results)
    assert (model.encoder(y)[~hidden] - results[0]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 25])
def test_a_row_for_all_queries_of_timm_hides_tokens(rows: int) -> None:
    model, images = vit()
    swap(model.eval(), "Softmax(dwc=3)")
    draw_large_weights(model)
    layer, x = model.blocks[0].attn, torch.randn(2, 25, 32)
    model(images)
    shown = (torch.arange(25) < 20)[None, None, None].expand(2, 1, rows, 25)
    y = torch.cat([x[:, :20], x[:, 20:] + 3], 1)
    assert torch.equal(layer(x, attn_mask=shown)[:, :20], layer(y, attn_mask=shown)[:, :20])


@torch.no_grad()
def test_what_a_row_adds_to_other_tokens_counts() -> None:
    host = Encoder().eval()
    attention, row = host.encoder.layers[0].self_attn, torch.linspace(-2, 2, 24).expand(2, -1).clone()
    row[1, 9:] = -torch.inf
    x = torch.randn(2, 24, 32)
    expected = attention(x, x, x, key_padding_mask=row)[0]
    model: Any = swap(host, "Softmax()")
    model(torch.randn(2, 3, 32, 48))
    layer = model.encoder.layers[0].self_attn
    torch.testing.assert_close(layer(x, x, x, key_padding_mask=row)[0], expected, rtol=0, atol=1e-5)
    with pytest.raises(UnsupportedError, match="bias"):
        swap(restore(model), "Linear()").encoder.layers[0].self_attn(x, x, x, key_padding_mask=row)


def _of_class(t: Tensor) -> Tensor:
    return t[:, :1].expand_as(t)


@pytest.mark.parametrize("query", [_of_class, torch.clone], ids=["one token", "a copy"])
def test_queries_that_only_look_like_the_keys_are_refused(query: Callable[[Tensor], Tensor]) -> None:
    model: Any = swap(Encoder().eval(), "Softmax()")
    model(torch.randn(2, 3, 32, 48))
    layer, x = model.encoder.layers[0].self_attn, torch.randn(2, 24, 32)
    with pytest.raises(UnsupportedError, match="separate keys or values"):
        layer(query(x), x, x)
    with pytest.raises(UnsupportedError, match="separate keys or values"):  # where tensors have no storage
        torch.func.vmap(lambda each: layer(query(each)[None], each[None], each[None])[0])(x)
    assert torch.equal(layer(x, x.view(2, 24, 32), x)[0], layer(x, x, x)[0])


def test_more_than_a_class_token_before_the_patches_is_said() -> None:
    """They may come last, or be object queries."""
    with pytest.warns(UserWarning, match="the first 3 of 27 tokens are taken for class and register tokens"):
        swap(Encoder(3), "Softmax()")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap(Encoder(1), "Softmax()")


def test_the_queries_of_a_decoder_lie_on_no_grid() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.across = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))

        def forward(self, queries: Tensor, x: Tensor) -> Tensor:
            queries = self.own(queries, queries, queries)[0]
            return self.across(queries, x, x)[0]  # type: ignore[no-any-return]

    class Detector(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        def forward(self, images: Tensor) -> Tensor:
            x = super().forward(images)
            return self.decoder(x.new_ones(len(x), 24, 32), x)  # type: ignore[no-any-return]

    model = swap(Detector(), "Window(size=2)")
    assert [name for name, part in model.named_modules() if isinstance(part, Port)] == ["encoder.layers.0.self_attn"]


def _spread(model: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        return float((model(images) - model(images)).abs().max())


@pytest.mark.parametrize("mixer", ["Softmax()", "PolaFormer()", "Conv()", "ViT3()"])
def test_dropout_of_the_output_is_a_module_as_in_the_host(mixer: str) -> None:
    model, images = vit(proj_drop_rate=0.5)
    swap(model.eval(), mixer)
    drops = [part for name, part in model.named_modules() if name.endswith("proj_drop") and ".attn." in name]
    assert [part.p for part in drops] == [0.5, 0.5]
    assert _spread(model, images) == 0
    for part in drops:
        part.train()  # Monte Carlo dropout
    assert _spread(model, images) > 0
    for part in drops:
        part.p = 0.0
    assert _spread(model, images) == 0
    assert restore(model).blocks[0].attn.proj_drop.p == 0


def test_parts_that_are_set_on_a_layer_are_used_or_said_to_be_unused() -> None:
    model, images = vit()
    layer = swap(model.eval(), "Softmax()").blocks[0].attn
    before = model(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.fused_attn = False
        layer.proj_drop = nn.Dropout(0.5)
        layer.q_norm = nn.LayerNorm(16)
    assert isinstance(layer.mixer.q_norm, nn.LayerNorm)
    assert (model(images) - before).abs().max() > 1e-5
    for name, value in (("scale", 0.1), ("num_heads", 4), ("norm", nn.LayerNorm(32)), ("attn_drop", nn.Dropout(0.5))):
        with pytest.warns(UserWarning, match=f"{name} is set on a swapped layer, which does not read it"):
            setattr(layer, name, value)
    static = swap(vit()[0], "SKA()").blocks[0].attn
    with pytest.warns(UserWarning, match="k_norm is set on a swapped layer"):
        static.k_norm = nn.LayerNorm(16)


@torch.no_grad()
def test_a_copied_block_of_the_same_model_has_the_grid_of_the_present_image() -> None:
    model, _ = vit(dynamic_img_size=True)
    swap(model.eval(), "Window(size=2)")
    model.blocks.append(copy.deepcopy(model.blocks[1]))
    for size in ((32, 48), (48, 80), (16, 64)):
        model(torch.randn(1, 3, *size))
        assert model.blocks[2].attn.grid() == model.blocks[1].attn.grid()
        assert model.blocks[2].attn.grid().sides == (size[0] // 8, size[1] // 8)


@torch.no_grad()
def test_kept_tokens_of_two_shapes_are_not_put_on_the_last_grid() -> None:
    model, _ = vit(dynamic_img_size=True)
    swap(model.eval(), "Window(size=2)", example=WIDE)
    calls: list[tuple[Tensor, Tensor]] = []
    handle = model.blocks[1].register_forward_hook(lambda block, args, output: calls.append((args[0], output)))
    model(WIDE)
    handle.remove()
    tokens, expected = calls[0]
    torch.testing.assert_close(model.blocks[1](tokens), expected)  # one shape was seen: nothing is doubtful
    model(TALL)
    with pytest.raises(GridError, match="may be 4x8 or 8x4, as many: pass the images through the whole model"):
        model.blocks[1](tokens)
    assert torch.isfinite(model(WIDE)).all()


def test_a_second_swap_says_what_it_takes_over() -> None:
    model = swap(vit()[0], "SKA()")
    site = plan_swap(model, "SKA(scale=1.0)").sites[0]
    assert "regard.operator.keys" in site.kept
    assert site.new == site.new_objects == []


@pytest.mark.parametrize("assign", [True, False])
def test_a_model_without_weights_is_swapped_loaded_and_restored(assign: bool) -> None:
    host, images = vit()
    state = host.eval().state_dict()
    with torch.device("meta"):
        model = vit()[0].eval()
    swap(model, "SKA()")
    if not assign:
        model.to_empty(device="cpu")
        with pytest.raises(SwapError, match="made without values: load the model's checkpoint"):
            restore(copy.deepcopy(model))
    model.load_state_dict(state, strict=False, assign=assign)
    for name, value in list(model.named_parameters()):
        if value.is_meta:
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(torch.zeros(value.shape)))
    assert torch.equal(restore(model)(images), host(images))
