"""The other reading of CSKA: a grouped convolution of the query map gives the keys, not the logits.

k_h[j] = sum over the taps t of W_h[t] q_h[j + t], plus b_h; zeros outside the grid. A = softmax(scale q k^T).
The authors' code for Swin does this, with separate filters for each window: `swin_t_32(keys="window")`. Such a key
depends on the content around its patch token and belongs to no grid, so that nothing is resampled; logits are quadratic
in the queries. A bias adds the same number to all patch tokens of a row of logits: without prefix and suffix tokens it
has no effect under the softmax, like the key bias of ordinary attention.

With a stride the convolution makes fewer keys, and a value is the mean of a block (`strided`).
Prefix and suffix tokens are not on the map: their keys are learned vectors; their queries have the same keys as others.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Cost, Grid, Inputs, Mask, Operator, Site, attention_cost, hide
from regard.mixers.shared.checks import check_prefix_suffix
from regard.mixers.shared.tiles import join_tokens, split_tokens
from regard.mixers.softmax import softmax, softmax_reference

from .cska_forms import convolved_logits, sides
from .strided import block_values


def query_keys_reference(
    q: Float[Tensor, "B H N d"], weight: Float[Tensor, "Hd d k k2"], bias: Float[Tensor, " Hd"] | None, grid: Grid,
    stride: int = 1,
) -> Float[Tensor, "B H M d"]:  # fmt: skip
    """The sum over taps of shifted queries, each times the matrix of its tap; grid without prefix and suffix tokens."""
    heads, kernel = q.shape[1], weight.shape[-1]
    image = F.pad(q.unflatten(2, sides(grid)), (0, 0, *(kernel // 2,) * 4))
    taps = weight.unflatten(0, (heads, -1))  # (H, d, d, k, k)
    keys = q.new_zeros(()) if bias is None else bias.view(heads, 1, -1)
    for row in range(kernel):
        for column in range(kernel):
            shifted = image[:, :, row : row + grid.height : stride, column : column + grid.width : stride]
            keys = keys + shifted.flatten(2, 3) @ taps[..., row, column].mT
    return keys


def query_keys(
    q: Float[Tensor, "B H N d"], weight: Float[Tensor, "Hd d k k2"], bias: Float[Tensor, " Hd"] | None, grid: Grid,
    stride: int = 1,
) -> Float[Tensor, "B H M d"]:  # fmt: skip
    """The same as one convolution whose groups are the heads."""
    return convolved_logits(q, weight, bias, grid, stride).mT


def query_keys_cost(site: Site, kernel: int, bias: bool, stride: int) -> Cost:
    """Parameters and MACs of `QueryKeyOperator`."""
    keys, filters = site.grid.every(stride), kernel**2 * site.width * site.inner
    convolution = Cost(filters + site.inner * (bias + keys.extra), keys.cells * filters)
    return convolution + attention_cost(site.grid.tokens, keys.tokens, site.inner)


class QueryKeyOperator(Operator):
    """weight (inner, d, k, k), bias (inner,) or None; extra_keys (H, E, d) or None, for prefix and suffix tokens.

    paper: initialise the filters as PyTorch does a convolution's and extra_keys from N(0, 1); else all with standard
    deviation 0.02, biases with 0.
    """

    def __init__(self, site: Site, kernel: int, bias: bool, scale: float | None, paper: bool, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.grid, self.scale, self.paper, extra = site.grid, scale, paper, site.grid.extra
        self.weight = nn.Parameter(torch.empty(site.inner, site.width, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(site.inner)) if bias else None
        self.extra_keys = nn.Parameter(torch.empty(site.heads, extra, site.width)) if extra else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw filters and keys anew."""
        bound = self.weight[0].numel() ** -0.5
        for name, parameter in self.named_parameters():
            if self.paper and name == "extra_keys":
                nn.init.normal_(parameter)
            elif self.paper:
                nn.init.uniform_(parameter, -bound, bound)
            elif name == "bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """The keys of prefix and suffix tokens, as in SKA; the filters are decayed like any projection."""
        return {"extra_keys"} if self.extra_keys is not None else set()

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, keys = self._with_keys(inputs.q, inputs.grid, inputs.mask, plain)
        v, _, mask = block_values(inputs.v, inputs.grid, self.stride, inputs.mask, plain)
        form = softmax_reference if plain else softmax
        return form(q, keys, v, scale=self.scale, mask=mask)

    def _with_keys(self, q: Tensor, grid: Grid, mask: Mask | None, plain: bool) -> tuple[Tensor, Tensor]:
        """Queries, zero for hidden tokens, and the keys of all tokens. Raises: as `check_prefix_suffix`."""
        check_prefix_suffix("CSKA's keys", self.grid, grid)
        q = hide(q, mask)
        _, cells = split_tokens(q, grid)
        bias = None if self.bias is None else self.bias.to(q.dtype)
        convolve = query_keys_reference if plain else query_keys
        keys = convolve(cells, self.weight.to(q.dtype), bias, Grid(*sides(grid)), self.stride)
        if self.extra_keys is not None:
            extra = self.extra_keys.to(q.dtype).expand(q.shape[0], -1, -1, -1)
            keys = join_tokens(extra, keys, grid.every(self.stride))
        return q, keys
