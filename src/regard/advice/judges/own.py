"""The user's own distance of two outputs."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core import ConfigError
from regard.core.validation import short_repr

from .judge import Change, Judge, named_outputs


class Own(Judge):
    """A function of (old output, new output) of a batch: distances (n,) or a number. Learning needs its gradients."""

    kind = "own"
    distance = "by the user's own function"
    kept = "not known"
    sentence = "is judged by the user's own function ({} %)"
    shares = False

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def read(self, output: Any) -> Any:
        return output

    def change(self, before: Any, after: Any) -> Change:
        found = self.function(before, after)
        try:
            distance = torch.as_tensor(found, dtype=torch.float64).detach().reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"judge gave {short_repr(found, 60)}, expected a distance of each image") from error
        images = next((len(value) for value in named_outputs(before).values()), len(distance))
        if len(distance) not in (1, images):
            raise ConfigError(f"judge gave {len(distance)} distances for {images} images: give one each, or their mean")
        if distance.isnan().any():
            raise ConfigError("judge gave a distance that is not a number (NaN): give each image a finite one")
        distance = distance.expand(images)
        return distance, torch.full_like(distance, torch.nan)

    def loss(self, before: Any, after: Any) -> Float[Tensor, ""]:
        loss = torch.as_tensor(self.function(before, after)).mean()
        if not loss.requires_grad:
            raise ConfigError("judge gives a number without gradients, so nothing learns: use torch, or output_steps=0")
        return loss
