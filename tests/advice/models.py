"""A small model and images for tests of advice; the model is "trained" so far that attention matters a little."""

import numpy as np
import torch

from regard.advice.user_model import UserModel
from regard.images.images import Images
from regard.models.create import create_model

HOST = "vit_desk(size=(16, 24), patch=4, dim=16, depth=3, heads=2, num_classes=5)"
SWIN = "swin_tiny_patch4_window7_224(img_size=(32, 64), window_size=4, depths=(2, 1), embed_dim=8, num_heads=(2, 4))"


def user_model(host: str = HOST, size: tuple[int, int] = (16, 24)) -> UserModel:
    """With weights that are larger than initial ones, so that changes of attention change the scores."""
    torch.manual_seed(0)
    network = create_model(host, None).eval()
    with torch.no_grad():
        for name, value in network.named_parameters():
            if value.ndim > 1 and "pos_embed" not in name:
                value.normal_(0, 0.3)
    return UserModel(network, "a small model", size, ([0.5] * 3, [0.25] * 3))


def images(number: int = 40, size: tuple[int, int] = (16, 24)) -> Images:
    """Random blocks of colour."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (number, size[0] // 4, size[1] // 4, 3), dtype=np.uint8)
    return Images(coarse.repeat(4, 1).repeat(4, 2), np.zeros(number, np.int64))
