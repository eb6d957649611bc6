"""Detectors: feature pyramids over any backbone, and Faster, Mask and Cascade R-CNN on torchvision's parts."""

from .backbone import Backbone, detection_backbone
from .rcnn import DETECTORS, Detector, Heads, make_detector

__all__ = ["DETECTORS", "Backbone", "Detector", "Heads", "detection_backbone", "make_detector"]
