"""MiTA with one expert per query in compiled code (native.cpp): one head at a time; only inputs and plan are saved."""

import ctypes
from ctypes import POINTER, byref, c_double, c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.native_build import native_function

from .pieces import Rule
from .routing import MitaPlan

SOURCE = Path(__file__).with_name("native.cpp")


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("B", "H", "N", "M", "m", "top", "d", "e", "threads")),
        ("shared", c_int),
        ("has_plan", c_int),
        ("scale", c_double),
        ("factor", c_double),
    )


class _View(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("batch", c_long), ("head", c_long), ("row", c_long))


class Native(torch.autograd.Function):
    """The compiled counterpart of `Lean`: q, k, v, landmarks (B, H, ...) -> (B, H, N, e). Raises: UnsupportedError."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        landmarks: Tensor,
        bias: Tensor | None,
        drop: Tensor | None,
        plan: MitaPlan | None,
        rule: Rule,
    ) -> Tensor:
        b, h, n = q.shape[:3]
        m, keys = landmarks.shape[2], k.shape[2]
        inputs = _wide(q, k, v, landmarks)
        selection = MitaPlan(
            torch.empty(b, h, m, rule.top, dtype=torch.int64), torch.empty(b, h, n, 1, dtype=torch.int64)
        )
        if plan is not None:
            selection = MitaPlan(*(x.long().contiguous() for x in plan))
        added = _added(inputs[0], bias, drop, m, keys)
        out = _heads_last(inputs[0], (b, h, n, v.shape[-1]))
        _call("forward", inputs, added, selection, [out], rule, has_plan=plan is not None)
        ctx.save_for_backward(q, k, v, landmarks, bias, drop, *selection)
        ctx.rule = rule
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def, override]
        if torch.is_grad_enabled():  # create_graph=True
            raise UnsupportedError(
                'mita: execution="native" cannot be differentiated twice; use "dense", "gather" or "grouped"'
            )
        q, k, v, landmarks, bias, drop, *selection = ctx.saved_tensors
        inputs = _wide(q, k, v, landmarks, grad_out)
        added = _added(inputs[0], bias, drop, landmarks.shape[2], k.shape[2])
        grads = [_heads_last(inputs[0], x.shape) for x in (q, k, v, landmarks)]
        _call("backward", inputs, added, MitaPlan(*selection), grads, ctx.rule, has_plan=True)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v, landmarks), strict=True)), None, None, None, None


def _wide(*arrays: Tensor) -> list[Tensor]:
    """The arrays in float32 or float64, with contiguous rows."""
    dtype = torch.promote_types(arrays[0].dtype, torch.float32)
    upcast = [array.to(dtype) for array in arrays]
    return [array if array.stride(-1) == 1 or array.shape[-1] == 1 else array.contiguous() for array in upcast]


def _added(like: Tensor, bias: Tensor | None, drop: Tensor | None, m: int, keys: int) -> Tensor | None:
    """The bias of the logits of landmarks and keys (B, H, m + M), or None. bias (B|1, H|1, 1, M), drop (B, m)."""
    if bias is None and drop is None:
        return None
    added = like.new_zeros(*like.shape[:2], m + keys)
    if drop is not None:
        added[..., :m].masked_fill_(drop[:, None], -torch.inf)
    if bias is not None:
        added[..., m:] = bias[..., 0, :]
    return added


def _heads_last(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty (B, H, N, width), in memory (B, N, H, width) like SDPA's output, so that merging heads is a view."""
    b, h, n, width = shape
    return like.new_empty(b, n, h, width).transpose(1, 2)


def _call(
    direction: str,
    inputs: list[Tensor],
    added: Tensor | None,
    plan: MitaPlan,
    outputs: list[Tensor],
    rule: Rule,
    *,
    has_plan: bool,
) -> None:
    q, k, v, landmarks = inputs[:4]
    sizes = _Sizes(
        *(*q.shape[:3], k.shape[2], landmarks.shape[2], rule.top, q.shape[3], v.shape[3]),
        *(torch.get_num_threads(), rule.shared, has_plan, rule.scale, rule.factor),
    )
    views = [(_View * len(arrays))(*map(_view, arrays)) for arrays in (inputs, outputs)]
    function = native_function(SOURCE, f"mita_{direction}", q.dtype)
    function.argtypes = [POINTER(_Sizes), POINTER(_View), c_void_p, c_void_p, c_void_p, POINTER(_View)]
    bias = None if added is None else added.data_ptr()
    function(byref(sizes), views[0], bias, plan.keys.data_ptr(), plan.experts.data_ptr(), views[1])


def _view(array: Tensor) -> _View:
    return _View(array.data_ptr(), *array.stride()[:3])
