"""Which judge takes an output: by its name where output classes give one, else by its shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from regard.core import ConfigError, UnsupportedError

from .boxes import FoundBoxes, QueryBoxes, found_boxes
from .class_maps import ClassMaps
from .embedding import Embedding
from .judge import Judge, named_outputs
from .own import Own
from .real_maps import FEW, RealMaps
from .scores import Scores
from .tokens import Tokens

KINDS = ("scores", "classes", "map", "embedding", "tokens", "boxes")
"""What `--judge` takes."""
ANSWERS = ("logits", "out", "scores", "predicted_depth")
"""Names of outputs of transformers and torchvision beside which features are not judged."""
FEATURES = ("last_hidden_state", "feature_maps", "hidden_states")
VECTORS = ("pooler_output", "image_embeds", "embeddings")
HEADS = ("head", "heads", "fc", "classifier")
"""Names of a last layer whose outputs are class scores."""

JudgeChoice = str | Callable[[Any, Any], Any]
"""A kind, "" = by the output, or a function of the old and the new output."""


def choose(output: Any, images: Tensor, network: nn.Module, choice: JudgeChoice = "", classes: int = 0) -> list[Judge]:
    """The judges of a model's outputs; the first decides. output: of the model for `images` (n, C, H, W).

    choice: a kind of `KINDS`, taken by the first output of its shape. classes: of the model's training, 0 where they
    are not known: so many numbers are class scores. Raises: ConfigError for an unknown kind;
    UnsupportedError if nothing in the output can be judged, or not so.
    """
    if callable(choice):
        return [Own(choice)]
    if choice and choice not in KINDS:
        raise ConfigError(f"an output is judged as {', '.join(KINDS)}, not {choice!r}")
    found = {name: x for name, x in named_outputs(output).items() if x.numel() and len(x) == len(images)}
    result = _boxes(output, network) if choice in ("", "boxes") else []
    if choice and choice != "boxes":
        result = [judge for name, x in found.items() for judge in _as(choice, name, x)][:1]
    elif not choice and not result:
        answers = {name: x for name, x in found.items() if name in ANSWERS} or found
        pyramid = isinstance(output, tuple | list) and sum(x.ndim == 4 for x in answers.values()) > 1
        result = [_by_shape(name, x, images, network, pyramid, classes) for name, x in answers.items()]
    if result:
        return result
    shapes = ", ".join(f"{name or 'output'} {tuple(x.shape)}" for name, x in named_outputs(output).items())
    wanted = f"nothing that can be judged as {choice}" if choice else "nothing that can be judged"
    raise UnsupportedError(
        f"the model returns {wanted} ({shapes or f'a {type(output).__name__}'}): class scores, maps, embeddings, "
        "tokens or boxes of each image; in Python, judge= takes a function of two outputs"
    )


def judged_as(judges: Sequence[Judge]) -> str:
    """What is judged, and how to change it, as a sentence."""
    others = "".join(f"; also {judge}" for judge in judges[1:])
    first = judges[0]
    choice = f"the output is judged as {first}{others} (--judge {'|'.join(KINDS)} changes it)"
    return f"{choice}; divergence: {first.distance}; agreement: {first.kept}"


def judge_text(choice: JudgeChoice) -> str:
    """A choice by name."""
    return choice if isinstance(choice, str) else getattr(choice, "__qualname__", type(choice).__qualname__)


def _boxes(output: Any, network: nn.Module) -> list[Judge]:
    if found_boxes(output):
        return [FoundBoxes()]
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if not all(isinstance(parts.get(name), Tensor) for name in ("pred_boxes", "logits")):
        return []
    labels = getattr(getattr(network, "config", None), "num_labels", 0)
    return [QueryBoxes(sigmoid=parts["logits"].shape[-1] == labels)]


def _by_shape(name: str, x: Tensor, images: Tensor, network: nn.Module, pyramid: bool, classes: int) -> Judge:
    """pyramid: whether the output is several maps of features."""
    last = [part for part in name.split(".") if not part.isdecimal()][-1:] or [""]
    if last[0] in VECTORS and x.ndim == 2:
        return Embedding(name)
    if last[0] in FEATURES and x.ndim in (3, 4) or pyramid and x.ndim == 4:
        return Tokens(name)
    if x.ndim == 1 or x.ndim == 2 and x.shape[1] == 1:
        return RealMaps(name, whole=True)
    if x.ndim == 2:
        named = name in ANSWERS or x.shape[1] == classes or _has_classes(network, x.shape[1])
        return Scores(name) if named else Embedding(name)
    if x.ndim == 3:
        return RealMaps(name) if name == "predicted_depth" or _of_image(x, images) else Tokens(name)
    return RealMaps(name) if x.ndim > 4 or x.shape[1] <= 2 else ClassMaps(name)


def _as(kind: str, name: str, x: Tensor) -> list[Judge]:
    """The judge of a kind but boxes, if an output has its shape."""
    if kind == "map":
        return [RealMaps(name, whole=x[0].numel() < FEW)]
    if kind == "tokens":
        return [Tokens(name)] if x.ndim in (3, 4) else []
    several = x.ndim > 1 and x.shape[1] > 1
    if kind == "classes":
        return [ClassMaps(name)] if several and x.ndim == 4 else []
    judge = Scores if kind == "scores" else Embedding
    return [judge(name)] if several and x.ndim == 2 else []


def _has_classes(network: nn.Module, number: int) -> bool:
    """Whether so many numbers are class scores: by timm's or transformers' own word, or by a last layer's name."""
    config = getattr(network, "config", None)
    known = (
        getattr(network, "num_classes", 0), getattr(config, "num_labels", 0) if hasattr(network, "classifier") else 0,
    )  # fmt: skip
    layers = (module for name, module in network.named_modules() if any(part in HEADS for part in name.split(".")[-2:]))
    return number in known or any(getattr(layer, "out_features", 0) == number for layer in layers)


def _of_image(x: Tensor, images: Tensor) -> bool:
    """Whether (n, h, w) has the sides of the images, or the same part of both."""
    (h, w), (height, width) = x.shape[1:], images.shape[-2:]
    return h * width == w * height and height % h == 0
