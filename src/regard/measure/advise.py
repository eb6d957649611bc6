"""Which mechanisms suit a model's attention layers on this machine: exact counts and times beside each other.

Counts and times are of the attention layers alone, with their projections; the rest of the model is the same for all.
Nothing here says how well a mechanism learns: that is what runs and studies are for.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from regard.core import Grid, MixerConfig, RegardError, Site
from regard.hosts.swap import create_model, plan_swap
from regard.mixers.softmax import Softmax
from regard.mixers.spell import spell

from .bench import bench


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One mechanism in all attention layers of a model, for one image in the counts and one batch in the times.

    params, macs: of the layers. forward, both: seconds of a forward pass, and of forward and backward. ratio: of `both`
    to softmax attention. pareto: no other mechanism is better in parameters, MACs and `both` at once. masks: kinds that
    it applies. other_grid: whether a layer that is built takes another image size. refused: why it cannot be used here;
    then there are no numbers.
    """

    mixer: str
    params: int | None = None
    macs: int | None = None
    forward: float | None = None
    both: float | None = None
    ratio: float | None = None
    pareto: bool = False
    masks: tuple[str, ...] = ()
    other_grid: bool | None = None
    refused: str = ""


def attention_sites(host: str, size: tuple[int, int] | None = None) -> dict[Site, int]:
    """The different attention layers of a model and how many it has of each; no weights are made.

    size: (height, width) of images, None = the host's own. Raises: ConfigError, SwapError.
    """
    with torch.device("meta"):
        model = create_model(host, None, **({} if size is None else {"img_size": size})).eval()
        planned = plan_swap(model, Softmax()).sites
    return dict(Counter(replace(one.layer.mixer.site, layer=0, name="", drop=0.0) for one in planned))


def advise(
    host: str,
    configs: Sequence[MixerConfig],
    *,
    size: tuple[int, int] | None = None,
    batch: int = 4,
    dtype: str = "fp32",
    device: str = "cpu",
    seconds: float = 0.3,
    report: Callable[[str], None] | None = None,
) -> list[Advice]:
    """Rank mechanisms at a model's attention layers, fastest training first; softmax is always among them.

    batch: images. seconds: for each mechanism at each different layer, forward and again with backward. Candidates are
    timed in turn, so that a busy machine slows all alike. What cannot be built at a layer stands at the end with why.
    Raises: ConfigError as `bench` or for an unknown host, SwapError if it has no attention to replace.
    """
    sites = attention_sites(host, size)
    every = list(dict.fromkeys([Softmax(), *configs]))
    refused = {config: _refusal(config, sites) for config in every}
    usable = [config for config in every if not refused[config]]
    forward = dict.fromkeys(usable, 0.0)
    both = dict.fromkeys(usable, 0.0)
    for site, number in sites.items():
        for total, backward in ((forward, False), (both, True)):
            timings = bench(usable, [site.grid], dim=site.dim, heads=site.heads, batch=batch, dtype=dtype,
                            backward=backward, part="layer", device=device, seconds=seconds, report=report)  # fmt: skip
            for config, timing in zip(usable, timings, strict=True):
                total[config] += number * timing.seconds
    found = []
    for config in usable:
        costs = [(config.cost(site), number) for site, number in sites.items()]
        found.append(
            Advice(
                mixer=spell(config),
                params=sum(cost.params * number for cost, number in costs),
                macs=sum(cost.macs * number for cost, number in costs),
                forward=forward[config],
                both=both[config],
                ratio=both[config] / both[usable[0]],
                masks=tuple(sorted(config.masks)),
                other_grid=all(_takes_another_grid(config, site) for site in sites),
            )
        )
    front = [replace(one, pareto=not any(_beats(other, one) for other in found)) for one in found]
    front.sort(key=lambda one: one.both or 0.0)
    return [*front, *(Advice(mixer=spell(config), refused=text) for config, text in refused.items() if text)]


def _refusal(config: MixerConfig, sites: dict[Site, int]) -> str:
    """Why a mechanism cannot stand at one of the layers; "" if it can. One small forward pass each."""
    try:
        for site in sites:
            config.cost(site)
            with torch.no_grad():
                config.build(site)(torch.randn(1, site.grid.tokens, site.dim), site.grid)
    except RegardError as error:
        return str(error)
    return ""


def _takes_another_grid(config: MixerConfig, site: Site) -> bool:
    """Whether a built layer accepts a grid that is half as large again, as a larger image brings it."""
    grid = replace(site.grid, height=site.grid.height * 3 // 2 + 1, width=site.grid.width * 3 // 2 + 1)
    return _runs(config, site, grid)


def _runs(config: MixerConfig, site: Site, grid: Grid) -> bool:
    try:
        with torch.no_grad():
            config.build(site)(torch.randn(1, grid.tokens, site.dim), grid)
    except RegardError:
        return False
    return True


def _beats(other: Advice, one: Advice) -> bool:
    """At least as good in parameters, MACs and time, and better in one of them."""
    first = (other.params or 0, other.macs or 0, other.both or 0.0)
    second = (one.params or 0, one.macs or 0, one.both or 0.0)
    return all(a <= b for a, b in zip(first, second, strict=True)) and first != second
