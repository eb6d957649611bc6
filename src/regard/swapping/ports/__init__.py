"""The ports for attention classes of libraries; Regard's own models name theirs themselves."""

from regard.swapping.layer import Port

from . import diffusers, hugging_face, monai, open_clip, timm, torch_attention, torchvision, torchvision_video

PORTS: tuple[type[Port], ...] = (
    *timm.PORTS, *torch_attention.PORTS, *torchvision.PORTS, *torchvision_video.PORTS, *open_clip.PORTS,
    *diffusers.PORTS, *monai.PORTS, *hugging_face.PORTS,
)  # fmt: skip
