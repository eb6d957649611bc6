"""Ports of timm's models, one file per kind of attention; of two ports of one class the first that fits decides."""

from importlib import import_module

from regard.swapping.layer import Port

_FILES = (
    "mobilevit", "vit", "stages", "pvt", "windows", "relative_position_bias", "cait", "maps", "wide", "hiera", "pooled",
    "inside", "combined", "halo", "cascade", "gemma", "reinitialised",
)  # fmt: skip

PORTS: tuple[type[Port], ...] = tuple(port for file in _FILES for port in import_module(f"{__name__}.{file}").PORTS)
