"""MONAI's windows: their sides follow from the map of the patches, which their number of tokens does not tell."""

import pytest
import torch

pytest.importorskip("monai")

from monai.networks.nets import UNETR, SwinUNETR

from regard import MiTA, Port, Softmax, UnsupportedError, swap
from regard.core import Grid


def test_a_window_is_cut_to_its_map() -> None:
    """A map of 2 x 8 cells in windows of 8 x 8: as many tokens as 4 x 4."""
    sizes = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "window_size": 8}
    model, images = SwinUNETR(1, 2, spatial_dims=2, **sizes), torch.randn(1, 1, 32, 128)
    swap(model, Softmax(), example=images)
    grids = [layer.mixer.site.grid for layer in model.modules() if isinstance(layer, Port)]
    assert grids == [Grid(8, 8), Grid(8, 8), Grid(4, 8), Grid(2, 8)]
    assert model(images).shape == (1, 2, 32, 128)


def test_a_volume_takes_boxes_and_images_refuse_them() -> None:
    model, volume = (
        UNETR(1, 2, (32, 32, 48), feature_size=8, hidden_size=48, mlp_dim=64, num_heads=4),
        (1, 1, 32, 32, 48),
    )
    swap(model, MiTA(m=(1, 1, 3), k=2), example=torch.randn(volume))
    assert model(torch.randn(volume)).shape == (1, 2, 32, 32, 48)
    assert model.vit.blocks[0].attn.mixer.site.grid == Grid(2, 3, depth=2)
    with pytest.raises(UnsupportedError, match="CSKA takes images, not 2 frames"):
        swap(model, "CSKA()", example=torch.randn(volume))
