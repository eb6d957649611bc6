"""MiTA with one expert a query in compiled code (native.cpp): one head at a time, nothing kept but the plan."""

import ctypes
from ctypes import POINTER, byref, c_double, c_int, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from regard.core import UnsupportedError
from regard.mixers.shared.native_build import kernel

from .pieces import Rule
from .routing import MitaPlan

SOURCE = Path(__file__).with_name("native.cpp")


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("B", "H", "N", "M", "m", "top", "d", "e", "threads")),
        ("shared", c_int),
        ("given", c_int),
        ("scale", c_double),
        ("factor", c_double),
    )


class _View(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("batch", c_long), ("head", c_long), ("row", c_long))


class Native(torch.autograd.Function):
    """q, k, v, landmarks (B, H, ...) -> (B, H, N, e), as `Lean`. Raises: UnsupportedError as it does."""

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
        chosen = MitaPlan(torch.empty(b, h, m, rule.top, dtype=torch.int64), torch.empty(b, h, n, 1, dtype=torch.int64))
        if plan is not None:
            chosen = MitaPlan(*(x.long().contiguous() for x in plan))
        added = _added(inputs[0], bias, drop, m, keys)
        out = _heads_last(inputs[0], (b, h, n, v.shape[-1]))
        _call("forward", inputs, added, chosen, [out], rule, given=plan is not None)
        ctx.save_for_backward(q, k, v, landmarks, bias, drop, *chosen)
        ctx.rule = rule
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx, ahead: Tensor):  # type: ignore[no-untyped-def, override]
        if torch.is_grad_enabled():  # create_graph=True
            raise UnsupportedError(
                'mita: execution="native" cannot be differentiated twice; use "dense", "gather" or "grouped"'
            )
        q, k, v, landmarks, bias, drop, *chosen = ctx.saved_tensors
        inputs = _wide(q, k, v, landmarks, ahead)
        added = _added(inputs[0], bias, drop, landmarks.shape[2], k.shape[2])
        grads = [_heads_last(inputs[0], x.shape) for x in (q, k, v, landmarks)]
        _call("backward", inputs, added, MitaPlan(*chosen), grads, ctx.rule, given=True)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v, landmarks), strict=True)), None, None, None, None


def _wide(*arrays: Tensor) -> list[Tensor]:
    """In float32 or float64, with contiguous rows."""
    kind = torch.promote_types(arrays[0].dtype, torch.float32)
    made = [array.to(kind) for array in arrays]
    return [array if array.stride(-1) == 1 or array.shape[-1] == 1 else array.contiguous() for array in made]


def _added(like: Tensor, bias: Tensor | None, drop: Tensor | None, m: int, keys: int) -> Tensor | None:
    """What is added to logits of landmarks and keys, (B, H, m + M), or None. bias (B|1, H|1, 1, M), drop (B, m)."""
    if bias is None and drop is None:
        return None
    made = like.new_zeros(*like.shape[:2], m + keys)
    if drop is not None:
        made[..., :m].masked_fill_(drop[:, None], -torch.inf)
    if bias is not None:
        made[..., m:] = bias[..., 0, :]
    return made


def _heads_last(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Empty (B, H, N, width) in the order in which heads are merged afterwards, as SDPA's output is."""
    b, h, n, width = shape
    return like.new_empty(b, n, h, width).transpose(1, 2)


def _call(
    what: str,
    inputs: list[Tensor],
    added: Tensor | None,
    plan: MitaPlan,
    outputs: list[Tensor],
    rule: Rule,
    *,
    given: bool,
) -> None:
    q, k, v, landmarks = inputs[:4]
    sizes = _Sizes(
        *(*q.shape[:3], k.shape[2], landmarks.shape[2], rule.top, q.shape[3], v.shape[3]),
        *(torch.get_num_threads(), rule.shared, given, rule.scale, rule.factor),
    )
    views = [(_View * len(arrays))(*map(_view, arrays)) for arrays in (inputs, outputs)]
    function = kernel(SOURCE, f"mita_{what}", q.dtype)
    function.argtypes = [POINTER(_Sizes), POINTER(_View), c_void_p, c_void_p, c_void_p, POINTER(_View)]
    bias = None if added is None else added.data_ptr()
    function(byref(sizes), views[0], bias, plan.keys.data_ptr(), plan.experts.data_ptr(), views[1])


def _view(array: Tensor) -> _View:
    return _View(array.data_ptr(), *array.stride()[:3])
