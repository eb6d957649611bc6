"""Old path of `regard.Port`."""

from regard.hosts import moved
from regard.swapping.layer import Port as Hosted

__all__ = ["Hosted"]

moved("regard.hosts.hosted.Hosted", "regard.Port")
