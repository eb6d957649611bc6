"""Feature pyramids of hosts that are not timm's, in timm's form (`features_only=True`)."""

from collections.abc import Sequence

from timm.models import FeatureInfo
from torch import Tensor, nn


class Pyramid(nn.Module):
    """A model of stages. A subclass calls `describe` for each and has `maps`, which gives (B, D, h, w) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_info: list[dict[str, object]] = []

    def describe(self, channels: int, reduction: int, module: str) -> None:
        """Note the next stage: its channels and how many pixels of the image are one of its cells."""
        self.feature_info.append({"num_chs": channels, "reduction": reduction, "module": module})

    def maps(self, x: Tensor) -> list[Tensor]:
        """The map of every stage."""
        raise NotImplementedError


class Features(nn.Module):
    """The maps of some stages as a list. feature_info: timm's description of them."""

    def __init__(self, model: Pyramid, out_indices: Sequence[int]) -> None:
        super().__init__()
        stages = len(model.feature_info)
        self.out_indices = tuple(range(stages)[index] for index in out_indices)
        self.feature_info = FeatureInfo(model.feature_info, self.out_indices)
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        found = self.model.maps(x)
        return [found[index] for index in self.out_indices]


def as_features(model: nn.Module, out_indices: Sequence[int] | None = None) -> nn.Module:
    """A classifier as a backbone: its forward pass gives a list of maps (B, D, h, w).

    out_indices: stages (of a ViT: blocks), None = all. Raises: TypeError if the model has no stages to give.
    """
    from timm.models._features import FeatureGetterNet

    if isinstance(model, Pyramid):
        return Features(model, range(len(model.feature_info)) if out_indices is None else out_indices)
    if not hasattr(model, "forward_intermediates"):
        raise TypeError(f"{type(model).__name__} gives no intermediate features")
    indices = len(model.blocks) if out_indices is None else tuple(out_indices)  # type: ignore[arg-type]
    return FeatureGetterNet(model, out_indices=indices)
