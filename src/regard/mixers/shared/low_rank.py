"""Attention with few rows or few columns (landmarks, projected keys), in the faster of two forms."""

import torch
from torch import Tensor

from regard.core import softmax_rows

from .sdpa import sdpa


def read(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T + bias) v; q (B, H, N, d), k (B, H, M, d), v (B, H, M, e) -> (B, H, N, e).

    bias broadcasts to (B, H, N, M); a row at -inf throughout gives zeros. scale: None = d^-0.5. On a CPU half precision
    is faster as two products and a softmax in float32; everything else goes through the fused kernel.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        bias = None if bias is None else bias.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
        return sdpa(q, k, v, attn_mask=bias, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (q @ k.mT).float() * scale
    if bias is None:
        return logits.softmax(-1).to(v.dtype) @ v
    return softmax_rows(logits + bias).to(v.dtype) @ v
