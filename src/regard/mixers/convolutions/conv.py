"""Regular convolution as a mixer: every tap is a head whose weight is 1 at one displacement (Zhu et al. 2019, Eq. 3).

    y_q = sum over taps p of W_p x_{q + p} + b

The weights depend on the relative position alone. Positions beyond the border and padded tokens are zero. Prefix and
suffix tokens are not convolved; their output is the mean of the patch tokens' outputs, or zero (`extra`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Card, ConfigError, Cost, Site, check_accounting

from .sampling import TapsConfig, TapsMixer, check_dilation, check_groups, grouped_product, margins, shifted_views

__all__ = ["Conv"]


@dataclass(frozen=True, kw_only=True)
class Conv(TapsConfig):
    """kernel, axes, causal, extra: see `TapsConfig`. groups: of channels. dilation: step between taps in grid cells.

    groups=dim is a depth-wise convolution.
    Raises: ConfigError for even or impossible numbers; building, for groups that do not divide the channels.
    """

    groups: int = 1
    dilation: int = 1

    revision = 2  # 2: other initial weights in `regard.lab.tasks`
    card = Card(
        title="Regular convolution", source="Zhu et al. 2019, Eq. 3", formula="sum_p W_p x_{q+p}",
        complexity="O(N C^2 N_k)", query_content=False, key_content=False, relative_position=True, dynamic="none",
        scaling=frozenset({"routing"}), expert_type="linear layer on N_k cells", expert_count="N",
        construction="locality prior", topology="N x one-to-one", conditions="position",
        prefix="not convolved; the mean of the patch tokens' outputs, or zero", row_maps=False,
    )  # fmt: skip
    samples = ("Conv()", 'Conv(kernel=5, groups=4, dilation=2, extra="zero")')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1:
            raise ConfigError(f"groups is at least 1, not {self.groups}")
        check_dilation(self.dilation)

    def build(self, site: Site, shared: nn.Module | None = None) -> "ConvMixer":
        check_groups("Conv", self.groups, site)
        return ConvMixer(self, site)

    def cost(self, site: Site, accounting: str = "executed") -> Cost:
        """N C^2 N_k / groups in both accountings."""
        check_accounting(accounting)
        weight = site.dim * (site.dim // self.groups) * self.taps
        return Cost(weight + site.dim * site.out_bias, site.grid.cells * weight)


class ConvMixer(TapsMixer):
    """conv (C, C / groups, taps)."""

    output = "conv"
    config: Conv

    def __init__(self, config: Conv, site: Site) -> None:
        super().__init__(config, site)
        dim, groups, dilation = site.dim, config.groups, config.dilation
        self.conv = nn.Conv2d(dim, dim, config.sides, groups=groups, dilation=dilation, bias=site.out_bias)

    def mix(self, x: Tensor, valid: Tensor | None, plain: bool) -> Tensor:
        config, conv = self.config, self.conv
        if plain:
            return grouped_product(
                conv.weight, torch.stack(shifted_views(x, config.sides, config.dilation, config.causal), 2), conv.bias
            )
        left, right, top, bottom = margins(config.sides, config.dilation, config.causal)
        if config.causal:
            return conv(F.pad(x, (left, right, top, bottom)))
        return F.conv2d(x, conv.weight, conv.bias, 1, (top, left), config.dilation, config.groups)
