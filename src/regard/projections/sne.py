"""Non-linear queries, keys and values: two layers with a ReLU between them instead of one matrix.

SNE has two layers for each role, P-SNE shares the second between the roles, F-SNE shares both and distinguishes the
roles by a learned code beside the input ("Rethinking Query, Key and Value Embedding in Vision Transformer under Tiny
Model Constraints", Eqs. 4-6). The equations have no biases; here both layers have them where the host's projection
does. [x, c] W = x W_x + c W_c: the product with x is computed once for all roles, and a code shifts the hidden layer's
bias.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, Cost, ProjectionConfig, Site, heads, linear_cost, nearest

from .conversion import LayeredProjection, warm_start

# the inputs are temporary, so ReLU works in place: an eighth less time in the CPU's forward pass
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu_, "gelu": F.gelu, "none": lambda x: x}


def fsne_reference(
    x: Float[Tensor, "B N C"], codes: Float[Tensor, "R code"], weight1: Float[Tensor, "h C_code"],
    bias1: Float[Tensor, " h"] | None, weight2: Float[Tensor, "inner h"], bias2: Float[Tensor, " inner"] | None,
) -> tuple[Float[Tensor, "B N inner"], ...]:  # fmt: skip
    """F-SNE (Eq. 6, with biases), one output per code: ReLU([x, code] W1 + b1) W2 + b2, the code beside every token."""
    outputs = []
    for code in codes:
        hidden = F.relu(F.linear(torch.cat([x, code.expand(*x.shape[:2], -1)], -1), weight1, bias1))
        outputs.append(F.linear(hidden, weight2, bias2))
    return tuple(outputs)


@dataclass(frozen=True, kw_only=True)
class _Embedding(ProjectionConfig):
    """The fields of all three.

    width: hidden width h; None is the paper's, "matched" the largest with no more weights than a linear projection of
    the same roles. activation: between the layers, "relu" (paper), "gelu" or "none".
    init: "trunc_normal" is XCiT's rule (standard deviation 0.02), which gives small logits at first; "kaiming" keeps
    the variance of the input; "svd" (SNE and P-SNE of at most two layers) starts as a linear projection, a random one
    from scratch and the host's in a swap: see `warm_start`. hidden_bias: whether hidden layers have a bias, where the
    host's projection has one (`Site.qkv_bias`).
    """

    inits: ClassVar[tuple[str, ...]] = ("trunc_normal", "kaiming", "svd")

    width: int | Literal["matched"] | None = None
    activation: Literal["relu", "gelu", "none"] = "relu"
    init: Literal["trunc_normal", "kaiming", "svd"] = "trunc_normal"
    hidden_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.width, int) and self.width < 1:
            raise ConfigError(f"{name}: width is at least 1, None or 'matched', not {self.width}")
        if self.init not in self.inits:
            raise ConfigError(f"{name} has no init={self.init!r}; {nearest(self.init, self.inits)}")

    def hidden(self, site: Site, roles: str) -> int:
        """The hidden width at a site."""
        if isinstance(self.width, int):
            return self.width
        width = self._paper_width(site, roles) if self.width is None else self._matched_width(site, roles)
        if width < 1:
            raise ConfigError(f"{type(self).__name__}: {site.dim} channels give no hidden width; pass width=")
        return width

    def _paper_width(self, site: Site, roles: str) -> int:
        raise NotImplementedError

    def _matched_width(self, site: Site, roles: str) -> int:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SNE(_Embedding):
    """r = ReLU(x W1_r + b1_r) W2_r + b2_r for each role r.

    The paper's Eq. 4 has no biases; b2 needs the host's bias (`Site.qkv_bias`), b1 also `hidden_bias`.
    width: hidden width h, None = C/2 (for more than two layers "matched", as the paper gives none). layers: number of
    layers, 1 is linear (Fig. 3). activation, init, hidden_bias: as for every embedding.
    """

    layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise ConfigError(f"SNE: layers is at least 1, not layers={self.layers}")
        if self.layers == 1 and isinstance(self.width, int):
            raise ConfigError(f"SNE: layers=1 has no hidden layer, so no width={self.width}; leave it out")
        if self.init == "svd" and self.layers > 2:
            raise ConfigError(f'SNE: init="svd" is for 1 or 2 layers, not layers={self.layers}; pass init="kaiming"')

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> "SNEProjection":
        return SNEProjection(self, site, roles)

    def cost(self, site: Site, roles: str) -> Cost:
        sizes = self.sizes(site, roles)
        total = Cost()
        for layer in range(1, self.layers + 1):
            bias = site.qkv_bias and (self.hidden_bias or layer == self.layers)
            for role in roles:
                total += linear_cost(site.tokens(role), sizes[layer - 1], sizes[layer], bias)
        return total

    def sizes(self, site: Site, roles: str) -> list[int]:
        """Widths of input, hidden layers and output."""
        return [site.dim, *(self.hidden(site, roles) for _ in range(self.layers - 1)), site.inner]

    def _paper_width(self, site: Site, roles: str) -> int:
        return site.dim // 2 if self.layers == 2 else self._matched_width(site, roles)

    def _matched_width(self, site: Site, roles: str) -> int:
        ends, target, square = site.dim + site.inner, site.dim * site.inner, self.layers - 2
        if square < 1:
            return target // ends
        # square h^2 + ends h <= target
        return (math.isqrt(ends * ends + 4 * square * target) - ends) // (2 * square)


@dataclass(frozen=True, kw_only=True)
class PSNE(_Embedding):
    """r = ReLU(x W1_r + b1_r) W2 + b2: the second layer is the same for all roles. Eq. 5 has no biases.

    width: hidden width h, None = 3C/4. activation, init, hidden_bias: as for every embedding.
    """

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> "PSNEProjection":
        return PSNEProjection(self, site, roles)

    def cost(self, site: Site, roles: str) -> Cost:
        h = self.hidden(site, roles)
        total = linear_cost(sum(site.tokens(role) for role in roles), h, site.inner, site.qkv_bias)
        for role in roles:
            total += linear_cost(site.tokens(role), site.dim, h, site.qkv_bias and self.hidden_bias)
        return total

    def _paper_width(self, site: Site, roles: str) -> int:
        return 3 * site.dim // 4

    def _matched_width(self, site: Site, roles: str) -> int:
        return len(roles) * site.dim * site.inner // (len(roles) * site.dim + site.inner)


@dataclass(frozen=True, kw_only=True)
class FSNE(_Embedding):
    """r = ReLU([x, code_r] W1 + b1) W2 + b2: both layers are the same for all roles.

    width: hidden width h, None = C. code: length of a code. tied: whether all layers of a model share the codes, as in
    the paper, or each layer has its own (SNE Table 5). activation, init, hidden_bias: as for every embedding.
    """

    inits: ClassVar[tuple[str, ...]] = (
        "trunc_normal", "kaiming",
    )  # shared layers cannot hold a linear map for each role  # fmt: skip
    code: int = 8
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.code < 1:
            raise ConfigError(f"FSNE: a code has at least 1 entry, not code={self.code}")

    def shared(self, roles: str) -> "Codes | None":
        return Codes(roles, self.code) if self.tied else None

    def build(self, site: Site, roles: str, shared: nn.Module | None = None) -> "FSNEProjection":
        return FSNEProjection(self, site, roles, shared if self.tied else None)

    def cost(self, site: Site, roles: str) -> Cost:
        h, number = self.hidden(site, roles), len(roles)
        # the part that the roles share is computed once for each input
        inputs = {role == "q" or site.memory is None: site.tokens(role) for role in roles}
        first = linear_cost(sum(inputs.values()), site.dim, h, bias=False)
        codes = linear_cost(number, self.code, h, site.qkv_bias and self.hidden_bias)
        second = linear_cost(sum(site.tokens(role) for role in roles), h, site.inner, site.qkv_bias)
        return first + codes + second + Cost(0 if self.tied else number * self.code)

    def _paper_width(self, site: Site, roles: str) -> int:
        return site.dim

    def _matched_width(self, site: Site, roles: str) -> int:
        return len(roles) * site.dim * site.inner // (site.dim + self.code + site.inner)


class Codes(nn.Module):
    """weight (roles, code): the codes of F-SNE's roles; drawn from N(0, 1), since equal codes would give q = k = v.

    A model whose layers share codes registers one such module and passes it to every layer.
    """

    def __init__(self, roles: str, code: int) -> None:
        super().__init__()
        self.roles = roles
        self.weight = nn.Parameter(torch.empty(len(roles), code))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the codes from N(0, 1)."""
        nn.init.normal_(self.weight)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay (the paper's Eq. 7 excludes the codes)."""
        return {"weight"}

    def rows(self, roles: str) -> Float[Tensor, "R code"]:
        """The codes of some roles, in their order."""
        return self.weight if roles == self.roles else torch.stack([self.weight[self.roles.index(r)] for r in roles])


class _EmbeddingProjection(LayeredProjection):
    """weight1, bias1, weight2, bias2, ...: matrices (outputs, inputs) with the rows of the roles in order."""

    def __init__(self, config: _Embedding, site: Site, roles: str) -> None:
        super().__init__()
        self.config, self.roles, self.heads = config, roles, site.heads
        self.channels, self.inner = site.dim, site.inner

    def add(self, layer: int, outputs: int, inputs: int, bias: bool) -> None:
        """Register the parameters of a layer."""
        self.register_parameter(f"weight{layer}", nn.Parameter(torch.empty(outputs, inputs)))
        self.register_parameter(f"bias{layer}", nn.Parameter(torch.empty(outputs)) if bias else None)

    def reset_parameters(self) -> None:
        """Draw the weights as `config.init` says and set biases to 0 ("svd" raises hidden ones)."""
        matrices = [weight for name, weight in self.named_parameters(recurse=False) if name.startswith("weight")]
        for weight in matrices:
            if self.config.init == "trunc_normal":
                nn.init.trunc_normal_(weight, std=0.02)
            else:  # also for "svd": these are the units that the linear projection does not need
                doubled = weight is not matrices[-1] and self.config.activation != "none"
                nn.init.normal_(weight, std=math.sqrt((2 if doubled else 1) / weight.shape[1]))
        for name, bias in self.named_parameters(recurse=False):
            if name.startswith("bias"):
                nn.init.zeros_(bias)
        if self.config.init == "svd":
            bound = matrices[0].shape[1] ** -0.5
            rows = len(self.roles) * self.inner
            warm_start(self, matrices[0].new_empty(rows, matrices[0].shape[1]).uniform_(-bound, bound), None)

    def adopt_linear(self, weight: Tensor, bias: Tensor | None) -> bool:
        if self.config.init != "svd":
            return False
        warm_start(self, weight, bias)
        return True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}weight" in state_dict and f"{prefix}weight1" not in state_dict:
            args[-1].append(  # the messages of errors
                f"{prefix}weight is of a linear projection, {type(self.config).__name__} has weight1 and weight2; load "
                'it into LinearQKV() and convert with warm_start, or swap the loaded model with init="svd"'
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def act(self, x: Tensor) -> Tensor:
        """The activation between two layers; may overwrite x."""
        return _ACTIVATIONS[self.config.activation](x)

    def layer(self, number: int, role: str | None, x: Tensor) -> Tensor:
        """The output of one layer; role None where all roles share it."""
        weight, bias = getattr(self, f"weight{number}"), getattr(self, f"bias{number}")
        if role is not None:
            row = self.roles.index(role)
            weight = weight.chunk(len(self.roles))[row]
            bias = None if bias is None else bias.chunk(len(self.roles))[row]
        return F.linear(x, weight, bias)


class SNEProjection(_EmbeddingProjection):
    """weight1 (R h, C), weight2 (R inner, h), more in between for more layers; R = number of roles."""

    config: SNE

    def __init__(self, config: SNE, site: Site, roles: str) -> None:
        super().__init__(config, site, roles)
        sizes = config.sizes(site, roles)
        for layer in range(1, config.layers + 1):
            bias = site.qkv_bias and (config.hidden_bias or layer == config.layers)
            self.add(layer, len(roles) * sizes[layer], sizes[layer - 1], bias)
        self.reset_parameters()

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        return tuple(heads(self._embed(x, role), self.heads) for role in roles)

    def _embed(self, x: Tensor, role: str) -> Tensor:
        for layer in range(1, self.config.layers):
            x = self.act(self.layer(layer, role, x))
        return self.layer(self.config.layers, role, x)


class PSNEProjection(_EmbeddingProjection):
    """weight1 (R h, C), weight2 (inner, h)."""

    def __init__(self, config: PSNE, site: Site, roles: str) -> None:
        super().__init__(config, site, roles)
        hidden = config.hidden(site, roles)
        self.add(1, len(roles) * hidden, site.dim, site.qkv_bias and config.hidden_bias)
        self.add(2, site.inner, hidden, site.qkv_bias)
        self.reset_parameters()

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        return tuple(heads(self.layer(2, None, self.act(self.layer(1, role, x))), self.heads) for role in roles)


class FSNEProjection(_EmbeddingProjection):
    """weight1 (h, C + code), weight2 (inner, h); codes is a child where the layer has its own codes, else None.

    Shared codes are no child, so that the state dict of a model has them once; the layer refers to the module, not to
    its parameter, so that copies of the model share theirs too.
    """

    config: FSNE

    def __init__(self, config: FSNE, site: Site, roles: str, shared: nn.Module | None = None) -> None:
        super().__init__(config, site, roles)
        if shared is not None:
            _check_codes(shared, roles, config.code)
        self.codes = Codes(roles, config.code) if shared is None else None
        self._shared = () if shared is None else (shared,)  # a tuple is not registered
        hidden = config.hidden(site, roles)
        self.add(1, hidden, site.dim + config.code, site.qkv_bias and config.hidden_bias)
        self.add(2, site.inner, hidden, site.qkv_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `config.init` says and its own codes from N(0, 1); shared codes stay."""
        super().reset_parameters()
        if self.codes is not None:
            self.codes.reset_parameters()

    @property
    def codebook(self) -> Codes:
        """The codes that this layer uses."""
        return self._shared[0] if self._shared else self.codes  # type: ignore[return-value]

    def forward(self, x: Float[Tensor, "B N C"], roles: str) -> tuple[Float[Tensor, "B H N d"], ...]:
        if not roles:
            return ()
        x_weight, code_weight = self.weight1.split([self.channels, self.config.code], 1)
        biases = F.linear(self.codebook.rows(roles), code_weight, self.bias1)  # (R, h)
        shared = F.linear(x, x_weight)  # (B, N, h)
        # role by role the tensors stay in the cache: as fast as one product for all, with less memory
        return tuple(heads(self.layer(2, None, self.act(shared + bias)), self.heads) for bias in biases)


def _check_codes(shared: nn.Module, roles: Sequence[str], code: int) -> None:
    if not isinstance(shared, Codes) or shared.weight.shape[1] != code or set(roles) - set(shared.roles):
        kind = f"{shared.roles!r} of {shared.weight.shape[1]}" if isinstance(shared, Codes) else type(shared).__name__
        raise ConfigError(f"FSNE(code={code}) needs codes of the roles {roles!r}, not {kind}; use config.shared(roles)")
