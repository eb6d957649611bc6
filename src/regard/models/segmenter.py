"""A segmenter as a host: `create_model("segmenter(host='vit_small_patch16_224', head='cbt', num_classes=5)")`."""

from torch import nn

from regard.core import Extra


def segmenter(
    *,
    host: str,
    head: str = "linear",
    num_classes: int = 1000,
    img_size: int | tuple[int, int] = 224,
    in_chans: int = 3,
    extra: Extra = (),
) -> nn.Module:
    """Another host with a head that gives scores (B, K, H, W) of the classes of all pixels, as in segmentation runs."""
    from .segmentation import make_segmenter

    size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
    return make_segmenter(host, None, head, classes=num_classes, size=size, channels=in_chans, extra=extra)
