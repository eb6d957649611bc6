"""PyTorch's fused attention, replaced in the cases where it is slow."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.core.tensors import is_exporting

from .native import eager_on_cpu, in_function_transform

FLOAT32_LOGITS = 384 * 384
"""Up to this number of logits per head, bfloat16 attention trains faster in float32 on a CPU."""
PLAIN_LOGITS = 96 * 96
"""Up to this number of logits per head, compiled attention trains faster on a CPU as two products and a softmax."""


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`; q (B, H, N, d), k (B, H, M, d), v (B, H, M, e) -> (B, H, N, e) in q's dtype.

    On a CPU the backward pass of the bfloat16 kernel has a large fixed cost: at 64 x 64 logits it takes three times as
    long as the float32 kernel. Small attention is therefore computed in float32, which is more exact as well. Measured
    with PyTorch 2.15, batch 64, one thread: 29.6 against 7.4 ms at N = 64, d = 32. With few logits `torch.compile` is
    faster with plain products than with the kernel: 0.88 of its time in float32. A mask that is trained, as a table
    of biases is, has no kernel, and PyTorch's way without one is slower than plain products as well.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if q.device.type == "cpu" and torch.is_grad_enabled():
        if attn_mask is not None and attn_mask.requires_grad and not is_causal and _is_plain(attn_mask):
            return _plain(q, k, v, factor, attn_mask)
        if attn_mask is not None and in_function_transform():  # whose tensors do not tell that the mask is trained
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
        logits, trained = q.shape[-2] * k.shape[-2], q.requires_grad or k.requires_grad or v.requires_grad
        compiled = torch.compiler.is_compiling() and not is_exporting()
        if trained and compiled and attn_mask is None and not is_causal and logits <= PLAIN_LOGITS:
            return _plain(q, k, v, factor)
        if trained and q.dtype == torch.bfloat16 and logits <= FLOAT32_LOGITS:
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.float()
            with torch.autocast("cpu", enabled=False):
                out = F.scaled_dot_product_attention(
                    q.float(), k.float(), v.float(), attn_mask=attn_mask, is_causal=is_causal, scale=scale
                )
            return out.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def _is_plain(bias: Tensor) -> bool:
    """Whether code may look at values, and no token has all keys hidden, whose output is 0 in PyTorch's attention."""
    return eager_on_cpu(bias) and not bool((bias.detach().amax(-1) == -torch.inf).any())


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Two products and a softmax, in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        logits = (q.to(dtype) * scale) @ k.to(dtype).mT
        if bias is not None:
            logits += bias.to(dtype)
        return (logits.softmax(-1) @ v.to(dtype)).to(q.dtype)
