"""Old path of `regard.Port`."""

from regard.swapping.layer import Port as Hosted

from . import moved

__all__ = ["Hosted"]

moved("regard.hosts.hosted.Hosted", "regard.Port")
