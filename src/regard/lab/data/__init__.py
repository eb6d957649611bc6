"""Data sets for tasks: named sets in the data folder, torchvision's sets, and the user's own folders and tables."""

from regard.images.images import Images, ImageSet

from .catalog import NAMED, identity, load

__all__ = ["NAMED", "ImageSet", "Images", "identity", "load"]
