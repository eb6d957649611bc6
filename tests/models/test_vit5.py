"""ViT-5 against its equations, its published sizes, and with mechanisms swapped in."""

import cmath

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Grid
from regard.lab.studies.mita.printed import VIT5
from regard.lab.studies.published_sizes import verdict
from regard.lab.train.optimizer import param_groups
from regard.measure.cost import model_cost
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.models.catalog import list_models
from regard.models.create import create_model
from regard.swapping.swap import swap
from small_hosts import draw_large_weights, vit5


def ready(grid: tuple[int, int] = (4, 6)) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    model, _ = vit5()
    draw_large_weights(model)
    return model.double().eval(), torch.randn(2, 3, 8 * grid[0], 8 * grid[1], dtype=torch.float64)


# the host itself


def by_hand(state: dict[str, Tensor], x: Tensor, number: int, patch: int, registers: int) -> Tensor:
    """ViT-5 from its description, rotations as complex numbers, one token after another.

    Rotary angles: row and column of a patch over 10000^(2j / (d/2)), of a register in its square over 100^(...).
    """
    get = state.__getitem__

    def rms(name: str, y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * get(f"{name}.weight")

    def turn(y: Tensor, places: list[tuple[int, int] | None]) -> Tensor:
        d = y.shape[-1]
        turned = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        columns = []
        for token, place in enumerate(places):
            factor = torch.ones(d // 2, dtype=torch.complex128)
            if place is not None:
                base = 100.0 if token >= len(places) - registers else 10000.0
                for j in range(d // 4):
                    rate = base ** (-2 * j / (d // 2))
                    for half in (0, 1):
                        factor[half * d // 4 + j] = cmath.exp(1j * place[half] * rate)
            columns.append(turned[:, :, token] * factor)
        return torch.view_as_real(torch.stack(columns, 2)).flatten(-2)

    patches = x.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5)
    h, w = patches.shape[1:3]
    y = F.linear(patches.flatten(3).flatten(1, 2), get("patch_embed.proj.weight").flatten(1))
    y = y + get("patch_embed.proj.bias") + get("pos_embed")
    y = torch.cat([get("cls_token").expand(len(x), -1, -1), y, get("reg_token").expand(len(x), -1, -1)], 1)
    side = int(registers**0.5)
    places = [None, *((i, j) for i in range(h) for j in range(w)), *((i, j) for i in range(side) for j in range(side))]
    for i in range(2):
        b = f"blocks.{i}"
        q, k, v = (
            F.linear(rms(f"{b}.norm1", y), part).unflatten(-1, (number, -1)).transpose(1, 2)
            for part in get(f"{b}.attn.qkv.weight").chunk(3)
        )
        q, k = turn(rms(f"{b}.attn.q_norm", q), places), turn(rms(f"{b}.attn.k_norm", k), places)
        out = ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        y = y + get(f"{b}.gamma_1") * F.linear(out, get(f"{b}.attn.proj.weight"), get(f"{b}.attn.proj.bias"))
        z = F.gelu(F.linear(rms(f"{b}.norm2", y), get(f"{b}.mlp.fc1.weight"), get(f"{b}.mlp.fc1.bias")))
        y = y + get(f"{b}.gamma_2") * F.linear(z, get(f"{b}.mlp.fc2.weight"), get(f"{b}.mlp.fc2.bias"))
    return F.linear(rms("norm", y)[:, 0], get("head.weight"), get("head.bias"))


def test_fact_4_23_vit5_is_its_equations() -> None:
    model, x = ready()
    with torch.no_grad():
        expected = by_hand(dict(model.named_parameters()), x, 2, 8, 4)
        assert (model(x) - expected).abs().max() <= 1e-11 * expected.abs().max()
        swap(model, Softmax())
        assert (model(x) - expected).abs().max() <= 1e-11 * expected.abs().max()


def test_matrices_alone_decay() -> None:
    model, _ = ready()
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "reg_token"}  # type: ignore[operator]
    names = {id(value): name for name, value in model.named_parameters()}
    decayed = {names[id(value)] for value in param_groups(model, 0.05)[0]["params"]}
    assert decayed == {name for name in names.values() if name.endswith("weight") and "norm" not in name}


def test_the_first_weights() -> None:
    torch.manual_seed(0)
    model = create_model("vit5_small(img_size=32, depth=1, drop_path_rate=0.05)", None)
    assert model.blocks[0].gamma_1.unique().tolist() == pytest.approx([1e-4])
    assert model.blocks[0].drop_path.drop_prob == 0.05
    for name in ("reg_token", "cls_token", "blocks.0.attn.qkv.weight", "head.weight"):
        assert model.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.head.bias.any()


# sizes


@pytest.mark.parametrize(
    ("mixer", "macs", "printed"),
    [
        pytest.param(Softmax(), 4.70, "4.7G", marks=pytest.mark.slow),
        pytest.param(MiTA(k=30), 4.47, "4.5G", marks=pytest.mark.slow),
        (MiTA(k=30, dwc=3), 4.48, "4.5G"),
    ],
)
def test_fact_section6_work_of_the_built_host(mixer: MiTA, macs: float, printed: str) -> None:
    """201 tokens; the built network has what the formula of the whole table says."""
    cost = model_cost("vit5_small", mixer)
    assert (cost.params, cost.macs) == VIT5.count(mixer)
    assert cost.macs / 1e9 == pytest.approx(macs, abs=0.0051)
    assert "R" in verdict(cost.macs, printed)
    assert "R" in verdict(cost.params, "22M")


# tokens and places


def test_another_size_stretches_the_places() -> None:
    """Twice as many rows: every second one is at the place of a built row; learned positions are resampled."""
    model, _ = ready()
    x = torch.randn(1, 3, 64, 48, dtype=torch.float64)
    with pytest.raises(AssertionError):
        model(x)
    built, stretched = model.rope(4, 6, x), model.rope(8, 6, x)
    cells = stretched[1:49].unflatten(0, (8, 6))
    assert torch.allclose(cells[::2].flatten(0, 1), built[1:25], atol=1e-12)
    host = "vit5_small(img_size=(32, 48), patch_size=8, embed_dim=32, depth=2, num_heads=2, dynamic_img_size=True)"
    free = create_model(host, MiTA(m=(2, 3), k=5)).double().eval()
    with torch.no_grad():
        assert free(x).shape == (1, 1000)
    assert free.blocks[1].attn.grid() == Grid(8, 6, 1, 4)
    free(torch.randn(1, 3, 32, 48, dtype=torch.float64))
    assert free.blocks[1].attn.grid() == Grid(4, 6, 1, 4)


def test_without_registers_or_head() -> None:
    model = create_model("vit5_small(img_size=32, depth=1, num_registers=0, num_classes=0)", MiTA(m=2, k=3))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 384)
    assert model.blocks[0].attn.grid() == Grid(2, 2, 1)
    model.reset_classifier(5)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


# with mechanisms


def test_landmarks_are_pooled_from_rotated_patches_only() -> None:
    """As the published MiTA for ViT-5: neither the class token nor registers are pooled."""
    model, x = ready()
    swap(model, MiTA(m=(2, 3), k=5))
    mixer = model.blocks[0].attn.mixer
    tokens, grid = model.tokens(x)
    q = mixer.project_heads(model.blocks[0].norm1(tokens), grid, model.rope(4, 6, x))["q"]
    image = q[:, :, 1:-4].mT.unflatten(-1, (4, 6)).flatten(1, 2)
    expected = F.adaptive_avg_pool2d(image, (2, 3)).flatten(2).unflatten(1, (2, 16)).mT
    assert torch.allclose(mixer.operator.pool(q, grid)[0], expected, atol=1e-12)
    assert mixer.site.grid == Grid(4, 6, 1, 4)
    assert (mixer.site.qk_norm, mixer.site.rotary, mixer.site.qkv_bias) == ("rms", True, False)


def test_names_and_features() -> None:
    assert list_models("vit5_*") == ["vit5_small", "vit5_base", "vit5_large", "vit5_xlarge"]
    small = "img_size=(32, 48), patch_size=8, embed_dim=32, depth=3, num_heads=2"
    maps = create_model(f"vit5_small({small})", MiTA(m=4, k=5), features_only=True, out_indices=(0, 2))
    found = maps.eval()(torch.randn(2, 3, 32, 48))
    assert [tuple(one.shape) for one in found] == [(2, 32, 4, 6)] * 2
    assert maps.feature_info.reduction() == [8, 8]


def test_half_precision_trains() -> None:
    model = create_model("vit5_small(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)", MiTA(m=4, k=5))
    model.bfloat16()(torch.randn(2, 3, 32, 32).bfloat16()).float().square().mean().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
