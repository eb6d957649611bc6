"""Position biases that are a product, in mechanisms that choose keys: nothing of all pairs, and chosen by the biased
logits."""

import pytest
import torch

from regard import BRA, MoBA, Softmax, TopK, create_model, swap
from regard.core import Grid, Mask, Site
from regard.core.mask import join_product
from regard.mixers.shared.block_attention import block_tiles
from regard.mixers.topk.topk import topk
from small_hosts import draw_large_weights

GRID = Grid(4, 6)
SITE = Site(dim=16, heads=2, grid=GRID)


@pytest.fixture
def heads():
    """Queries, keys and values (2, 2, 24, 8) float64, and the factors of a bias."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, GRID.tokens, 8, dtype=torch.float64)
    return q, k, v, (torch.randn(2, 2, 24, 3).double(), torch.randn(24, 3).double())


@pytest.mark.parametrize("scale", [None, 0.3])
def test_products_of_the_further_channels_are_the_bias(heads, scale) -> None:
    q, k, _, product = heads
    wide_q, wide_k, mask, factor = join_product(q, k, Mask(product=product), scale)
    logits = q @ k.mT * (8**-0.5 if scale is None else scale) + product[0] @ product[1].mT
    assert torch.allclose(wide_q @ wide_k.mT * factor, logits, atol=1e-12)
    assert mask.kinds == frozenset()
    assert join_product(q, k, None, scale) == (q, k, None, scale)


@pytest.mark.parametrize("config", [MoBA(block=(2, 3), k=4), BRA(regions=(2, 2), k=4), TopK(k=24)])
@pytest.mark.parametrize("form", ["fast", "reference"])
def test_with_all_keys_they_are_softmax_with_the_bias(config, form, heads) -> None:
    q, k, v, product = heads
    keep = torch.ones(2, 24, dtype=torch.bool)
    keep[1, 20:] = False
    mask = Mask(keep=keep, product=product)
    operator = config.operator(SITE).double()
    found = (operator if form == "fast" else operator.reference)(q, k, v, grid=GRID, mask=mask)
    assert torch.allclose(found, Softmax().operator(SITE)(q, k, v, grid=GRID, mask=mask.with_bias()), atol=1e-12)


def test_blocks_are_chosen_by_their_mean_biased_logit(heads) -> None:
    q, k, v, product = heads
    logits = q @ k.mT * 8**-0.5 + product[0] @ product[1].mT
    cells = block_tiles(GRID, (2, 3), q.device).tables.cell  # (4, 6)
    best = logits[..., cells].mean(-1).argmax(-1)
    allowed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, cells[best], True)
    expected = logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    unbiased = (q @ k.mT)[..., cells].mean(-1).argmax(-1)
    assert (best != unbiased).any()
    operator = MoBA(block=(2, 3), k=1, own=False).operator(SITE).double()
    assert torch.allclose(operator(q, k, v, grid=GRID, mask=Mask(product=product)), expected, atol=1e-12)


@pytest.mark.parametrize("config", [TopK(k=5), TopK(k=5, indexer="spark", rank=4), TopK(k=5, indexer="lightning")])
def test_keys_are_chosen_as_with_the_bias_of_all_pairs(config, heads) -> None:
    q, k, v, product = heads
    operator = config.operator(SITE).double()
    found, expected = (
        operator(q, k, v, grid=GRID, mask=mask) for mask in (Mask(product=product), Mask(product=product).with_bias())
    )
    assert torch.allclose(found, expected, atol=1e-12)
    if config.indexer == "exact":
        assert not torch.allclose(found, topk(q, k, v, 5), atol=1e-3)


def test_they_take_the_biases_of_sam() -> None:
    images = torch.randn(2, 3, 64, 64).double()
    model = create_model(
        "samvit_base_patch16(img_size=64, embed_dim=32, depth=2, num_heads=2, window_size=0, neck_chans=8)"
    ).double().eval()  # fmt: skip
    draw_large_weights(model)
    expected = model(images)
    for config in (MoBA(block=(2, 2), k=4), BRA(regions=2, k=4), TopK(k=16)):
        swap(model, config)
        assert torch.allclose(model(images), expected, atol=1e-10)
