"""Which keys the experts of a trained MiTA network gather, and which queries are routed to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import Grid, Mask, UnsupportedError
from regard.mixers.mita.mita import MiTAOperator
from regard.mixers.mita.routing import MitaPlan, mita_plan
from regard.swapping.shared_state import swapped_layers


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The keys that one layer gathered for its experts, and the experts of its queries, for a batch."""

    plan: MitaPlan
    grid: Grid


def choices(model: nn.Module, inputs: Float[Tensor, "B C H W"]) -> dict[str, Choice]:
    """The choice of every MiTA layer in one forward pass, by the layer's name, in the order of the network.

    Raises: UnsupportedError if the model has no such layer.
    """
    chosen: dict[str, Choice] = {}
    mixers: dict[str, Any] = {name: model.get_submodule(name).mixer for name in swapped_layers(model, "*")}
    mixers = {
        name: mixer for name, mixer in mixers.items() if isinstance(getattr(mixer, "operator", None), MiTAOperator)
    }
    if not mixers:
        raise UnsupportedError(f"{type(model).__name__} has no layer with MiTA, so no expert chooses keys")
    handles = [mixer.register_forward_hook(_recorder(chosen, name), with_kwargs=True) for name, mixer in mixers.items()]
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return chosen


def _recorder(chosen: dict[str, Choice], name: str) -> Callable[..., None]:
    def record(mixer: Any, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
        chosen[name] = _choice(mixer, *args, **kwargs)

    return record


def _choice(mixer: Any, x: Tensor, grid: Grid, mask: Mask | None = None, rope: Tensor | None = None) -> Choice:
    heads, config = mixer.project_heads(x, grid, rope), mixer.config
    landmarks, _ = mixer.operator.pool(heads["q"], grid)
    return Choice(plan=mita_plan(heads["q"], heads["k"], landmarks, config.k, experts=config.experts), grid=grid)
