"""Classification of clips, with any host that takes (B, C, frames, height, width) and returns class scores."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import ConfigError, MixerConfig
from regard.core.eval_mode import eval_mode
from regard.images import clips
from regard.images.augment import BATCHWISE, centre
from regard.images.images import Images, ImageSet, read_image, size_before_crop
from regard.images.normalise import Statistics
from regard.lab.data import moving
from regard.lab.data.catalog import own_path
from regard.lab.data.generated import with_revision
from regard.models.catalog import has_option, own_models
from regard.models.create import parse_host, spell_host
from regard.swapping.inspect import explain_inputs, input_channels

from ..base import Record, Training
from ..class_scores import relabelled
from ..classification import Classification
from ..image_task import same_data


@dataclass(frozen=True, kw_only=True)
class Video(Classification):
    """Top-1 accuracy of a host on clips.

    frames: of a clip that the host takes, evenly spread over it. size, classes, init, split, val, val_seed, limit,
    corrupt, digest, mean, std, class_weights: as of `Classification`, whose further fields are for images.
    Raises: ConfigError.
    """

    name: ClassVar[str] = "video"
    unit: ClassVar[str] = "clips"
    example_data: ClassVar[str] = moving.NAME
    sets: ClassVar[Mapping[str, str]] = {moving.NAME: moving.SOURCE}
    reads_streams: ClassVar[bool] = False
    model_fields: ClassVar[tuple[str, ...]] = ("frames",)
    no_export: ClassVar[str] = "`regard export` writes models of images"

    frames: int = moving.FRAMES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1:
            raise ConfigError(f"frames is at least 1, not {self.frames}")
        if self.data == moving.NAME and (self.frames, *self.size) != (moving.FRAMES, moving.SIDE, moving.SIDE):
            side = moving.SIDE
            raise ConfigError(f"{moving.NAME} has {moving.FRAMES} frames of {side}x{side}, not {self._shape}")
        if self.cut or self.download:
            raise ConfigError("cut and download are for images: leave them out")

    @property
    def _shape(self) -> str:
        return f"{self.frames} of {self.size[0]}x{self.size[1]}"

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        if data == moving.NAME:
            recipe = {"augment": "none", "epochs": 20, "lr": 3e-3, "smoothing": 0.0}
            return {"task": {"host": "vit_desk_video", "size": (moving.SIDE, moving.SIDE)}, "recipe": recipe}
        return {"task": {"host": "vit_desk_video(patch=16)", "size": (112, 112)}, "recipe": {"augment": "flip"}}

    def check(self, recipe: Training) -> None:
        self.check_recipe(recipe, BATCHWISE, without=("cutmix", "erasing"))

    def identity(self) -> "Video":
        named = self.data in self.sets
        data = with_revision(self.data) if named else f"own:{clips.present_digest(*self._own_data)}"
        return dataclasses.replace(self, data=data, digest="", extra=())

    @property
    def _own_data(self) -> tuple[Path, str, bool]:
        return own_path(self.data, self.sets, clips.LAYOUT), self.digest, self._reserved

    def read_data(self) -> ImageSet:
        """The clips as images of all their frames' channels. Raises: DataError."""
        if self.data == moving.NAME:
            return moving.load()
        path, kind, reserved = self._own_data
        return clips.load(path, self.frames, self.size, self.corrupt, kind, reserved)

    @property
    def colours_of_a_frame(self) -> int:
        return 1 if self.data in self.sets else clips.COLOURS

    def known_classes_and_channels(self) -> tuple[int, int]:
        classes = 10 if self.data in self.sets else 1000
        return classes, self.colours_of_a_frame * self.frames

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> nn.Module:
        """As in `Classification`. Raises: also ConfigError for a host that takes no clips."""
        model = super().network(mixer, removed, record)
        clip = self.noise(1, input_channels(model))
        with explain_inputs(model, clip), eval_mode(model), torch.no_grad():
            model(clip)
        return model

    def _whole(self, data: str, record: Record) -> list[Images]:
        if data in self.sets or same_data(self.data, data):
            return []
        path = own_path(data, self.sets, clips.LAYOUT)
        classes, scored = clips.load_scored(path, self.frames, self.size, self.corrupt, self.digest)
        return [relabelled(data, scored, classes, record["class_names"])]

    def own_statistics(self) -> Statistics:
        return clips.shared_by_frames(self.data_set().statistics, self.frames)

    def statistics(self, record: Record | None = None) -> Statistics:
        """As in `ImageTask`, each colour's for every frame."""
        if record is None and len(self.mean) == self.colours_of_a_frame:
            return list(self.mean) * self.frames, list(self.std) * self.frames
        return super().statistics(record)

    def host_channels(self, channels: int) -> int:
        return channels // self.frames

    def noise(self, number: int, colours: int) -> Tensor:
        return torch.randn(number, colours, self.frames, *self.size)

    def arrange(self, images: Tensor) -> Tensor:
        return clips.frames_apart(images, self.frames)

    @property
    def spelled_host(self) -> str:
        """With the task's frames, if the host has such an option. Raises: ConfigError for another number of frames."""
        name, options = parse_host(self.host)
        frames = options.get("frames", self.frames)
        if frames != self.frames:
            raise ConfigError(f"{self.host} takes {frames} frames, the task has {self.frames}: make them equal")
        make = own_models(self.extra).get(name.removeprefix("regard_"))
        takes = make is not None and has_option(make, "frames")
        return spell_host(name, {**options, "frames": frames}) if takes else self.host

    def files_in(self, folder: Path) -> list[Path]:
        return clips.clips_below(folder)

    def pixels(self, source: str | Path, channels: int) -> np.ndarray:
        """A clip's pixels (h, w, channels), frame by frame, cropped at the centre. Raises: DataError."""
        found = read_image(clips.Clip(Path(source), self.frames), size_before_crop(self.size), channels)
        return centre(found[None], self.size)[0]

    def picture(self, source: str | Path) -> np.ndarray:
        """The frames side by side."""
        return np.concatenate(np.split(self.pixels(source, 3 * self.frames), self.frames, -1), 1)
