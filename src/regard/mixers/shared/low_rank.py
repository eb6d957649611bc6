"""Attention with few queries or few keys, such as landmarks or projected keys, in the faster of two forms."""

import torch
from torch import Tensor

from regard.core import softmax_rows

from .sdpa import sdpa


def low_rank_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """softmax(scale q k^T + bias) v; q (B, H, N, d), k (B, H, M, d), v (B, H, M, e) -> (B, H, N, e).

    bias broadcasts to (B, H, N, M); a row that is -inf everywhere gives zeros. scale: None = d^-0.5. On a CPU
    bfloat16 is faster as two products with a softmax in float32; everything else uses the fused kernel.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        bias = None if bias is None else bias.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
        return sdpa(q, k, v, attn_mask=bias, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (q @ k.mT).float() * scale
    if bias is None:
        return logits.softmax(-1).to(v.dtype) @ v
    return softmax_rows(logits + bias).to(v.dtype) @ v
