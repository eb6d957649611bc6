"""Mechanisms beside code that Regard did not write, with the same weights and inputs, in float64.

`EXTERNAL` lists what each mechanism is compared with; `regard check` and the tests use the same functions. Each returns
pairs (ours, theirs) and imports the other package when it is called. Where no package has a mechanism, its published
layer is written anew in `external_rewrites.py`, which is said ("rewrite of ..."). For mechanisms without an entry their
own plain equation stands (`plain_gap`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from regard.core import Grid, MixerConfig, RegardError, Site

from . import packages as made
from . import published_layers as anew
from .packages import F64, Pairs, moved


@dataclass(frozen=True, kw_only=True)
class External:
    """One comparison. package: that must be installed; what: of it, and what of the mechanism is compared.

    pairs: makes (ours, theirs). allowed: the largest difference. note: why that is more than rounding.
    """

    mechanism: str
    package: str
    what: str
    pairs: Callable[[], Pairs]
    allowed: float = 1e-11
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a comparison found. difference: the largest, None where the package is missing (`said` names it)."""

    said: str
    difference: float | None
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is as small as it must be; also where there is none."""
        return self.difference is None or self.difference <= self.allowed


def largest(pairs: Pairs) -> float:
    """The largest absolute difference; NaN where one side has it."""
    return max(float((ours.detach() - theirs.detach()).abs().max()) for ours, theirs in pairs)


def compare(external: External) -> Compared:
    """Carry out one comparison; torch's generator is left as it was."""
    try:
        with torch.random.fork_rng(devices=[]):
            difference = largest(external.pairs())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != external.package.replace("-", "_"):
            raise
        return Compared(said=f"needs {external.package}", difference=None, allowed=external.allowed)
    return Compared(said=external.what, difference=difference, allowed=external.allowed)


def comparisons(mechanism: str) -> tuple[External, ...]:
    """What a mechanism, by the name of its configuration, is compared with."""
    return tuple(one for one in EXTERNAL if one.mechanism == mechanism)


def plain_gap(config: MixerConfig, grids: Sequence[Grid], dim: int = 16, number: int = 2) -> float:
    """The largest difference of a layer's fast form and its plain equation, over the grids that it takes, in float64.

    Raises: RegardError of the last grid if it takes none.
    """
    found: list[float] = []
    refused: RegardError | None = None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for grid in grids:
            torch.manual_seed(0)
            try:
                layer = moved(config.build(Site(dim, number, grid)))
                x = torch.randn(3, grid.tokens, dim, dtype=F64)
                found.append(largest([(layer(x, grid), layer.reference(x, grid))]))
            except RegardError as error:
                refused = error
    if refused is not None and not found:
        raise refused
    return max(found)


EXTERNAL: tuple[External, ...] = (
    External(mechanism="Softmax", package="torch", what="torch nn.MultiheadAttention", pairs=made.softmax_pairs),
    External(mechanism="XCA", package="timm", what="timm xcit.XCA", pairs=made.xca_pairs),
    External(mechanism="MiTA", package="torch", what="rewrite of paper and repository", pairs=anew.mita_pairs),
    External(mechanism="Factors", package="torch", what="torch nn.MultiheadAttention (1010)", pairs=made.content_pairs),
    External(
        mechanism="Factors", package="transformers", what="transformers Wav2Vec2-Conformer (1111)",
        pairs=made.transformer_xl_pairs, allowed=1e-6, note="its positions are made in float32",
    ),
    External(mechanism="Conv", package="torch", what="torch nn.Conv2d", pairs=made.conv_pairs),
    External(
        mechanism="DeformableConv", package="torchvision", what="torchvision deform_conv2d (with gradients)",
        pairs=made.deformable_pairs, allowed=1e-10,
    ),
    External(mechanism="Linear", package="performer-pytorch", what="performer-pytorch", pairs=made.linear_pairs),
    External(mechanism="FLatten", package="torch", what="rewrite of the repository", pairs=anew.flatten_pairs),
    External(mechanism="PolaFormer", package="torch", what="rewrite of the repository", pairs=anew.polaformer_pairs),
    External(mechanism="MHLA", package="torch", what="rewrite of the paper", pairs=anew.mhla_pairs),
    External(mechanism="Agent", package="torch", what="rewrite of paper and repository", pairs=anew.agent_pairs),
    External(
        mechanism="TopK", package="torch", what="torch SDPA on the best keys; rewrite of DSA",
        pairs=anew.topk_pairs,
    ),
    External(mechanism="BRA", package="torch", what="rewrite of the repository", pairs=anew.bra_pairs),
    External(mechanism="InLine", package="torch", what="rewrite of the repository", pairs=anew.inline_pairs),
    External(mechanism="Linformer", package="linformer", what="linformer", pairs=made.linformer_pairs),
    External(mechanism="Performer", package="performer-pytorch", what="performer-pytorch", pairs=made.performer_pairs),
    External(mechanism="Nystrom", package="transformers", what="transformers Nystromformer", pairs=made.nystrom_pairs),
    External(mechanism="Window", package="timm", what="timm swin_transformer", pairs=made.window_pairs),
    External(mechanism="PVT", package="timm", what="timm pvt_v2", pairs=made.pvt_pairs),
    External(
        mechanism="DAT", package="torchvision", what="torchvision deform_conv2d (its samples)",
        pairs=made.sampling_pairs, allowed=1e-5, note="torchvision samples in float32",
    ),
    External(mechanism="MoBA", package="torch", what="rewrite of the paper", pairs=anew.moba_pairs),
    External(mechanism="NSA", package="torch", what="rewrite of the paper", pairs=anew.nsa_pairs),
    External(
        mechanism="Reformer", package="transformers", what="transformers Reformer (one round)",
        pairs=made.hashing_pairs, allowed=1e-5, note="its keys have an epsilon of their own",
    ),
    External(mechanism="ViT3", package="torch", what="rewrite of the repository", pairs=anew.vit3_pairs),
)  # fmt: skip
"""Every comparison, in the order of `MIXERS`."""
