"""Polarity-aware linear attention: positive and negative parts of q and k in separate products (Meng et al. 2025).

x+ = relu(x)^p, x- = relu(-x)^p with a learned power p in each channel; K = [k+, k-]. The first half of the values has
queries [q+, q-] (same sign), the second half [q-, q+] (opposite sign), each in linear attention (PolaFormer, Eq. 5-8).
With an odd width the first half has one channel more. Prefix and suffix tokens are queries and keys like all others;
the local branch gives them zeros.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Cost, Grid, Inputs, Mask, Operator, Site, only_kept, operator_function
from regard.core.errors import ConfigError, ShapeError, UnsupportedError

from .linear import Linear
from .shared.checks import padding_only
from .shared.heads import CrossMixer, HeadMixer
from .shared.kernel_features import (
    KeyPositions,
    LocalConfig,
    LocalMixer,
    head_conv,
    kernel_product,
    kernel_weights,
)
from .shared.precision import upcast, without_autocast

__all__ = ["PolaFormer", "polaformer", "polaformer_reference"]


@operator_function
def polaformer_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    power: Float[Tensor, "H 1 d"], *, eps: float = 1e-6, mask: Mask | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Linear attention of each half of v; the normaliser is a mean over keys, and eps is added to the mean."""
    keep = padding_only("polaformer", mask).keep
    k, v = only_kept(k, keep), only_kept(v, keep)
    number = v.new_tensor(k.shape[-2]) if keep is None else keep.sum(-1).to(v.dtype)[:, None, None, None]
    positive, negative = F.relu(q) ** power, F.relu(-q) ** power
    keys = torch.cat([F.relu(k) ** power, F.relu(-k) ** power], -1)
    same = kernel_weights(torch.cat([positive, negative], -1), keys, eps * number)
    opposite = kernel_weights(torch.cat([negative, positive], -1), keys, eps * number)
    half = (v.shape[-1] + 1) // 2
    return torch.cat([same @ v[..., :half], opposite @ v[..., half:]], -1)


@operator_function
def polaformer(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    power: Float[Tensor, "H 1 d"], *, eps: float = 1e-6, mask: Mask | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """The same in linear time, each half by itself.

    power: p, positive. eps: added to the mean of the normaliser over keys. mask: padding only; a query gets zeros in a
    half for which no key has the required sign. Features and normalisers are in float32 for half precision; x^p must
    stay in its range (|x| below 1e7 for p = 5). execution: as of `linear`.
    Raises: ShapeError if tensors do not fit together, UnsupportedError for other masks or an execution that cannot run
    here, ConfigError for an unknown execution.
    """
    keep = padding_only("polaformer", mask).keep
    if tuple(power.shape) != (q.shape[1], 1, q.shape[-1]):
        expected = (q.shape[1], 1, q.shape[-1])
        raise ShapeError(f"polaformer: power has shape {tuple(power.shape)}; expected (heads, 1, width) = {expected}")
    with without_autocast(q.device):
        q, k, v = upcast(q), upcast(only_kept(k, keep)), only_kept(v, keep)
        (positive, negative), keys = _parts(q, power), torch.cat(_parts(k, power), -1)
        number = k.shape[-2] if keep is None else keep.sum(-1).clamp_min(1).to(q.dtype)[:, None, None, None]
        keys, half = keys / number, (v.shape[-1] + 1) // 2
        same = kernel_product(torch.cat([positive, negative], -1), keys, v[..., :half], eps, execution)
        opposite = kernel_product(torch.cat([negative, positive], -1), keys, v[..., half:], eps, execution)
        return torch.cat([same, opposite], -1)


def _parts(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """x+ and x- from one power, since one of them is 0."""
    size = x.abs() ** power
    positive = size * (x > 0)
    return positive, size - positive


@dataclass(frozen=True, kw_only=True)
class PolaFormer(LocalConfig):
    """alpha: powers are 1 + alpha sigmoid(w) in (1, 1 + alpha), w learned and 0 at the start.

    position: whether a learned position embedding is added to every key (the published code has it; the parameter
    count of the row in MiTA's Table 2 does not). local: kernel of the depth-wise convolution of the values that all
    heads share, 0 = none. gate: the paper's coefficients W_g x, multiplied with the output without SiLU. The paper's
    layer is PolaFormer(local=5, gate=True, position=True). eps: added to the mean normaliser.
    """

    alpha: float = 4.0
    position: bool = False
    local: int = 0
    eps: float = 1e-6

    card = replace(
        Linear.card, title="Polarity-aware linear attention", source="Meng et al. 2025 (PolaFormer), Eq. 5-8",
        formula="[lin([q+, q-], [k+, k-], v1), lin([q-, q+], [k+, k-], v2)],  x+ = relu(x)^p, x- = relu(-x)^p",
        expert_type="linear layer, 2 polarity streams", row_maps=False,
    )  # fmt: skip
    samples = ("PolaFormer()", "PolaFormer(local=5, gate=True, position=True)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0 or self.eps < 0:
            raise ConfigError(f"alpha and eps are at least 0, not alpha={self.alpha}, eps={self.eps}")

    def build(self, site: Site, shared: nn.Module | None = None) -> HeadMixer:
        if self.local:
            return PolaLocalMixer(self, site, shared, head_conv(site, self.local))
        return PolaMixer(self, site, shared)

    def build_cross(self, site: Site, shared: nn.Module | None = None) -> CrossMixer:
        self.check_cross()
        return PolaCrossMixer(self, site, shared)

    def operator(self, site: Site) -> "PolaFormerOperator":
        return PolaFormerOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        keys = site.tokens("k")
        params = site.inner * (2 + (keys if self.position else 0))
        return Cost(params, 2 * (site.grid.tokens + keys) * site.inner * site.width)


class _LinearGate:
    """The gate without SiLU."""

    def project_output(self, x: Tensor, out: Tensor) -> Tensor:
        layer = cast(HeadMixer, self)
        if layer.gate is not None:
            out = layer.gate(x) * out
        return cast(Tensor, layer.proj_drop(layer.proj(out)))


class PolaMixer(_LinearGate, HeadMixer):
    """Self-attention with the paper's gate."""


class PolaLocalMixer(_LinearGate, LocalMixer):
    """Self-attention with the paper's gate and local branch."""


class PolaCrossMixer(_LinearGate, CrossMixer):
    """Cross-attention with the paper's gate."""


class PolaFormerOperator(Operator):
    """sigma and w (H, 1, d), both start at 0; positions of the keys, or None. execution: see `linear`."""

    def __init__(self, config: PolaFormer, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.sigma, self.w = (nn.Parameter(torch.empty(site.heads, 1, site.width)) for _ in range(2))
        self.positions = KeyPositions(site, site.memory or site.grid) if config.position else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """sigma and w to 0: features divided by ln 2, powers 1 + alpha / 2."""
        nn.init.zeros_(self.sigma)
        nn.init.zeros_(self.w)

    def no_weight_decay(self) -> set[str]:
        """The scales and powers of features."""
        return {"sigma", "w"}

    @property
    def power(self) -> Float[Tensor, "H 1 d"]:
        """The powers p."""
        return 1 + self.config.alpha * torch.sigmoid(self.w)

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        form = polaformer_reference if plain else partial(polaformer, execution=self.execution)
        k = inputs.k
        k = k if self.positions is None else k + self.positions(inputs.key_grid).to(k.dtype)
        scales = F.softplus(self.sigma).to(k.dtype)
        return form(inputs.q / scales, k / scales, inputs.v, self.power, eps=self.config.eps, mask=inputs.mask)

    def weights(
        self, q: Tensor | None, k: Tensor | None, v: Tensor, *, grid: Grid, memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:  # fmt: skip
        """Raises: UnsupportedError always; each half of the values has a matrix of its own."""
        raise UnsupportedError("PolaFormer has two maps, one for each half of the values; choose other layers")
