"""Detectors: feature pyramids over any backbone, and Faster, Mask and Cascade R-CNN on torchvision's parts."""

from .backbone import Backbone as Backbone
from .backbone import detection_backbone as detection_backbone
from .rcnn import DETECTORS as DETECTORS
from .rcnn import Detector as Detector
from .rcnn import Heads as Heads
from .rcnn import make_detector as make_detector
