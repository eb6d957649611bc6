"""Data sets for tasks: named sets in the data folder, torchvision's sets, and the user's own folders and tables."""

from .catalog import NAMED, identity, load
from .images import Images, ImageSet

__all__ = ["NAMED", "ImageSet", "Images", "identity", "load"]
