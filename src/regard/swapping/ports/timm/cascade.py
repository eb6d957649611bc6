"""Port of timm's EfficientViT of MSRA, whose heads each get the output of the head before."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from timm.models.efficientvit_msra import CascadedGroupAttention
from torch import Tensor, nn

from regard.core import Grid, Inputs, Mask, Operator, Site
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.swapping.host_mixer import HostMixer, MapPort, host_parts
from regard.swapping.layer import Port
from regard.swapping.maps import heads_of_map, map_of, map_of_heads, tokens_of

from .wide import BIASES, table_biases


class ByHead(Operator):
    """An operator of one head for each head, with parameters of its own, so that heads can run one after the other."""

    def __init__(self, config: HeadMixerConfig, site: Site) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(config.operator(replace(site, heads=1)) for _ in range(site.heads))

    def of_head(self, number: int, inputs: Inputs, plain: bool) -> Tensor:
        """The output (B, 1, N, e) of one head for its own inputs."""
        head: Any = self.heads[number]
        return inputs.into(head.reference if plain else head)

    def weights(
        self, q: Tensor | None, k: Tensor | None, v: Tensor, *, grid: Grid, memory: Grid | None = None,
        mask: Mask | None = None,
    ) -> Tensor:  # fmt: skip
        bias = None if mask is None else mask.bias
        parts: list[Tensor] = []
        for number, head in enumerate(self.heads):
            q_, k_, v_, own = (None if part is None else part[:, number : number + 1] for part in (q, k, v, bias))
            inputs = Inputs(q_, k_, v_, grid, memory, None if own is None else Mask(bias=own))
            parts.append(inputs.into(head.weights))  # type: ignore[arg-type]
        return torch.cat(parts, 1)


class CascadeMixer(HostMixer):
    """Each head gets a part of the channels, plus the output of the head before."""

    operator: ByHead

    def __init__(self, mixer: HeadMixer, host: Any, names: Sequence[str]) -> None:
        super().__init__(mixer, host, names)
        self.operator = ByHead(mixer.config, mixer.site)

    def make(self, x: Tensor, grid: Grid, extra: Any) -> Inputs:
        return self._cascade(x, grid, plain=False)[0]

    def compute(self, x: Tensor, grid: Grid, mask: Mask | None, rope: Any, plain: bool) -> Tensor:
        self.check(x, grid, mask)
        made, y = self._cascade(x, grid, plain)
        return self.finish(y, made, grid)

    def _cascade(self, x: Tensor, grid: Grid, plain: bool) -> tuple[Inputs, Tensor]:
        """The inputs and the output of all heads."""
        made: list[Inputs] = []
        outputs: list[Tensor] = []
        for number, part in enumerate(map_of(x, grid).chunk(self.site.heads, 1)):
            made.append(self._head(number, part + map_of_heads(outputs[-1], grid) if outputs else part, grid))
            outputs.append(self.operator.of_head(number, self._drop_unused(made[-1]), plain))
        q, k, v = (torch.cat([getattr(inputs, role) for inputs in made], 1) for role in "qkv")
        return Inputs(q, k, v, grid, mask=self._bias()), torch.cat(outputs, 1)

    def _head(self, number: int, x: Tensor, grid: Grid) -> Inputs:
        """Queries, keys and values of one head of a part (B, c, h, w) of the channels."""
        width = self.site.width
        q, k, v = self.around.qkvs[number](x).split([width, width, self.value_width], 1)
        q, k, v = (heads_of_map(role, 1) for role in (self.around.dws[number](q), k, v))
        return Inputs(q, k, v, grid, mask=self._bias(slice(number, number + 1)))

    def _bias(self, heads: slice = slice(None)) -> Mask:
        return Mask(bias=table_biases(self.around, heads))

    def finish(self, y: Tensor, made: Inputs, grid: Grid) -> Tensor:
        return tokens_of(self.around.proj(map_of_heads(y, grid)))


class TimmCascade(MapPort):
    """EfficientViT of MSRA, in windows, with biases: each head gets the output of the head before."""

    replaces: ClassVar[tuple[type, ...]] = (CascadedGroupAttention,)
    mask_kinds = frozenset({"bias"})
    parameter_names = host_parts("qkvs", "dws", "proj", *BIASES)
    mixer_class: ClassVar[type[HostMixer]] = CascadeMixer
    wide = "val_dim"

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        dim, count, width = module.proj[1].conv.out_channels, module.num_heads, module.key_dim
        return Site(dim=dim, heads=count, grid=grid, width=width, layer=layer, name=name)

    def set_resolution(self, resolution: int) -> None:
        """What `set_input_size` of the model calls. Raises: as `set_window_size`."""
        old = int(cast(Any, self.host).resolution)
        self.check_windows((old, old), (resolution, resolution))


PORTS: tuple[type[Port], ...] = (TimmCascade,)
