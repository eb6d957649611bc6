"""Performer: softmax weights estimated by positive random features (FAVOR+, Choromanski et al. 2021, Lemma 1).

phi(x) = (exp(W x - |x|^2 / 2 - c) + eps) / sqrt(r) of x d^-0.25, then linear attention; c is the largest exponent of a
query, or of all keys of a head: it cancels except for eps. W has orthogonal rows in blocks of d, with the lengths of
normal vectors; the orthogonal matrices are Haar distributed (QR with corrected signs; plain QR is biased).
Prefix and suffix tokens are queries and keys like all others.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core import ConfigError, Cost, Inputs, Operator, ShapeError, Site, operator_function
from regard.core.mask import Mask, only_kept

from .linear import Linear
from .shared.checks import padding_only
from .shared.heads import HeadMixerConfig
from .shared.kernel_features import bfloat16_like, kernel_weights, safe_divide, takes_triton, triton_product
from .shared.precision import upcast, without_autocast

__all__ = ["Performer", "performer", "performer_reference"]


@operator_function
def performer_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    features: Float[Tensor, "r d"], *, kernel: str = "softmax", eps: float = 1e-6, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """All N x M weights phi(q_i).phi(k_j), divided by the sum of their row."""
    keep = padding_only("performer", mask).keep
    fq, fk = random_features(q, k, features, kernel, eps, keep)
    return kernel_weights(fq, fk, 0.0) @ only_kept(v, keep)


@operator_function
def performer(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    features: Float[Tensor, "r d"], *, kernel: str = "softmax", eps: float = 1e-6, mask: Mask | None = None,
    execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same in linear time.

    features: W, as drawn by `orthogonal_features`. kernel: "softmax", or "relu" (relu(W x) + eps, generalised
    attention). eps: added to every feature; 0 gives the unbiased estimate. mask: padding only; hidden keys have
    features 0, and a query without keys gets zeros. Features and sums are in float32 for half precision. execution: as
    of `linear`.
    Raises: ShapeError for tensors that do not fit, UnsupportedError for other masks or an execution that cannot run
    here, ConfigError for an unknown kernel or execution.
    """
    keep = padding_only("performer", mask).keep
    if kernel not in ("softmax", "relu"):
        raise ConfigError(f"kernel is softmax or relu, not {kernel!r}")
    if features.ndim != 2 or features.shape[-1] != q.shape[-1]:
        raise ShapeError(f"performer: features have shape {tuple(features.shape)}; expected (number, {q.shape[-1]})")
    with without_autocast(q.device):
        fq, fk = exponentials(upcast(q), upcast(k), upcast(features), kernel, keep)
        values = only_kept(v, keep)
        if takes_triton(execution, v):
            return triton_product(fq + eps, fk + eps, values, 0.0, keep=keep)
        number = k.shape[-2] if keep is None else keep.sum(-1).to(fq.dtype)[:, None, None, None]
        # eps in every feature of queries and kept keys is added to the sums instead
        state = (bfloat16_like(fk, v).mT @ (values if v.dtype == torch.bfloat16 else values.to(fq.dtype))).to(fq.dtype)
        state = state + eps * values.to(fq.dtype).sum(-2, keepdim=True)  # (B, H, r, e)
        total = fk.sum(-2)[..., None] + eps * number  # (B, H, r, 1)
        out = (bfloat16_like(fq, v) @ bfloat16_like(state, v)).to(fq.dtype) + eps * state.sum(-2, keepdim=True)
        return safe_divide(out, fq @ total + eps * total.sum(-2, keepdim=True)).to(v.dtype)


def random_features(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], features: Float[Tensor, "r d"], kernel: str, eps: float,
    keep: Bool[Tensor, "B M"] | None,
) -> tuple[Float[Tensor, "B H N r"], Float[Tensor, "B H M r"]]:  # fmt: skip
    """phi of queries and keys; 0 for hidden keys."""
    fq, fk = exponentials(q, k, features, kernel, keep)
    root = math.sqrt(features.shape[0])
    return (fq + eps) / root, only_kept(fk + eps, keep) / root


def exponentials(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], features: Float[Tensor, "r d"], kernel: str,
    keep: Bool[Tensor, "B M"] | None,
) -> tuple[Float[Tensor, "B H N r"], Float[Tensor, "B H M r"]]:  # fmt: skip
    """phi without eps and 1 / sqrt(r): relu(W x), or exp(W x - |x|^2 / 2 - c); 0 for hidden keys.

    c of a query is its largest exponent, so that |x|^2 cancels.
    """
    scale = q.shape[-1] ** -0.25
    q, k = q * scale, only_kept(k, keep) * scale
    to_q, to_k = q @ features.mT, k @ features.mT
    if kernel == "relu":
        return F.relu(to_q), only_kept(F.relu(to_k), keep)
    length = k.square().sum(-1, keepdim=True) / 2
    # the largest exponents are not detached: through eps the result depends on them
    largest = to_k.amax(-1, keepdim=True) - length
    largest = largest if keep is None else largest.masked_fill(~keep[:, None, :, None], -torch.inf)
    largest = largest.amax(-2, keepdim=True)
    largest = largest if keep is None else largest.masked_fill(largest == -torch.inf, 0.0)
    exponent = to_k - (length + largest)
    if keep is not None:
        exponent = exponent.masked_fill(~keep[:, None, :, None], -torch.inf)
    return (to_q - to_q.amax(-1, keepdim=True)).exp(), exponent.exp()


def orthogonal_features(
    number: int, width: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "r d"]:
    """W: blocks of `width` orthogonal rows, Haar distributed, with the lengths of normal vectors; drawn on the CPU.

    generator: None = torch's default.
    """
    blocks = -(-number // width)
    q, r = torch.linalg.qr(torch.randn(blocks, width, width, generator=generator, dtype=torch.float64))
    q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = torch.randn(number, width, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return (q.mT.flatten(0, 1)[:number] * lengths).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Performer(HeadMixerConfig):
    """features: their number r, 0 = int(d ln d). kernel: "softmax" or "relu". eps: added to every feature.

    Features are drawn when the layer is built, and saved with the model. The paper draws new ones during training; a
    user's training loop can do so with `PerformerOperator.redraw`, `regard train` and studies do not.
    """

    features: int = 0
    kernel: Literal["softmax", "relu"] = "softmax"
    eps: float = 1e-6

    card = replace(
        Linear.card, title="Performer", source="Choromanski et al. 2021, Lemma 1 and Sec. 2.4",
        formula="phi(q) (phi(k)^T v) / (phi(q) . sum phi(k)),  phi(x) = exp(W x - |x|^2 / 2) / sqrt(r)",
        complexity="O(N r C)",
    )  # fmt: skip
    masks = frozenset({"padding"})
    depth = True
    cross = True
    ordered = False
    samples = ("Performer()", 'Performer(features=12, kernel="relu", eps=1e-3, dwc=3)')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features < 0 or self.eps < 0:
            raise ConfigError(f"features and eps are at least 0, not features={self.features}, eps={self.eps}")

    def number(self, width: int) -> int:
        """The number of features r for a head width."""
        return self.features or max(1, int(width * math.log(width)))

    def operator(self, site: Site) -> "PerformerOperator":
        return PerformerOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """The normaliser is a product too; the paper does not count it."""
        n, r = site.tokens("q"), self.number(site.width)
        normaliser = n * r * site.heads if accounting == "executed" else 0
        return Cost(0, 2 * (n + site.tokens("k")) * r * site.inner + normaliser)


class PerformerOperator(Operator):
    """features (r, d): a buffer that all heads share. execution: see `linear`."""

    features: Tensor

    def __init__(self, config: Performer, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        number = config.number(site.width)
        self.register_buffer("features", torch.empty(number, site.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw features from torch's default generator."""
        self.redraw()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new features. generator: of the CPU, None = torch's default."""
        number, width = self.features.shape
        self.features.copy_(orthogonal_features(number, width, generator, torch.float64))

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = performer_reference if plain else partial(performer, execution=self.execution)
        config = self.config
        features = self.features.to(inputs.q.dtype)
        return form(inputs.q, inputs.k, inputs.v, features, kernel=config.kernel, eps=config.eps, mask=inputs.mask)
