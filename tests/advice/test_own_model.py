"""`regard.recommend` and `regard.distill` take any network, and a folder or an array of images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from regard import SKA, DataError, create_model, distill, recommend
from regard.swapping.layer import Port


class Wrapped(nn.Module):
    """A network that no catalogue knows."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = create_model("vit_desk(size=16, patch=4, dim=16, depth=2, heads=2)", None)

    def forward(self, x):
        return self.backbone(x)


def test_a_network_of_ones_own_is_distilled_and_advised(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 20, 3), np.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    model = Wrapped().eval()
    learned = distill(model, SKA(), tmp_path, size=(16, 16), steps=3, output_steps=2)
    errors = [change.divergence.mean for change in learned.changes.values()]
    assert errors == sorted(errors, reverse=True)  # a step that leads away is left out
    assert sum(isinstance(layer, Port) for layer in learned.model.modules()) == 2
    assert not any(isinstance(layer, Port) for layer in model.modules())
    result = recommend(model, pixels, "macs=0.999x", mixers=[SKA()], minutes=0.01, size=(16, 16))
    assert sum(result.images) == 24
    distill(model, result.best.spelling, pixels, size=(16, 16), steps=1, output_steps=0)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 readable images"):
        distill(Wrapped().eval(), SKA(), tmp_path, size=(16, 16))
