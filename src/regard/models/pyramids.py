"""Feature pyramids of Regard's own models, in timm's form (`features_only=True`)."""

from collections.abc import Sequence

from timm.models import FeatureInfo
from torch import Tensor, nn

from regard.core import ConfigError


class Pyramid(nn.Module):
    """A model of stages. A subclass calls `add_stage` for each and has `maps`, which gives (B, D, h, w) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_info: list[dict[str, object]] = []

    def add_stage(self, channels: int, reduction: int, module: str) -> None:
        """Describe the next stage: its channels, its stride in pixels of the image, and the path of its module."""
        self.feature_info.append({"num_chs": channels, "reduction": reduction, "module": module})

    def maps(self, x: Tensor) -> list[Tensor]:
        """The map of every stage."""
        raise NotImplementedError


class Features(nn.Module):
    """The maps of some stages as a list. feature_info: timm's description of them."""

    def __init__(self, model: Pyramid, out_indices: Sequence[int]) -> None:
        super().__init__()
        self.out_indices = check_indices(out_indices, len(model.feature_info))
        self.feature_info = FeatureInfo(model.feature_info, self.out_indices)
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.model.maps(x)
        return [maps[index] for index in self.out_indices]


def check_indices(out_indices: Sequence[int], stages: int) -> tuple[int, ...]:
    """Indices of stages as numbers from 0; negative ones count from the end.

    Raises: ConfigError for a stage that does not exist, or if there are no indices.
    """
    invalid = [index for index in out_indices if not -stages <= index < stages]
    if invalid or not out_indices:
        raise ConfigError(
            f"out_indices={tuple(out_indices)}: the {stages} stages are 0 to {stages - 1}, or -1 to {-stages} "
            "from the end; name at least one of them"
        )
    return tuple(range(stages)[index] for index in out_indices)


def feature_backbone(model: nn.Module, out_indices: Sequence[int] | None = None) -> nn.Module:
    """A classifier as a backbone: its forward pass returns a list of maps (B, D, h, w).

    out_indices: stages (of a ViT: blocks), None = all. Raises: TypeError if the model has no intermediate
    features, ConfigError for a stage that does not exist.
    """
    from timm.models._features import FeatureGetterNet

    if isinstance(model, Pyramid):
        return Features(model, range(len(model.feature_info)) if out_indices is None else out_indices)
    if not hasattr(model, "forward_intermediates"):
        raise TypeError(f"{type(model).__name__} returns no intermediate features: it has no forward_intermediates")
    blocks = len(model.blocks)  # type: ignore[arg-type]
    indices = blocks if out_indices is None else check_indices(out_indices, blocks)
    return FeatureGetterNet(model, out_indices=indices)


def init_linear(model: nn.Module) -> None:
    """Draw the weights of all linear layers from a normal distribution of deviation 0.02, cut at 2; biases are 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
