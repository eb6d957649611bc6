"""Ports of timm's models, one file per kind of attention; of two ports of one class the first that fits decides."""

from regard.swapping.layer import Port

from . import (
    cait,
    cascade,
    combined,
    gemma,
    halo,
    hiera,
    inside,
    maps,
    metaformer,
    mobilevit,
    pooled,
    pvt,
    reinitialised,
    relative_position_bias,
    vit,
    wide,
    windows,
    xcit,
)

PORTS: tuple[type[Port], ...] = (
    *mobilevit.PORTS, *vit.PORTS, *xcit.PORTS, *metaformer.PORTS, *pvt.PORTS, *windows.PORTS,
    *relative_position_bias.PORTS, *cait.PORTS, *maps.PORTS, *wide.PORTS, *hiera.PORTS, *pooled.PORTS, *inside.PORTS,
    *combined.PORTS, *halo.PORTS, *cascade.PORTS, *gemma.PORTS, *reinitialised.PORTS,
)  # fmt: skip
