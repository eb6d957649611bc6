"""Alignment: which words of the source a translation attends to, word by word, and a picture of it."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core import ConfigError
from regard.core.eval_mode import eval_mode
from regard.core.plain_text import plain_text

from .networks.seq2seq import DecoderLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image


def alignments(
    model: nn.Module, source: Int[Tensor, "B M"], target: Int[Tensor, "B N"], layer: int = -1
) -> Float[Tensor, "B N M"]:
    """Weights of the cross-attention of a decoder layer, the mean of its heads; float32.

    target: from `START`; row i is of the query that predicts the token after target token i. layer: as an index of a
    list. Rows sum to 1 only for softmax kinds.
    Raises: ConfigError if there is no such layer; UnsupportedError if the mechanism has no weights.
    """
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    if not -len(layers) <= layer < len(layers):
        raise ConfigError(f"the decoder has layers 0 to {len(layers) - 1}, not {layer}")
    captured: list[Tensor] = []

    def record(operator: Any, heads: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        captured.append(operator.weights(*heads, **options).float().mean(1))

    handle = layers[layer].cross_attn.operator.register_forward_hook(record, with_kwargs=True)
    try:
        with eval_mode(model):
            model(source, target)
    finally:
        handle.remove()
    return captured[0][:, : target.shape[1], : source.shape[1]]


@plain_text()
def picture(source: "Sequence[str]", target: "Sequence[str]", weights: "Sequence[Sequence[float]]") -> "Image":
    """A matrix of weights: a row for each piece of the translation, a column for each piece of the source."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    width, height = 2.0 + 0.32 * len(source), 1.4 + 0.28 * len(target)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(np.array(weights), cmap="Blues", vmin=0.0, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(target)), target)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
