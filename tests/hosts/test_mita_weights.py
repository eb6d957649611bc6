"""The authors' checkpoints give the authors' logits, and nothing in a file is executed."""

import argparse
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import StoreError, UnsupportedError
from regard.hosts.mita_weights import load_mita

LANDMARKS, KEYS = 9, 7


class Official(nn.Module):
    """The published layer, written down plainly from its description: one sample and one head at a time."""

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
        side, p, d = round((n - 1) ** 0.5), round(LANDMARKS**0.5), c // self.heads
        pooled = F.adaptive_avg_pool2d(q[:, :-1].mT.reshape(b, c, side, side), p).flatten(2).mT  # shifted by one token
        out = torch.empty_like(q)
        for i in range(b):
            for h in range(self.heads):
                at = slice(h * d, (h + 1) * d)
                queries, keys, values, landmarks = q[i, :, at], k[i, :, at], v[i, :, at], pooled[i, :, at]
                scores = landmarks @ keys.T
                chosen = scores.topk(KEYS).indices
                compressed = (scores * d**-0.5).softmax(-1) @ values
                for t in range(n):
                    own = chosen[(landmarks @ queries[t]).argmax()]
                    logits = torch.cat([landmarks @ queries[t] / d, keys[own] @ queries[t] * d**-0.5])  # scaled twice
                    out[i, t, at] = logits.softmax(-1) @ torch.cat([compressed, values[own]])
        if self.dwc is not None:
            local = self.dwc(v[:, 1:].mT.reshape(b, c, side, side)).flatten(2).mT
            out = out + torch.cat([torch.zeros_like(out[:, :1]), local], 1)
        return self.proj(F.silu(parts[3]) * out if self.gated else out)


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


@pytest.mark.parametrize(("dwc", "gate"), [(False, False), (True, False), (True, True)], ids=["plain", "dwc", "gate"])
def test_a_published_checkpoint_gives_the_published_logits(tmp_path: Path, dwc: bool, gate: bool) -> None:
    official = write(tmp_path / "checkpoint.pth", dwc, gate).double()
    model = load_mita(tmp_path / "checkpoint.pth", m=LANDMARKS, k=KEYS).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = official(x)
        assert (model(x) - expected).abs().max() < 1e-10 * expected.abs().max()
    assert not model.training


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"model": {}, "args": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(StoreError, match="without executing"):
        load_mita(tmp_path / "evil.pth")
    assert "executed" not in capsys.readouterr().out


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no file"):
        load_mita(tmp_path / "none.pth")
    torch.save({"model": {"reg_token": torch.zeros(1)}}, tmp_path / "vit5.pth")
    with pytest.raises(UnsupportedError, match="ViT-5"):
        load_mita(tmp_path / "vit5.pth")
    torch.save({"model": {"conv.weight": torch.zeros(1)}}, tmp_path / "other.pth")
    with pytest.raises(StoreError, match="no weights of a DeiT"):
        load_mita(tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(StoreError, match="no checkpoint"):
        load_mita(tmp_path / "list.pth")
