"""Mixture of top-k attention (MiTA, arXiv 2602.01219v5, Eq. 1-12, Algorithm 1).

m landmark queries, pooled from the queries on the grid, (a) compress all keys and values into m pairs (landmark, value)
and (b) each select the k keys that they score highest: an expert. A query attends to the m pairs and to the keys of its
best landmarks in one softmax. The pairs are additional keys: with k = N the result is still not softmax attention,
unless branches="route". Class and register tokens are queries and keys like any other, but are not pooled.
The paper proposes (App. B) a shared expert by test-time training, without a formula: here its output, that of `ttt` on
all keys and values, is added to that of the routed experts.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core import Card, Contract, Cost, Grid, Inputs, Operator, Site, operator_function, refuse_masks
from regard.core.errors import ConfigError, ShapeError, UnsupportedError
from regard.core.mask import Mask, hide, softmax_rows
from regard.core.view import View
from regard.mixers.shared.checks import check_site, refuse_unused
from regard.mixers.shared.executions import Situation, check_execution, choose, trains, true_facts
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.shared.landmarks import PooledQueries, landmark_count, pool_landmarks
from regard.mixers.shared.native import runs_native
from regard.mixers.shared.precision import upcast, without_autocast
from regard.mixers.shared.routed import Parts
from regard.mixers.shared.routed_attention import FORMS, attend, few_logits, needs_triton, runs_triton
from regard.mixers.vit3 import InnerModel, ViT3, ttt, ttt_reference

from .extractors import EXTRACTORS, Extractor, Landmarks, warn_of_strips
from .native import mita_native
from .routing import MitaPlan, add_key_bias, check_counts, check_plan, key_bias, mita_plan, select, without

__all__ = ["MiTA", "PooledQueries", "mita", "mita_plan", "mita_reference", "pool_landmarks"]

BRANCHES = ("both", "route", "compress")
EXECUTIONS = ("native", *FORMS)
DUPLICATES = ("multiset", "union")


@operator_function
def mita_reference(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    landmarks: Float[Tensor, "B H m d"], top: int, *, experts: int = 1, branches: str = "both",
    duplicates: str = "multiset", landmark_scale: float = 1.0, scale: float | None = None, mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None, plan: MitaPlan | None = None,
    probes: Float[Tensor, "B H m d"] | None = None,
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Every query scores all m + M candidates; a key counts once for each of the query's experts that contains it."""
    check_counts("mita", k.shape[-2], landmarks.shape[-2], top, experts)
    k, v = hide(k, mask), hide(v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    probe = add_key_bias("mita", mask, (landmarks if probes is None else probes) @ k.mT * scale)  # (B, H, m, M)
    route = without(q @ landmarks.mT * scale, landmark_keep)  # (B, H, N, m)
    plan = select(probe, route, top, experts) if plan is None else plan
    member = torch.zeros_like(probe).scatter(-1, plan.keys, 1.0)
    chosen = torch.nn.functional.one_hot(plan.experts, landmarks.shape[-2]).sum(-2)  # (B, H, N, m)
    count = chosen.to(q.dtype) @ member  # (B, H, N, M)
    count = count.clamp(max=1.0) if duplicates == "union" else count
    to_keys = add_key_bias("mita", mask, q @ k.mT * scale + count.log())
    values = softmax_rows(probe) @ v  # (B, H, m, e)
    if branches == "route":
        return softmax_rows(to_keys) @ v
    if branches == "compress":
        return softmax_rows(route * landmark_scale) @ values
    return softmax_rows(torch.cat([route * landmark_scale, to_keys], -1)) @ torch.cat([values, v], -2)


@operator_function
def mita(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], v: Float[Tensor, "B H M e"],
    landmarks: Float[Tensor, "B H m d"] | PooledQueries, top: int, *, experts: int = 1, branches: str = "both",
    duplicates: str = "multiset", landmark_scale: float = 1.0, scale: float | None = None, mask: Mask | None = None,
    landmark_keep: Bool[Tensor, "B m"] | None = None, plan: MitaPlan | None = None,
    probes: Float[Tensor, "B H m d"] | None = None, execution: str = "auto",
) -> Float[Tensor, "B H N e"]:  # fmt: skip
    """Queries attend to the landmarks' compressed values and to the `top` keys of each of their `experts` landmarks.

    landmarks: a tensor, or `PooledQueries(grid, m)` for averages of the queries, which a compiled kernel then pools
    itself. probes: what scores the keys, where queries are compared with something else. branches: "both", or only
    "route" (keys) or "compress" (landmarks). duplicates: whether a key that two experts of a query share counts twice
    ("multiset", Eq. 11-12 as written) or once ("union"). landmark_scale: of the landmark logits, d^-0.5 in the
    published code. scale: None = d^-0.5. mask: padding, and a bias with one row.
    landmark_keep: False for landmarks that are not attended to, and whose experts are taken last: where fewer than
    `experts` others are left, a query still has `experts`. plan: a selection to use instead of the best. execution:
    "auto", or one of "native" (a compiled kernel for the CPU), "triton" (kernels for GPUs; neither can be
    differentiated twice), "varlen" (PyTorch's attention for sequences of any length, on CUDA in half precision),
    "dense", "gather" and "grouped", which differ in speed and memory only. "auto" follows the table in
    docs/mechanisms.md. With branches="compress" nothing is routed: all executions are the same few products.
    Scores and the softmax are in float32 for half precision. Nothing is learned through the selection. Equal scores
    are broken arbitrarily. A key that `mask` forbids has weight 0 even where an expert has fewer allowed keys than
    `top`; a query without any allowed key gets zeros. The values of keys hidden by padding, even NaN, have no effect.
    An expert may have no queries. Any other score that is not finite makes outputs and gradients of its own head NaN
    and leaves other heads as they are.
    Raises: ShapeError for tensors or numbers that do not fit, also indices of a plan (read in eager mode on the CPU);
    UnsupportedError for masks with a row per query, and for an execution that cannot run; ConfigError for unknown
    options.
    """
    if isinstance(landmarks, PooledQueries) and landmarks.of_clip:
        landmarks = landmarks.of(q)
    given: Tensor | list[int] = _windows(q, landmarks) if isinstance(landmarks, PooledQueries) else landmarks
    m = _check_landmarks(q, given) if isinstance(given, Tensor) else given[2] * given[3]
    check_counts("mita", k.shape[-2], m, top, experts)
    _check_options(branches, duplicates)
    check_execution(execution, EXECUTIONS)
    if plan is not None:
        check_plan(plan, q, k, m, top, experts)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    once = duplicates == "union" and experts > 1
    bias = None if mask is None else key_bias("mita", mask, upcast(k)[..., 0])
    k, v = hide(k, mask), hide(v, mask)
    if branches != "compress":
        execution = _execution(execution, q, k, v, m, top, experts, bias, once, probes)
    kernel: dict[str, Any] = {
        "shared": branches == "both", "scale": scale, "factor": landmark_scale, "bias": bias,
        "drop": None if landmark_keep is None else ~landmark_keep,
    }  # fmt: skip
    if execution == "native" and branches != "compress":
        return mita_native(q, k, v, given, top, experts, plan=plan, **kernel)
    landmarks = landmarks.of(q) if isinstance(landmarks, PooledQueries) else landmarks
    with without_autocast(q.device):
        if execution == "triton" and branches != "compress" and plan is None and not once and probes is None:
            return _by_triton(q, k, v, landmarks, (top, experts), kernel)
        compared = upcast(landmarks) * scale
        probe = (compared if probes is None else upcast(probes) * scale) @ upcast(k).mT  # (B, H, m, M)
        probe = probe if bias is None else probe + bias
        route = without(upcast(q) @ compared.mT, landmark_keep)  # (B, H, N, m)
        landmark_weights = torch.softmax(probe, -1) if bias is None else softmax_rows(probe)
        values = None if branches == "route" else landmark_weights.to(v.dtype) @ v  # (B, H, m, e)
        shared = route if landmark_scale == 1.0 else route * landmark_scale
        if branches == "compress":
            return softmax_rows(shared).to(v.dtype) @ cast(Tensor, values)
        plan = select(probe, route, top, experts) if plan is None else plan
        parts = Parts(q * scale, k, v, *plan, None if branches == "route" else shared, values, bias)
        return attend(execution, parts, once=once)


def _execution(
    execution: str, q: Tensor, k: Tensor, v: Tensor, m: int, top: int, experts: int, bias: Tensor | None, once: bool,
    probes: Tensor | None,
) -> str:  # fmt: skip
    """What runs. Raises: UnsupportedError if the compiled kernel is requested and cannot."""
    trained, apart = bias is not None and bias.requires_grad, probes is not None
    if execution == "native" and (once or trained or apart):
        reason = "does not train a bias" if trained else "takes no probes" if apart else "cannot count shared keys once"
        raise UnsupportedError(f'mita: execution="native" {reason}; use "auto"')
    native = not (once or trained or apart) and runs_native("mita", execution, q)
    triton, few = experts == 1 and not apart and runs_triton(q, bias), few_logits(q, k.shape[-2])
    situation = Situation(
        device=q.device, dtype=q.dtype, tokens=q.shape[-2], keys=k.shape[-2], m=m, top=top * experts,
        trains=trains(q, k, v), facts=true_facts({"native": native, "union": once, "triton": triton, "few": few}),
    )  # fmt: skip
    return choose("MiTA", execution, situation)


def _by_triton(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, numbers: tuple[int, int], options: dict[str, Any]
) -> Tensor:
    """numbers: keys of an expert, experts of a query."""
    needs_triton()
    from .triton_kernels import mita_triton

    return mita_triton(q, k, v, landmarks, *numbers, **options)


def _windows(q: Tensor, landmarks: PooledQueries) -> list[int]:
    """The windows of landmarks, see pool_native.py. Raises: as `PooledQueries.windows`; GridError unless they fit."""
    windows = landmarks.windows()
    landmarks.grid.check(q)
    return windows


def _check_landmarks(q: Tensor, landmarks: Tensor) -> int:
    """The number of landmarks. Raises: ShapeError unless they fit the queries."""
    if landmarks.shape[-1] != q.shape[-1]:
        raise ShapeError(f"mita: landmarks have width {landmarks.shape[-1]}, q has {q.shape[-1]}; they must be equal")
    return landmarks.shape[-2]


def _check_options(branches: str, duplicates: str) -> None:
    if branches not in BRANCHES:
        raise ConfigError(f"branches is one of {', '.join(BRANCHES)}, not {branches!r}")
    if duplicates not in DUPLICATES:
        raise ConfigError(f"duplicates is one of {', '.join(DUPLICATES)}, not {duplicates!r}")


@dataclass(frozen=True, kw_only=True)
class MiTA(HeadMixerConfig):
    """m: landmarks, a number or windows: (rows, columns), of a clip (frames, rows, columns). k: keys of each expert.
    experts: experts of each query.

    The paper has m = k = 25 and one expert for 14x14 patch tokens. branches: "both", "route" (keys only; the caption of
    Table 5, on LRA, doubles k then) or "compress" (landmarks only: Agent attention without bias). duplicates: a key
    that two experts of a query share counts twice ("multiset") or once ("union"). landmarks: "avg2d" averages windows
    of the grid, "avg1d" runs of consecutive patch tokens, "random" draws patch tokens, "learned" has parameters, "conv"
    and "dwconv" convolve the queries, "tome" merges similar ones. windows: "adaptive" ones overlap where they do not
    divide the grid, those of a "partition" do not. preset: "paper" is Eq. 10; "official" is what the published code
    computes: landmark logits scaled by d^-0.5 twice, and pooling that takes the first token for the first pixel;
    "official-patches" is its layer for ViT-5, which scales twice too but pools patch tokens alone.
    shared_expert: "landmarks" with their values, or "ttt": the gated inner model of ViT3 after one step on all tokens,
    with parameters of its own and without masks.
    In cross-attention landmarks are of the queries, so m is at most their number of patch tokens; a larger m is an
    error, so that costs and results always belong to the m that was given. An integer m whose windows are more than
    twice as long as wide, such as m = 7 on 14x14, gives a warning, a pair does not.
    Raises: ConfigError for numbers below 1, unknown options, or options that exclude each other: landmarks with
    parameters get no gradient from branches="route". Building raises ConfigError if k or experts is too large for the
    site, and GridError, with the nearest possible number, if its grid cannot give m landmarks.
    """

    m: int | tuple[int, int] | tuple[int, int, int] = 25
    k: int = 25
    experts: int = 1
    branches: Literal["both", "route", "compress"] = "both"
    duplicates: Literal["multiset", "union"] = "multiset"
    landmarks: Literal["avg2d", "avg1d", "random", "learned", "conv", "dwconv", "tome"] = "avg2d"
    windows: Literal["adaptive", "partition"] = "adaptive"
    preset: Literal["paper", "official", "official-patches"] = "paper"
    shared_expert: Literal["landmarks", "ttt"] = "landmarks"

    card = Card(
        title="Mixture of top-k attention", source="MiTA, arXiv 2602.01219",
        formula="softmax([q Q^T, q K_e^T] / sqrt(d)) [softmax(Q K^T / sqrt(d)) V, V_e],  Q = pool(q)",
        complexity="O(N (m + s k) C)", query_content=True, key_content=True, dynamic="two-step",
        scaling=frozenset({"routing", "compression"}), expert_type="MLP of width k (+ shared width m)",
        expert_count="m (+1)", construction="landmark probing", topology="N-to-m", conditions="Q, K, V", discrete=True,
        prefix="queries and keys like any other token; not pooled into landmarks",
    )  # fmt: skip
    masks = frozenset({"padding", "key bias", "product"})
    depth = True
    cross = True
    samples = (
        "MiTA(m=4, k=5)", "MiTA(m=4, k=3, experts=2, dwc=3)",
        'MiTA(m=(1, 2), k=4, branches="route", landmarks="avg1d")', 'MiTA(m=4, branches="compress", preset="official")',
        'MiTA(m=4, k=5, experts=2, duplicates="union", windows="partition")', 'MiTA(m=4, k=5, landmarks="learned")',
        'MiTA(m=4, k=5, landmarks="random", experts=2)', 'MiTA(m=4, k=5, landmarks="dwconv")',
        'MiTA(m=4, k=5, landmarks="conv", branches="compress")', 'MiTA(m=4, k=5, landmarks="tome")',
        'MiTA(m=4, k=5, shared_expert="ttt")',
    )  # fmt: skip

    @property
    def contract(self) -> Contract:
        return Contract(counted={"execution": "dense" if self.once else "gather"})

    def __post_init__(self) -> None:
        super().__post_init__()
        landmark_count(self.m)  # refuses what is below 1
        if min(self.k, self.experts) < 1:
            raise ConfigError(f"k and experts are at least 1, not k={self.k}, experts={self.experts}")
        if self.experts > self.number:
            raise ConfigError(f"{self.experts} experts per query of {self.number} landmarks; experts is at most m")
        if self.branches == "compress":
            refuse_unused(self, ["experts", "duplicates"], 'branches="both" or "route", which have experts')
        if self.landmarks not in ("avg2d", "avg1d") or self.preset != "paper":  # means alone are those of positions too
            object.__setattr__(self, "masks", self.masks - {"product"})
        if self.shared_expert == "ttt":
            if self.branches != "both":
                raise ConfigError(f'shared_expert="ttt" is one of both branches; branches="{self.branches}" has one')
            object.__setattr__(self, "masks", frozenset())
            object.__setattr__(self, "card", replace(self.card, row_maps=False))
        if self.attended == "route" and EXTRACTORS[self.landmarks].learned:
            other = 'shared_expert="ttt"' if self.branches == "both" else 'branches="route"'
            raise ConfigError(
                f'landmarks="{self.landmarks}" would never be trained with {other}: '
                'nothing is learned through the selection; take branches="both" or landmarks="avg2d"'
            )
        if self.preset != "paper" and self.landmarks not in ("avg2d", "avg1d"):
            raise ConfigError(f'preset="{self.preset}" pools means; landmarks="{self.landmarks}" needs preset="paper"')

    @property
    def number(self) -> int:
        """How many landmarks."""
        return landmark_count(self.m)

    @property
    def once(self) -> bool:
        """Whether a key of two experts of a query counts once, so that all logits are computed, at any size."""
        return self.duplicates == "union" and self.experts > 1

    @property
    def attended(self) -> str:
        """The branches of the softmax: `branches`, without the landmarks where the shared expert is another."""
        return "route" if self.shared_expert == "ttt" else self.branches

    def operator(self, site: Site) -> "MiTAOperator":
        self._refuse(site)
        if isinstance(self.m, int) and self.landmarks in ("avg2d", "conv", "dwconv"):
            warn_of_strips(self.m, site.grid)
        return MiTAOperator(self, site)

    def operator_cost(self, site: Site, accounting: str = "executed") -> Cost:
        """Products of landmarks with keys and queries are computed once and used twice (Algorithm 1), plus pooling.

        Executed: of the union of several experts all logits, and the product that finds the keys of each query.
        """
        self._refuse(site)
        n, keys, inner = site.grid.tokens, (site.memory or site.grid).tokens, site.inner
        compress = self.number * inner * (keys + n)  # q~ K^T and q q~^T
        if self.attended != "route":
            compress *= 2  # landmark values, and their part in the output
        step = Cost()
        if self.shared_expert == "ttt":  # two matrices: forward and gradient on the keys, then on the queries
            step = Cost(2 * inner * site.width, (4 * keys + 2 * n) * inner * site.width)
        routed = 0 if self.branches == "compress" else 2 * n * self.k * self.experts * inner
        if self.once and accounting == "executed":
            routed = n * keys * (2 * inner + self.number * site.heads)
        return Cost(0, compress + routed) + step + EXTRACTORS[self.landmarks].cost(self, site)

    def _refuse(self, site: Site) -> None:
        """Raises: ConfigError, GridError if this configuration cannot be built at the site."""
        if self.branches != "compress":
            check_site("k", self.k, site, (site.memory or site.grid).tokens, "keys")
        EXTRACTORS[self.landmarks].check(self, site.grid)


class MiTAOperator(Operator):
    """extract: computes the landmarks, with parameters where it has some. execution: see `mita`.

    inner: the inner model of shared_expert="ttt", else None.
    """

    def __init__(self, config: MiTA, site: Site, execution: str = "auto") -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.extract = EXTRACTORS[config.landmarks](config, site)
        self.inner = InnerModel(ViT3(local=False), site) if config.shared_expert == "ttt" else None

    def pool(self, q: Float[Tensor, "B H N d"], grid: Grid, keep: Bool[Tensor, "B N"] | None = None) -> Landmarks:
        """The landmarks of q, and with padding which landmarks have at least one token."""
        return cast(Landmarks, self.extract(q, grid, keep))

    def compute(self, inputs: Inputs, plain: bool) -> Tensor:
        q, k, options = self._options(inputs, plain)
        out = (
            mita_reference(q, k, inputs.v, **options)
            if plain
            else mita(q, k, inputs.v, execution=self.execution, **options)
        )
        if self.inner is None:
            return out
        refuse_masks(self.config, inputs.mask)
        return out + (ttt_reference if plain else ttt)(q, k, inputs.v, self.inner.w1, self.inner.w2)

    def views(self, inputs: Inputs) -> tuple[View, ...]:
        """Where each query's landmark looks (Fig. 3), the keys of its experts and the queries that share its expert
        (Fig. 4), and the keys that no expert has (Fig. 8)."""
        q, k, options = self._options(inputs, plain=True)
        landmarks, mask, scale = options["landmarks"], options["mask"], q.shape[-1] ** -0.5
        probe = (landmarks if options["probes"] is None else options["probes"]) @ hide(k, mask).mT * scale
        probe = add_key_bias("MiTA", mask, probe)
        route = without(q @ landmarks.mT * scale, options["landmark_keep"])
        plan = select(probe, route, options["top"], self.config.experts)
        looks = softmax_rows(probe)[0]
        if self.config.branches == "compress":
            return (View("where its landmark looks", looks, plan.experts[0, ..., 0]),)
        keys = torch.zeros_like(looks, dtype=torch.bool).scatter(-1, plan.keys[0], True)
        chosen = looks.new_zeros(*q.shape[1:3], looks.shape[1]).scatter(-1, plan.experts[0], 1.0)  # (H, N, m)
        first = torch.zeros_like(plan.experts[0, ..., 0])
        lacking = View("keys that no expert has", ~keys.any(1, keepdim=True), first)
        if self.config.experts > 1:
            return (View("keys of its experts", chosen @ keys.to(chosen.dtype) > 0), lacking)
        expert = plan.experts[0, ..., 0]
        return (
            View("keys of its expert", keys, expert), View("queries of its expert", chosen.mT > 0, expert),
            View("where its landmark looks", looks, expert), lacking,
        )  # fmt: skip

    def _options(self, inputs: Inputs, plain: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries, keys and options of `mita` and its reference. Padding belongs to the keys: pooling sees it in
        self-attention only.

        With a product of positions these are further channels of queries and keys. A landmark then probes with the mean
        of its queries' channels, and is compared with queries like a key at the mean of its places.
        Raises: UnsupportedError for a causal mask or one bias row per query, before anything is computed; for a product
        in cross-attention, where landmarks have no place among the keys.
        """
        q, k, mask, config = inputs.q, inputs.k, inputs.mask, self.config
        key_bias("MiTA", None if mask is None else replace(mask, product=None), k[..., 0])
        keep = mask.keep if mask is not None and inputs.memory is None else None
        scale, probes, landmarks = q.shape[-1] ** -0.5, None, cast(Tensor | PooledQueries, None)
        if mask is not None and mask.product is not None:
            if inputs.memory is not None:
                raise UnsupportedError("MiTA takes a product of positions where queries and keys are the same tokens")
            of_keys = mask.product[1].to(k).expand(*k.shape[:2], -1, -1)
            k, compared = torch.cat([k, of_keys], -1), torch.cat([q, of_keys], -1)
            factor = k.shape[-1] ** 0.5  # the logits are divided by it
            q = torch.cat([q * (scale * factor), mask.product[0].to(q) * factor], -1)
            (landmarks, landmark_keep), (probes, _) = (self.pool(x, inputs.grid, keep) for x in (compared, q))
            mask = replace(mask, product=None)
        else:
            averages = None if plain or keep is not None else cast(Extractor, self.extract).pooled_queries(inputs.grid)
            landmarks, landmark_keep = (averages, None) if averages else self.pool(q, inputs.grid, keep)
        return q, k, {
            "landmarks": landmarks, "top": config.k if config.branches != "compress" else 1, "experts": config.experts,
            "branches": config.attended, "duplicates": config.duplicates,
            "landmark_scale": scale if config.preset != "paper" else 1.0, "mask": mask,
            "landmark_keep": landmark_keep, "probes": probes,
        }  # fmt: skip
