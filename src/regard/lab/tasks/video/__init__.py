"""Video classification."""

from .task import Video as Video
