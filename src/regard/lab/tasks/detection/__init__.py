"""Object detection, boxes alone or with masks, on COCO, Pascal VOC, and the user's data in their formats."""

from .task import Detection as Detection
from .task import Instances as Instances
