"""A mechanism under test on one grid, and the comparison of tensors."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.core import Contract, Grid, Mixer, MixerConfig, RegardError, Site

EXACT = 1e-12  # float64, relative to the size of the output
STEP = 2e-5  # inputs near which the output jumps, within this step, are not used: ties may be broken either way


class ContractError(RegardError, AssertionError):
    """A mechanism violates an item of the contract; the message names the item, the grid and the measured values."""


@dataclass
class Subject:
    """A mechanism under test on one grid. Layers are float64 with values that float32 represents exactly."""

    config: MixerConfig
    grid: Grid
    dim: int
    heads: int
    batch: int
    seed: int
    contract: Contract

    def site(self, grid: Grid | None = None, memory: Grid | None = None) -> Site:
        """The site that layers are built for."""
        return Site(self.dim, self.heads, grid or self.grid, memory=memory)

    def make(self, config: MixerConfig, seed: int = 0) -> Mixer:
        """A layer of a configuration at the site, with perturbed parameters, in evaluation mode and float64."""
        torch.manual_seed(self.seed + seed)
        return perturb(config.build(self.site()))

    @cached_property
    def layer(self) -> Mixer:
        """The layer under test."""
        return self.make(self.config)

    @cached_property
    def x(self) -> Tensor:
        """(batch, N, dim): random tokens near which the layer is smooth within STEP in a random direction."""
        for seed in range(40):
            x = self.draw(self.grid, seed)
            step = STEP * self.draw(self.grid, seed + 1000)
            with torch.no_grad():
                centre = self.layer.reference(x, self.grid)
                sides = self.layer.reference(x + step, self.grid) + self.layer.reference(x - step, self.grid)
            if gap(sides, 2 * centre) < 1e-6:
                return x
        raise ContractError("the plain form jumps at each of 40 random inputs: it is not deterministic or not finite")

    def draw(self, grid: Grid, seed: int) -> Tensor:
        """Random tokens of a grid with float32 values in float64."""
        generator = torch.Generator().manual_seed(self.seed + seed)
        return torch.randn(self.batch, grid.tokens, self.dim, generator=generator).double()

    def same(self, label: str, actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
        """Raises ContractError unless the tensors agree within the tolerance times the largest value (at least 1)."""
        if actual.shape != expected.shape:
            raise ContractError(f"{label}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
        allowed = tolerance * max(1.0, expected.detach().abs().max().item()) if expected.numel() else 0.0
        if not (difference := gap(actual, expected)) <= allowed:
            raise ContractError(f"{label}: they differ by {difference:.3g}, more than {allowed:.3g}")


def perturb(layer: Mixer) -> Mixer:
    """Perturb every parameter: zeros and symmetric initial values would hide what they multiply."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.double().eval()


def gap(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; NaN if one tensor has a NaN."""
    return (a.detach() - b.detach()).abs().max().item() if a.numel() else 0.0
