"""Comparisons of mechanisms with code outside Regard, with the same weights and inputs, in float64.

`EXTERNAL` lists what each mechanism is compared with; `regard check` and the tests use the same functions. Each returns
pairs (ours, theirs) and imports the other package when it is called. Where no package has a mechanism, the published
layer is written again in `published_layers.py`, and `what` says "rewrite of ...". Mechanisms without an entry are
compared with their own plain equation (`plain_gap`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from regard.core import Grid, MixerConfig, RegardError, Site

from . import packages as libs
from . import published_layers as rewrites
from .packages import F64, Pairs, perturbed


@dataclass(frozen=True, kw_only=True)
class External:
    """One comparison. package: the package that must be installed. what: the code that is compared.

    pairs: computes (ours, theirs). allowed: the largest difference. note: why it is more than rounding.
    """

    mechanism: str
    package: str
    what: str
    pairs: Callable[[], Pairs]
    allowed: float = 1e-11
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The result of a comparison. difference: the largest one, None where the package is missing (`label` names it)."""

    label: str
    difference: float | None
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is allowed; also True if the package is missing."""
        return self.difference is None or self.difference <= self.allowed


def largest(pairs: Pairs) -> float:
    """The largest absolute difference; NaN if a side has one."""
    return float(torch.stack([(ours.detach() - theirs.detach()).abs().max().to(F64) for ours, theirs in pairs]).max())


def compare(external: External) -> Compared:
    """Run one comparison; the state of torch's generator does not change."""
    try:
        with torch.random.fork_rng(devices=[]):
            difference = largest(external.pairs())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != external.package.replace("-", "_"):
            raise
        return Compared(label=f"needs {external.package}", difference=None, allowed=external.allowed)
    return Compared(label=external.what, difference=difference, allowed=external.allowed)


def comparisons(mechanism: str) -> tuple[External, ...]:
    """The comparisons of a mechanism, by the name of its configuration."""
    return tuple(external for external in EXTERNAL if external.mechanism == mechanism)


def plain_gap(config: MixerConfig, grids: Sequence[Grid], dim: int = 16, number: int = 2) -> float:
    """The largest difference of a layer's fast and plain form over the grids that it accepts, in float64.

    Raises: RegardError of the last grid if it accepts none.
    """
    differences: list[float] = []
    refused: RegardError | None = None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for grid in grids:
            torch.manual_seed(0)
            try:
                layer = perturbed(config.build(Site(dim, number, grid)))
                x = torch.randn(3, grid.tokens, dim, dtype=F64)
                differences.append(largest([(layer(x, grid), layer.reference(x, grid))]))
            except RegardError as error:
                refused = error
    if refused is not None and not differences:
        raise refused
    return float(torch.tensor(differences, dtype=F64).max())  # unlike that of Python's `max`, NaN if one is


EXTERNAL: tuple[External, ...] = (
    External(mechanism="Softmax", package="torch", what="torch nn.MultiheadAttention", pairs=libs.softmax_pairs),
    External(
        mechanism="Differential", package="timm", what="timm DiffAttention", pairs=libs.differential_pairs,
        allowed=1e-6, note="its lambda is float32",
    ),
    External(mechanism="Factors", package="torch", what="torch nn.MultiheadAttention (1010)", pairs=libs.content_pairs),
    External(
        mechanism="Factors", package="transformers", what="transformers Wav2Vec2-Conformer (1111)",
        pairs=libs.transformer_xl_pairs, allowed=1e-6, note="its positions are float32",
    ),
    External(mechanism="XCA", package="timm", what="timm xcit.XCA", pairs=libs.xca_pairs),
    External(mechanism="Linear", package="performer-pytorch", what="performer-pytorch", pairs=libs.linear_pairs),
    External(mechanism="FLatten", package="torch", what="rewrite of the repository", pairs=rewrites.flatten_pairs),
    External(
        mechanism="PolaFormer", package="torch", what="rewrite of the repository",
        pairs=rewrites.polaformer_pairs,
    ),
    External(mechanism="MHLA", package="torch", what="rewrite of the paper", pairs=rewrites.mhla_pairs),
    External(mechanism="InLine", package="torch", what="rewrite of the repository", pairs=rewrites.inline_pairs),
    External(mechanism="Performer", package="performer-pytorch", what="performer-pytorch", pairs=libs.performer_pairs),
    External(mechanism="ViT3", package="torch", what="rewrite of the repository", pairs=rewrites.vit3_pairs),
    External(mechanism="Agent", package="torch", what="rewrite of paper and repository", pairs=rewrites.agent_pairs),
    External(mechanism="Linformer", package="linformer", what="linformer", pairs=libs.linformer_pairs),
    External(mechanism="Nystrom", package="transformers", what="transformers Nystromformer", pairs=libs.nystrom_pairs),
    External(mechanism="PVT", package="timm", what="timm pvt_v2", pairs=libs.pvt_pairs),
    External(
        mechanism="TopK", package="torch", what="torch SDPA on the best keys; rewrite of DSA",
        pairs=rewrites.topk_pairs,
    ),
    External(mechanism="BRA", package="torch", what="rewrite of the repository", pairs=rewrites.bra_pairs),
    External(mechanism="MoBA", package="torch", what="rewrite of the paper", pairs=rewrites.moba_pairs),
    External(
        mechanism="Reformer", package="transformers", what="transformers Reformer (one round)",
        pairs=libs.hashing_pairs, allowed=1e-5, note="its keys have an epsilon of their own",
    ),
    External(
        mechanism="DAT", package="torchvision", what="torchvision deform_conv2d (its samples)",
        pairs=libs.sampling_pairs, allowed=1e-5, note="torchvision samples in float32",
    ),
    External(
        mechanism="DeformableDETR", package="transformers", what="transformers Deformable DETR",
        pairs=libs.deformable_detr_pairs,
    ),
    External(mechanism="Window", package="timm", what="timm swin_transformer", pairs=libs.window_pairs),
    External(mechanism="Window", package="timm", what="timm maxxvit (grid)", pairs=libs.spread_window_pairs),
    External(
        mechanism="Neighbourhood", package="transformers", what="transformers Longformer (a line)",
        pairs=libs.longformer_pairs, allowed=1e-6, note="its softmax is in float32",
    ),
    External(mechanism="MiTA", package="torch", what="rewrite of paper and repository", pairs=rewrites.mita_pairs),
    External(mechanism="NSA", package="torch", what="rewrite of the paper", pairs=rewrites.nsa_pairs),
    External(mechanism="Conv", package="torch", what="torch nn.Conv2d", pairs=libs.conv_pairs),
    External(
        mechanism="DeformableConv", package="torchvision", what="torchvision deform_conv2d (with gradients)",
        pairs=libs.deformable_pairs, allowed=1e-10,
    ),
)  # fmt: skip
"""Every comparison, in the order of `MIXERS`."""
