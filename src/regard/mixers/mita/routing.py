"""MiTA's selection as data: the keys of every expert and the experts of every query.

A selection is integers without gradient. It can be plotted, kept for comparisons, and passed to `mita` as plan=.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.core import Mask, ShapeError, UnsupportedError, hide, operator_function
from regard.mixers.shared.checks import check_chosen
from regard.mixers.shared.native import eager_on_cpu
from regard.mixers.shared.precision import upcast, without_autocast


class MitaPlan(NamedTuple):
    """keys (B, H, m, top): the keys of expert i. experts (B, H, N, s): the experts of each query, in any order."""

    keys: Int[Tensor, "B H m top"]
    experts: Int[Tensor, "B H N s"]


@operator_function
def mita_plan(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], landmarks: Float[Tensor, "B H m d"], top: int, *,
    experts: int = 1, mask: Mask | None = None, landmark_keep: Bool[Tensor, "B m"] | None = None,
) -> MitaPlan:  # fmt: skip
    """Each landmark takes its `top` best keys; each query takes its `experts` best landmarks.

    Scores are computed in float32 for half precision. Equal scores are broken arbitrarily. mask: keys that it forbids
    come last (and have weight 0 in `mita`). landmark_keep: landmarks that are False are chosen last.
    Raises: ShapeError for tensors that do not fit, top > M or experts > m; UnsupportedError for other masks.
    """
    check_counts("mita_plan", k.shape[-2], landmarks.shape[-2], top, experts)
    k = hide(k, mask)
    with torch.no_grad(), without_autocast(q.device):
        probe = upcast(landmarks) @ upcast(k).mT
        bias = key_bias("mita_plan", mask, probe)
        if bias is not None:
            probe = probe * q.shape[-1] ** -0.5 + bias
        return select(probe, without(upcast(q) @ upcast(landmarks).mT, landmark_keep), top, experts)


def select(probe: Tensor, route: Tensor, top: int, experts: int) -> MitaPlan:
    """The plan of scores: probe (B, H, m, M) of landmarks with keys, route (B, H, N, m) of queries with landmarks."""
    keys = largest(probe.detach(), top)
    route = route.detach()
    best = route.max(-1, keepdim=True).indices if experts == 1 else route.topk(experts, sorted=False).indices
    return MitaPlan(keys, best)


def largest(scores: Tensor, top: int) -> Tensor:
    """Indices (..., top) of the largest scores (..., M), in any order; NaN counts as the largest.

    In eager mode on the CPU, NumPy's partition finds them two to three times faster than `topk`.
    """
    width = scores.shape[-1]
    if not eager_on_cpu(scores) or scores.dtype not in (torch.float32, torch.float64) or top == width:
        return scores.topk(top, sorted=False).indices
    indices = np.argpartition(scores.numpy(), width - top, axis=-1)[..., width - top :]
    return torch.from_numpy(np.ascontiguousarray(indices))


def check_counts(name: str, keys: int, landmarks: int, top: int, experts: int) -> None:
    """Raises ShapeError unless 1 <= top <= keys and 1 <= experts <= landmarks."""
    if not 1 <= top <= keys:
        raise ShapeError(f"{name}: each expert takes {top} keys and there are {keys}; choose between 1 and {keys}")
    if not 1 <= experts <= landmarks:
        raise ShapeError(
            f"{name}: {experts} experts per query and there are {landmarks} landmarks; choose between 1 and {landmarks}"
        )


def check_plan(plan: MitaPlan, q: Tensor, k: Tensor, m: int, top: int, experts: int) -> None:
    """Check a plan that a caller passes. Raises: ShapeError unless it fits these tensors and numbers."""
    check_chosen("mita: plan.keys", plan.keys, (*q.shape[:2], m, top), k.shape[-2])
    check_chosen("mita: plan.experts", plan.experts, (*q.shape[:3], experts), m)


def add_key_bias(name: str, mask: Mask | None, logits: Float[Tensor, "B H m M"]) -> Float[Tensor, "B H m M"]:
    """Logits of landmarks with keys plus `key_bias`."""
    bias = key_bias(name, mask, logits)
    return logits if bias is None else logits + bias


def key_bias(name: str, mask: Mask | None, like: Tensor) -> Tensor | None:
    """The bias of the keys' logits, (B | 1, H | 1, 1, M) in the dtype of `like` (B, ..., M); None without a mask.

    Raises: UnsupportedError for a causal mask or a bias with a row per query; ShapeError for another number of keys or
    images.
    """
    if mask is None or not mask.kinds:
        return None
    if mask.causal:
        raise UnsupportedError(f"{name} cannot apply a causal mask: landmarks are averages that see later tokens")
    if mask.product is not None:
        raise UnsupportedError(f"{name} takes no product of positions: give it as further channels of q and k")
    bias = None
    if mask.bias is not None:
        if mask.bias.shape[-2] != 1:
            raise UnsupportedError(
                f"{name} cannot apply a bias with {mask.bias.shape[-2]} rows, only a key bias, which has one row: "
                "keys are chosen once for all queries"
            )
        if mask.bias.shape[-1] != like.shape[-1]:
            raise ShapeError(f"{name}: Mask.bias has {mask.bias.shape[-1]} keys, the operator has {like.shape[-1]}")
        bias = mask.bias.to(like.dtype)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    allowed = mask.allowed_pairs(1, like.shape[-1], like.device, like.shape[0])
    if allowed is None:
        return bias
    zero = like.new_zeros(()) if bias is None else bias
    return torch.where(allowed, zero, -torch.inf)


def without(route: Tensor, landmark_keep: Tensor | None) -> Tensor:
    """Logits of queries with landmarks (B, H, N, m), -inf for landmarks that are not attended to."""
    return route if landmark_keep is None else route.masked_fill(~landmark_keep[:, None, None, :], -torch.inf)
