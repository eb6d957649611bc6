"""Feature pyramids of hosts that are not timm's, in timm's form (`features_only=True`)."""

from collections.abc import Sequence

from timm.models import FeatureInfo
from torch import Tensor, nn

from regard.core import ConfigError


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
        self.out_indices = checked_indices(out_indices, len(model.feature_info))
        self.feature_info = FeatureInfo(model.feature_info, self.out_indices)
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        found = self.model.maps(x)
        return [found[index] for index in self.out_indices]


def checked_indices(out_indices: Sequence[int], stages: int) -> tuple[int, ...]:
    """Indices of stages, those from the end (-1) as from the start.

    Raises: ConfigError for a stage that is not there, and for none.
    """
    wrong = [index for index in out_indices if not -stages <= index < stages]
    if wrong or not out_indices:
        raise ConfigError(
            f"out_indices={tuple(out_indices)}: there are the {stages} stages 0 to {stages - 1}, or -1 to {-stages} "
            "from the end; name at least one of them"
        )
    return tuple(range(stages)[index] for index in out_indices)


def as_features(model: nn.Module, out_indices: Sequence[int] | None = None) -> nn.Module:
    """A classifier as a backbone: its forward pass gives a list of maps (B, D, h, w).

    out_indices: stages (of a ViT: blocks), None = all. Raises: TypeError if the model has no stages to give,
    ConfigError for a stage that is not there.
    """
    from timm.models._features import FeatureGetterNet

    if isinstance(model, Pyramid):
        return Features(model, range(len(model.feature_info)) if out_indices is None else out_indices)
    if not hasattr(model, "forward_intermediates"):
        raise TypeError(f"{type(model).__name__} gives no intermediate features")
    blocks = len(model.blocks)  # type: ignore[arg-type]
    chosen = blocks if out_indices is None else checked_indices(out_indices, blocks)
    return FeatureGetterNet(model, out_indices=chosen)
