"""Scores by which top-k attention ranks keys: DSA's lightning indexer and Spark's split of the channels."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core import NO_MASK, Mask, merge, softmax_rows
from regard.mixers.shared.precision import upcast, without_autocast


def spark_logits(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], rank: int, scale: float | None = None
) -> Float[Tensor, "B H N M"]:
    """scale (q[:r] . k[:r]) softplus(q[r:] . k[r:]); scale None = d^-0.5 (Spark Transformer, Eq. 7, has none)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    first = q[..., :rank] @ k[..., :rank].mT * scale
    return first * F.softplus(q[..., rank:] @ k[..., rank:].mT)


def threshold_logits(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], top: int, rank: int, scale: float | None = None,
    mask: Mask | None = None,
) -> Float[Tensor, "B H N M"]:  # fmt: skip
    """Spark's statistical top-k: (x - t) softplus(y) where x >= t, else -inf, with t = mean(x) + std(x) Q(1 - top/M).

    x and y are the two products of `spark_logits`, Q is the quantile of the normal distribution; mean, std and M are of
    the keys that the mask allows (a bias does not count). About `top` keys remain if the x of a query are normally
    distributed; the best one always does. Where there are no more than `top` all remain, with t = 0.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    x, y = q[..., :rank] @ k[..., :rank].mT * scale, q[..., rank:] @ k[..., rank:].mT
    keep = None if mask is None else mask.allowed_pairs(x.shape[-2], x.shape[-1], x.device, x.shape[0])
    keep = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device) if keep is None else keep
    number = keep.sum(-1, keepdim=True).to(x.dtype)
    share = keep / number.clamp_min(1)
    mean = (x * share).sum(-1, keepdim=True)
    deviation = ((x - mean).square() * share).sum(-1, keepdim=True).clamp_min(1e-30).sqrt()
    t = mean + deviation * torch.special.ndtri((1 - top / number).clamp_min(0)).clamp_min(-40)
    t = torch.where(number > top, t, 0.0)
    best = x.masked_fill(~keep, -torch.inf).amax(-1, keepdim=True)
    kept = keep & ((x >= t.minimum(best)) | (number <= top))
    return ((x - t) * F.softplus(y)).masked_fill(~kept, -torch.inf)


class Lightning(nn.Module):
    """score_ts = sum_j w_tj relu(q_tj . k_s) (DeepSeek-V3.2, Eq. 1), for all heads of the layer together.

    query (J D, C), key (D, C), weight (J, C): linear maps of the layer's queries and keys, heads side by side.
    """

    def __init__(self, inner: int, number: int, width: int) -> None:
        super().__init__()
        self.number = number
        self.query = nn.Linear(inner, number * width, bias=False)
        self.key = nn.Linear(inner, width, bias=False)
        self.weight = nn.Linear(inner, number, bias=False)

    def parts(
        self, q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"]
    ) -> tuple[Float[Tensor, "B N M"], Float[Tensor, "B N M"]]:
        """The scores, and the same without the ReLU, which ranks the many pairs of score 0."""
        x, y = merge(upcast(q)), merge(upcast(k))
        queries = F.linear(x, upcast(self.query.weight))
        queries = queries.unflatten(-1, (self.number, -1)).transpose(1, 2)  # (B, J, N, D)
        products = queries @ F.linear(y, upcast(self.key.weight))[:, None].mT  # (B, J, N, M)
        weights = F.linear(x, upcast(self.weight.weight)).mT[..., None]  # (B, J, N, 1)
        return (F.relu(products) * weights).sum(1), (products * weights).sum(1)

    @torch.no_grad()
    def best(
        self, q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], top: int, mask: Mask | None = None
    ) -> Int[Tensor, "B 1 N top"]:
        """The `top` best keys; equal scores are ranked without the ReLU, then by position."""
        with without_autocast(q.device):
            score, linear = (forbid(x[:, None], mask) for x in self.parts(q, k))
            order = linear.sort(dim=-1, descending=True, stable=True).indices
            rank = score.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
        return order.gather(-1, rank)[..., :top]

    def loss(
        self, q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], scale: float | None, mask: Mask | None = None
    ) -> Float[Tensor, ""]:
        """Mean over queries of KL(mean attention of the heads || softmax of the scores); q and k get no gradient."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        with without_autocast(q.device):
            q, k = upcast(q.detach()), upcast(k.detach())
            target = softmax_rows((mask or NO_MASK).add_to(q @ k.mT * scale)).mean(1)
            logits = forbid(self.parts(q, k)[0][:, None], mask)[:, 0]
            predicted = logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0).log_softmax(-1)
            term = target * (target.clamp_min(1e-30).log() - predicted)
            return term.masked_fill(target == 0, 0.0).sum(-1).mean()


def forbid(scores: Float[Tensor, "B H1 N M"], mask: Mask | None) -> Float[Tensor, "B H1 N M"]:
    """Scores at -inf for keys that the mask forbids; a bias does not change them."""
    keep = (
        None if mask is None else mask.allowed_pairs(scores.shape[-2], scores.shape[-1], scores.device, scores.shape[0])
    )
    return scores if keep is None else scores.masked_fill(~keep, -torch.inf)
