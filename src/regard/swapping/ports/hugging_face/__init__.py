"""Ports of Hugging Face's vision models (transformers >= 5.9), one file per kind of attention."""

from regard.swapping.layer import Port

from . import detr, hiera, maps, mobilevit, reduced, rf_detr, video, vit, windows
from .base import config_of as config_of
from .base import mark_configuration as mark_configuration

PORTS: tuple[type[Port], ...] = (
    *vit.PORTS, *reduced.PORTS, *windows.PORTS, *mobilevit.PORTS, *detr.PORTS, *rf_detr.PORTS, *hiera.PORTS,
    *maps.PORTS, *video.PORTS,
)  # fmt: skip
