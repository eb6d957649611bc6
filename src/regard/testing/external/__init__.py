"""Comparisons of mechanisms with code outside Regard, with the same weights and inputs, in float64.

`EXTERNAL` lists what each mechanism is compared with; `regard check` and the tests use the same functions. Each returns
pairs (ours, theirs) and imports the other package when it is called. Mechanisms without an entry are compared with
their own plain equation (`plain_gap`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from regard.core import Grid, MixerConfig, RegardError, Site

from . import packages as libs
from .packages import F64, Pairs, perturb


@dataclass(frozen=True)
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
                layer = perturb(config.build(Site(dim, number, grid)))
                x = torch.randn(3, grid.tokens, dim, dtype=F64)
                differences.append(largest([(layer(x, grid), layer.reference(x, grid))]))
            except RegardError as error:
                refused = error
    if refused is not None and not differences:
        raise refused
    return float(torch.tensor(differences, dtype=F64).max())  # unlike that of Python's `max`, NaN if one is


EXTERNAL: tuple[External, ...] = (
    External("Softmax", "torch", "torch nn.MultiheadAttention", libs.softmax_pairs),
    External(
        "Differential", "timm", "timm DiffAttention", libs.differential_pairs,
        allowed=1e-6, note="its lambda is float32",
    ),
    External("Factors", "torch", "torch nn.MultiheadAttention (1010)", libs.content_pairs),
    External(
        "Factors", "transformers", "transformers Wav2Vec2-Conformer (1111)", libs.transformer_xl_pairs,
        allowed=1e-6, note="its positions are float32",
    ),
    External("XCA", "timm", "timm xcit.XCA", libs.xca_pairs),
    External("Linear", "performer-pytorch", "performer-pytorch", libs.linear_pairs),
    External("Performer", "performer-pytorch", "performer-pytorch", libs.performer_pairs),
    External("Linformer", "linformer", "linformer", libs.linformer_pairs),
    External("Nystrom", "transformers", "transformers Nystromformer", libs.nystrom_pairs),
    External("PVT", "timm", "timm pvt_v2", libs.pvt_pairs),
    External(
        "Reformer", "transformers", "transformers Reformer (one round)", libs.hashing_pairs,
        allowed=1e-5, note="its keys have an epsilon of their own",
    ),
    External(
        "DAT", "torchvision", "torchvision deform_conv2d (its samples)", libs.sampling_pairs,
        allowed=1e-5, note="torchvision samples in float32",
    ),
    External("DeformableDETR", "transformers", "transformers Deformable DETR", libs.deformable_detr_pairs),
    External("Window", "timm", "timm swin_transformer", libs.window_pairs),
    External("Window", "timm", "timm maxxvit (grid)", libs.spread_window_pairs),
    External(
        "Neighbourhood", "transformers", "transformers Longformer (a line)", libs.longformer_pairs,
        allowed=1e-6, note="its softmax is in float32",
    ),
    External("Conv", "torch", "torch nn.Conv2d", libs.conv_pairs),
    External(
        "DeformableConv", "torchvision", "torchvision deform_conv2d (with gradients)", libs.deformable_pairs,
        allowed=1e-10,
    ),
)  # fmt: skip
"""Every comparison, in the order of `MIXERS`."""
