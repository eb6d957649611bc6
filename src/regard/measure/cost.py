"""Parameters and multiply-accumulates of a whole model, without memory for weights and without running it.

What the mechanisms' operators cost comes from their formulas; all else is counted on the meta device.
"""

import torch
from torch import Tensor, nn

from regard.core import Cost, MixerConfig
from regard.models.create import build_sized, create_model
from regard.swapping.count import count_macs
from regard.swapping.inspect import channels_of, example_of, taking
from regard.swapping.swap import swap


def model_cost(
    host: str, mixer: MixerConfig | None, size: tuple[int, int] | None = None, accounting: str = "executed"
) -> Cost:
    """Cost of a host with a mechanism (None: its own attention), for one image of size (height, width).

    size: None is the host's own. accounting: as in `MixerConfig.cost`.
    Raises: ConfigError for an unknown host or a size that it refuses, SwapError if it has no attention to replace by a
    mechanism.
    """
    with torch.device("meta"):
        model, image = bare(host, size)
        if mixer is not None:
            swap(model, mixer, example=image)
        with taking(model, image):
            return counted(model, image, accounting)


def bare(host: str, size: tuple[int, int] | None) -> tuple[nn.Module, Tensor]:
    """A host with its own attention, in evaluation mode, and an image; on the meta device if that is the default one.

    size: (height, width), None = the host's own. Raises: ConfigError, SwapError if the host does not tell its size.
    """
    model = (create_model(host, None) if size is None else build_sized(host, None, size)).eval()
    return model, example_of(model) if size is None else torch.zeros(1, channels_of(model), *size)


def counted(model: nn.Module, image: Tensor, accounting: str = "executed") -> Cost:
    """Parameters (a swapped layer's hidden original is not registered) and multiply-accumulates of one pass."""
    return Cost(sum(p.numel() for p in model.parameters()), count_macs(model, image, accounting))
