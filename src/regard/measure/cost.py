"""Parameters and multiply-accumulates of a whole model, without memory for weights and without running it.

What the mechanisms' operators cost comes from their formulas; all else is counted on the meta device.
"""

import torch
from torch import Tensor, nn

from regard.core import Cost, MixerConfig
from regard.hosts.counting import count_macs
from regard.hosts.looking import channels_of, taking
from regard.hosts.nothing import Nothing
from regard.hosts.swap import create_model, plan_swap


def model_cost(
    host: str, mixer: MixerConfig | None, size: tuple[int, int] | None = None, accounting: str = "executed"
) -> Cost:
    """Cost of a host with a mechanism (None: its own attention), for one image of size (height, width).

    size: None is the host's own. accounting: as in `MixerConfig.cost`.
    Raises: ConfigError for an unknown host or a size that it refuses, SwapError if it has no attention to replace.
    """
    with torch.device("meta"):
        model = create_model(host, None, **({} if size is None else {"img_size": size})).eval()
        if mixer is None:
            image = plan_swap(model, Nothing()).example if size is None else _image(model, size)
            with taking(model, image):
                return Cost(_parameters(model), count_macs(model, image))
        plan = plan_swap(model, mixer, example=None if size is None else _image(model, size))
        plan.apply()
        return Cost(_parameters(model), count_macs(model, plan.example, accounting))


def _image(model: nn.Module, size: tuple[int, int]) -> Tensor:
    return torch.zeros(1, channels_of(model), *size, device="meta")


def _parameters(model: nn.Module) -> int:
    """Parameters that are the host's or a mixer's; a swapped layer's hidden original is not registered."""
    return sum(p.numel() for p in model.parameters())
