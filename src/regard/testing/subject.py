"""A mechanism under test at one grid, and how two tensors are compared."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.core import Contract, Grid, Mixer, MixerConfig, RegardError, Site

EXACT = 1e-12  # float64, relative to the size of the output
STEP = 2e-5  # inputs that jump within this step are not compared: a tie decided otherwise is no fault


class ContractError(RegardError, AssertionError):
    """A mechanism broke an item of the contract; the message names item, grid and what was measured."""


@dataclass
class Subject:
    """A mechanism under test at one grid. Layers are in float64 with values that float32 holds exactly."""

    config: MixerConfig
    grid: Grid
    dim: int
    heads: int
    batch: int
    seed: int
    contract: Contract

    def site(self, grid: Grid | None = None, memory: Grid | None = None) -> Site:
        """The place that layers are built for."""
        return Site(self.dim, self.heads, grid or self.grid, memory=memory)

    def make(self, config: MixerConfig, seed: int = 0) -> Mixer:
        """A layer of a configuration at the site, parameters moved a little, in evaluation mode, float64."""
        torch.manual_seed(self.seed + seed)
        return moved(config.build(self.site()))

    @cached_property
    def layer(self) -> Mixer:
        """The layer under test."""
        return self.make(self.config)

    @cached_property
    def x(self) -> Tensor:
        """(batch, N, dim): a draw at which the layer neither jumps nor bends within STEP in a random direction."""
        for seed in range(40):
            x = self.draw(self.grid, seed)
            step = STEP * self.draw(self.grid, seed + 1000)
            with torch.no_grad():
                middle = self.layer.reference(x, self.grid)
                bend = self.layer.reference(x + step, self.grid) + self.layer.reference(x - step, self.grid)
            if gap(bend, 2 * middle) < 1e-6:
                return x
        raise ContractError("the plain form jumps at each of 40 random inputs: it is not deterministic or not finite")

    def draw(self, grid: Grid, seed: int) -> Tensor:
        """Random tokens of a grid with float32 values in float64."""
        source = torch.Generator().manual_seed(self.seed + seed)
        return torch.randn(self.batch, grid.tokens, self.dim, generator=source).double()

    def same(self, what: str, one: Tensor, other: Tensor, tolerance: float = EXACT) -> None:
        """Raises ContractError unless two tensors agree within the tolerance times their size (at least 1)."""
        if one.shape != other.shape:
            raise ContractError(f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}")
        allowed = tolerance * max(1.0, other.detach().abs().max().item()) if other.numel() else 0.0
        if not (found := gap(one, other)) <= allowed:
            raise ContractError(f"{what}: they differ by {found:.3g}, allowed are {allowed:.3g}")


def moved(layer: Mixer) -> Mixer:
    """Every parameter a little away from where it starts: zeros and symmetric starts would hide what they multiply."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.double().eval()


def gap(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; NaN if either has one."""
    return (one.detach() - other.detach()).abs().max().item() if one.numel() else 0.0
