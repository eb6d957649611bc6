"""Mechanisms as arguments of verbs that need one."""

from typing import TYPE_CHECKING

from regard.core import ConfigError, Extra

if TYPE_CHECKING:
    from regard.core import MixerConfig


def read_mixer(text: str, extra: Extra) -> "MixerConfig":
    """The configuration of a spelling. Raises: ConfigError for a wrong spelling, and for None."""
    from regard.mixers.spelling import parse_mixer

    config = parse_mixer(text, extra)
    if config is None:
        raise ConfigError("this verb needs a mechanism, not None; `regard list` shows all")
    return config
