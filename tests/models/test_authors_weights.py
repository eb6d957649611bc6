"""The authors' checkpoints give the authors' logits, and nothing in a file is executed."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published_layers import mita_by_query
from regard.core import ConfigError, StoreError
from regard.models.authors_weights import load_mita
from regard.models.create import create_model

LANDMARKS, KEYS = 9, 7


class Official(nn.Module):
    """The published layer of DeiT, written down plainly from its description."""

    def __init__(self, dim: int, heads: int, dwc: bool, gate: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gate
        self.add_module("qkvg" if gate else "qkv", nn.Linear(dim, (4 if gate else 3) * dim))
        self.proj = nn.Linear(dim, dim)
        self.dwc = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if dwc else None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **options: object) -> Tensor:
        b, n, c = x.shape
        parts = (self.qkvg if self.gated else self.qkv)(x).chunk(4 if self.gated else 3, -1)
        q, k, v = parts[:3]
        side, p = round((n - 1) ** 0.5), round(LANDMARKS**0.5)
        pooled = F.adaptive_avg_pool2d(q[:, :-1].mT.reshape(b, c, side, side), p).flatten(2).mT  # shifted by one token
        out = mita_by_query(q, k, v, pooled, self.heads, KEYS, twice=True)
        if self.dwc is not None:
            local = self.dwc(v[:, 1:].mT.reshape(b, c, side, side)).flatten(2).mT
            out = out + torch.cat([torch.zeros_like(out[:, :1]), local], 1)
        return self.proj(F.silu(parts[3]) * out if self.gated else out)


class Turn(nn.Module):
    """Rotary positions of a square of tokens, as ViT-5's code keeps them: the frequencies in a buffer."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.register_buffer("freqs", base ** (-torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, n, H, 2 width)."""
        side = round(x.shape[1] ** 0.5)
        angles = torch.arange(side, dtype=x.dtype)[:, None] * self.freqs
        both = torch.cat([angles[:, None].expand(-1, side, -1), angles.expand(side, -1, -1)], -1).flatten(0, 1)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(both), both)[:, None]).flatten(-2)


class OfficialViT5(nn.Module):
    """The published layer of ViT-5: queries normalised and rotated, then the patches alone pooled; 3x3 convolution."""

    def __init__(self, dim: int, heads: int, dwc: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in "qk")
        self.rope, self.rope_reg = (Turn(dim // heads // 2, base) for base in (10_000.0, 100.0))
        self.dwc = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if dwc else None

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        turned = []
        for y, norm in ((q, self.q_norm), (k, self.k_norm)):
            y = norm(y.unflatten(-1, (self.heads, -1)))
            turned.append(torch.cat([y[:, :1], self.rope(y[:, 1:-4]), self.rope_reg(y[:, -4:])], 1).flatten(2))
        side, p = round((n - 5) ** 0.5), round(LANDMARKS**0.5)
        pooled = F.adaptive_avg_pool2d(turned[0][:, 1:-4].mT.reshape(b, c, side, side), p).flatten(2).mT
        out = mita_by_query(*turned, v, pooled, self.heads, KEYS, twice=True)
        if self.dwc is not None:
            local = self.dwc(v[:, 1:-4].mT.reshape(b, c, side, side)).flatten(2).mT
            out = out + F.pad(local, (0, 0, 1, 4))
        return self.proj(out)


def write_vit5(path: Path, dwc: bool) -> nn.Module:
    """The same of ViT-5, its host without the layer being ours."""
    torch.manual_seed(0)
    model = create_model(
        "vit5_small(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5)", None
    )
    for block in model.blocks:
        block.attn = OfficialViT5(32, 2, dwc)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save({"model": model.state_dict(), "epoch": 799, "args": argparse.Namespace(lr=1e-3)}, path)
    return model.eval()


def write(path: Path, dwc: bool, gate: bool) -> nn.Module:
    """A training checkpoint of the authors' structure, and the model that it is of."""
    torch.manual_seed(0)
    size = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 16, "patch_size": 4, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **size)
    for block in model.blocks:
        block.attn = Official(128, 2, dwc, gate)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    args = argparse.Namespace(lr=1e-3, pool_size=3, kv_topk=7)
    torch.save({"model": model.state_dict(), "optimizer": {"state": {}}, "epoch": 299, "args": args}, path)
    return model.eval()


CHECKPOINTS: dict[str, tuple[Callable[[Path], nn.Module], float]] = {
    "plain": (partial(write, dwc=False, gate=False), 1e-10),
    "dwc": (partial(write, dwc=True, gate=False), 1e-10),
    "gate": (partial(write, dwc=True, gate=True), 1e-10),
    "ViT-5": (partial(write_vit5, dwc=False), 1e-6),  # its frequencies are in float32
    "ViT-5, dwc": (partial(write_vit5, dwc=True), 1e-6),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_a_published_checkpoint_gives_the_published_logits(tmp_path: Path, name: str) -> None:
    make, tolerance = CHECKPOINTS[name]
    official = make(tmp_path / "checkpoint.pth").double()
    model = load_mita(tmp_path / "checkpoint.pth", m=LANDMARKS, k=KEYS).double()
    assert not model.training
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = official(x)
    assert (model(x) - expected).abs().max() < tolerance * expected.abs().max()


DAMAGE = {
    "no blocks": (lambda state: [state.pop(key) for key in list(state) if key.startswith("blocks.")], r"blocks \[\]"),
    "a block is missing": (
        lambda state: [state.pop(key) for key in list(state) if "blocks.0." in key],
        r"blocks \[1\]",
    ),
    "flat patches": (
        lambda state: state.update({"patch_embed.proj.weight": torch.zeros(128, 48)}),
        r"\(128, 48\), not 4",
    ),
    "no patches": (lambda state: state.update({"patch_embed.proj.weight": torch.zeros(128, 3, 0, 0)}), "not 4 axes"),
    "positions": (lambda state: state.update({"pos_embed": torch.zeros(1, 15, 128)}), "15 positions"),
    "head": (lambda state: state.update({"head.weight": torch.zeros(7, 128)}), "size mismatch for head.weight"),
    "no number of classes": (lambda state: state.update({"head.bias": torch.tensor(0.0)}), "head.bias has shape"),
    "qkv": (
        lambda state: state.update({"blocks.0.attn.qkv.weight": torch.zeros(10, 128)}),
        "size mismatch for blocks.0",
    ),
    "gate": (lambda state: state.update({"blocks.0.attn.qkvg.weight": torch.tensor(0.0)}), "damaged"),
    "a weight too many": (lambda state: state.update({"blocks.0.attn.an_bias": torch.zeros(1)}), "unexpected"),
    "names": (lambda state: state.update({5: torch.zeros(1)}), "no checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_message(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "whole.pth", False, False)
    state = torch.load(tmp_path / "whole.pth", weights_only=False)["model"]
    break_it, message = DAMAGE[damage]
    break_it(state)
    torch.save({"model": state}, tmp_path / "broken.pth")
    with pytest.raises(StoreError, match=message):
        load_mita(tmp_path / "broken.pth", m=LANDMARKS, k=KEYS)


def test_bytes_that_are_no_checkpoint_are_a_message(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in range(0, 90, 3):
        (tmp_path / "bytes.pth").write_bytes(bytes(torch.randint(256, (size,), generator=generator).tolist()))
        with pytest.raises(StoreError, match="is damaged, or no checkpoint|cannot be read"):
            load_mita(tmp_path / "bytes.pth")


def test_other_frequencies_and_heads_are_refused(tmp_path: Path) -> None:
    write_vit5(tmp_path / "vit5.pth", False)
    content = torch.load(tmp_path / "vit5.pth", weights_only=False)
    with pytest.raises(ConfigError, match="k=30, but the site of blocks.0.attn has 21 keys"):
        load_mita(tmp_path / "vit5.pth", m=LANDMARKS)  # the published number
    with pytest.raises(ConfigError, match="width 32 is not a multiple of 3"):
        load_mita(tmp_path / "vit5.pth", m=LANDMARKS, k=KEYS, heads=3)
    content["model"]["blocks.1.attn.rope.freqs"] *= 2
    torch.save(content, tmp_path / "turned.pth")
    with pytest.raises(StoreError, match="rope.freqs holds other frequencies"):
        load_mita(tmp_path / "turned.pth", m=LANDMARKS, k=KEYS)


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"model": {}, "args": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(StoreError, match="without executing"):
        load_mita(tmp_path / "evil.pth")
    assert "executed" not in capsys.readouterr().out


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content, message in (
        (None, "there is no such file"),
        ({"model": {"conv.weight": torch.zeros(1)}}, "not the weights of a DeiT"),
        ([1, 2], "no checkpoint"),
    ):
        if content is not None:
            torch.save(content, tmp_path / "other.pth")
        with pytest.raises(StoreError, match=message):
            load_mita(tmp_path / "other.pth")
