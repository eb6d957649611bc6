"""MiTA with position biases that are a product: against every score written out, and in hosts of SAM."""

import pytest
import torch

from regard import Linear, MiTA, Softmax, swap
from regard.core import Grid, Mask, ShapeError, Site, UnsupportedError
from regard.mixers.mita.mita import mita
from regard.mixers.shared.landmarks import pool_matrix
from regard.swapping.special_mixers import decomposed_positions
from small_hosts import draw_large_weights

GRID = Grid(4, 6)


def written_out(q, k, v, bias, config: MiTA, scale: float) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Of one head. bias (N, N): a landmark has the mean of its queries, and is a key at the mean of its places."""
    pool = pool_matrix(GRID, config.m, dtype=q.dtype)
    probe = pool @ (q @ k.T * scale + bias)
    route = (q @ q.T * scale + bias) @ pool.T
    values = probe.softmax(-1) @ v
    out = []
    for row, best in enumerate(route.argmax(-1).tolist()):
        keys = probe[best].topk(config.k).indices
        logits = torch.cat([route[row], (q[row] @ k[keys].T) * scale + bias[row, keys]])
        out.append(logits.softmax(-1) @ torch.cat([values, v[keys]]))
    return torch.stack(out)


@pytest.mark.parametrize("m", [4, (2, 2), (2, 3)])
def test_selection_and_softmax_are_of_the_biased_logits(m) -> None:  # type: ignore[no-untyped-def]
    config = MiTA(m=m, k=5)
    operator = config.operator(Site(dim=16, heads=2, grid=GRID)).double()
    q, k, v = torch.randn(3, 2, 2, GRID.tokens, 8, dtype=torch.float64)
    product = decomposed_positions(q, GRID, torch.randn(7, 8).double(), torch.randn(11, 8).double())
    out = operator(q, k, v, grid=GRID, mask=Mask(product=product))
    assert torch.allclose(out, operator.reference(q, k, v, grid=GRID, mask=Mask(product=product)), atol=1e-12)
    bias = product[0] @ product[1].mT
    for image in range(2):
        for head in range(2):
            expected = written_out(*(x[image, head] for x in (q, k, v, bias)), config, 8**-0.5)
            assert torch.allclose(out[image, head], expected, atol=1e-12)


def test_padding_and_products_together() -> None:
    operator = MiTA(m=4, k=5).operator(Site(dim=16, heads=2, grid=GRID)).double()
    q, k, v = torch.randn(3, 1, 2, GRID.tokens, 8, dtype=torch.float64)
    keep = torch.ones(1, GRID.tokens, dtype=torch.bool)
    keep[:, 20:] = False
    mask = Mask(keep=keep, product=(torch.randn(1, 2, 24, 3).double(), torch.randn(24, 3).double()))
    out = operator(q, k, v, grid=GRID, mask=mask)
    other = operator(q, k, torch.cat([v[:, :, :20], torch.full_like(v[:, :, 20:], torch.nan)], 2), grid=GRID, mask=mask)
    assert torch.equal(out, other)
    assert torch.allclose(out, operator.reference(q, k, v, grid=GRID, mask=mask), atol=1e-12)


@pytest.mark.parametrize("name", ["SamVisionModel", "VitDetModel", "timm"])
def test_in_sam_experts_with_all_keys_are_softmax(name: str) -> None:
    """Without the landmarks' values, k = N is the host's attention with its biases."""
    model, images = host(name)
    plain = swap(model(), Softmax(), example=images).double().eval()
    draw_large_weights(plain)
    routed = (
        swap(model(), MiTA(m=(2, 2), k=16 if name == "SamVisionModel" else 24, branches="route"), example=images)
        .double()
        .eval()
    )
    routed.load_state_dict(plain.state_dict())
    with torch.no_grad():
        expected, found = (first_tensor(each(images.double())) for each in (plain, routed))
    assert torch.allclose(found, expected, atol=1e-10)


def first_tensor(output) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return output if isinstance(output, torch.Tensor) else output[0]


def host(name: str):  # type: ignore[no-untyped-def]
    """A function that builds a model with layers on maps of 4 x 6, and images."""
    if name == "timm":
        from timm.models.vision_transformer_sam import VisionTransformerSAM

        sizes = {"img_size": (64, 96), "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "window_size": 0}
        return lambda: VisionTransformerSAM(**sizes, use_rel_pos=True, neck_chans=8), torch.randn(2, 3, 64, 96)
    transformers = pytest.importorskip("transformers")
    if name == "VitDetModel":
        sizes = {"image_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.VitDetConfig(**sizes, use_relative_position_embeddings=True, window_block_indices=[])
        return lambda: transformers.VitDetModel(config), torch.randn(2, 3, 64, 96)
    sizes = {"image_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32}
    config = transformers.SamVisionConfig(**sizes, output_channels=8, global_attn_indexes=[0, 1], window_size=2)
    return lambda: transformers.SamVisionModel(config), torch.randn(2, 3, 64, 64)


def test_what_is_no_mean_of_places_takes_no_product() -> None:
    for config in (MiTA(landmarks="learned"), MiTA(preset="official"), MiTA(shared_expert="ttt")):
        assert "product" not in config.masks
    model, images = host("timm")
    with pytest.raises(UnsupportedError, match='passes a bias mask, which .* cannot apply.*host_bias="drop"'):
        swap(model(), MiTA(m=4, k=5, landmarks="learned"), example=images)
    q, k, v = torch.randn(3, 1, 1, 24, 8)
    with pytest.raises(UnsupportedError, match="takes no probes"):
        mita(q, k, v, q[:, :, :4], 5, probes=k[:, :, :4], execution="native")


def test_shapes_of_a_product_are_checked() -> None:
    layer, x = MiTA(m=4, k=5).build(Site(dim=16, heads=2, grid=GRID)), torch.randn(2, 24, 16)
    with pytest.raises(ShapeError, match=r"Mask.product is of \(2, 2, 23, 3\) and \(24, 3\)"):
        layer(x, GRID, Mask(product=(torch.randn(2, 2, 23, 3), torch.randn(24, 3))))
    mask = Mask(product=(torch.randn(2, 2, 24, 3), torch.randn(24, 3)))
    softmax = Softmax().build(Site(dim=16, heads=2, grid=GRID))
    assert torch.equal(softmax(x, GRID, mask), softmax(x, GRID, mask.with_bias()))
    with pytest.raises(UnsupportedError, match="Linear cannot apply a product mask"):
        Linear().build(Site(dim=16, heads=2, grid=GRID))(x, GRID, mask)
