"""Parameters and multiply-accumulates of a whole model, on the meta device: no memory for weights, no computation.

The cost of the mechanisms' operators comes from their formulas; everything else is counted by PyTorch.
"""

import torch
from torch import Tensor, nn

from regard.core import Cost, Extra, MixerConfig
from regard.core.validation import checked
from regard.models.catalog import user_ports
from regard.models.create import build_sized, create_model
from regard.swapping.count import count_macs
from regard.swapping.inspect import example_input, explained_inputs, input_channels
from regard.swapping.swap import swap


@checked
def model_cost(
    host: str,
    mixer: MixerConfig | None,
    size: tuple[int, int] | None = None,
    accounting: str = "executed",
    extra: Extra = (),
) -> Cost:
    """Cost of a host with a mechanism (None: its own attention), for one image of size (height, width).

    size: None = the host's own. accounting: as in `MixerConfig.cost`. extra: the user's own models and ports.
    Raises: ConfigError for an unknown host or a size that it does not take, SwapError if it has no attention that can
    be replaced.
    """
    with torch.device("meta"):
        model, image = host_and_image(host, size, extra)
        if mixer is not None:
            swap(model, mixer, example=image, ports=user_ports(extra))
        with explained_inputs(model, image):
            return count_cost(model, image, accounting)


def host_and_image(host: str, size: tuple[int, int] | None, extra: Extra = ()) -> tuple[nn.Module, Tensor]:
    """A host with its own attention, in evaluation mode, and an image; on the meta device if that is the default one.

    size: (height, width), None = the host's own.
    Raises: ConfigError, SwapError if the image size of the host is not known.
    """
    model = (create_model(host, None, extra=extra) if size is None else build_sized(host, None, size, extra)).eval()
    return model, example_input(model) if size is None else torch.zeros(1, input_channels(model), *size)


def count_cost(model: nn.Module, image: Tensor, accounting: str = "executed") -> Cost:
    """Parameters and multiply-accumulates of one forward pass; a swapped layer's original does not count."""
    return Cost(sum(p.numel() for p in model.parameters()), count_macs(model, image, accounting))
