"""Linear CKA: how similar the features of two layers are, also of two models (Kornblith et al. 2019).

CKA(X, Y) = |Y'X|^2 / (|X'X| |Y'Y|) for features whose columns are centred, with Frobenius norms: 1 for features that
differ by a rotation, a scale and a shift, near 0 for unrelated ones. A row is an example: here a token of an image.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ConfigError, ShapeError, UnsupportedError
from regard.core.validation import check_arguments
from regard.swapping.inspect import layer_calls, matching_layers


class LayerSimilarity(NamedTuple):
    """values (A, B): the CKA of each of the layers `rows` of one model with each of the layers `columns` of another."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Float[Tensor, "A B"]


@check_arguments
def linear_cka(x: Float[Tensor, "n p"], y: Float[Tensor, "n q"]) -> float:
    """The linear CKA of features (examples, features) of the same examples; NaN where features are constant.

    Computed in float64. Raises: ShapeError for another number of examples.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise ShapeError(f"linear_cka: features are {shapes}; give two matrices with one row for each example")
    return _similarity(_centre(x), _centre(y))


@check_arguments
def compare_layers(
    a: nn.Module, b: nn.Module, images: Float[Tensor, "n C H W"], *, layers: str = "*", batch: int = 64
) -> LayerSimilarity:
    """The linear CKA of the inputs of a's attention layers with those of b's, over the tokens of the images.

    layers: a glob of names, for both models. batch: images of a forward pass. The models are not changed.
    Raises: ConfigError for an empty batch; SwapError if no layer matches; UnsupportedError for two layers that have
    other numbers of tokens, such as those of different stages.
    """
    if batch < 1 or not len(images):
        raise ConfigError(f"compare_layers needs at least one image and batch >= 1, not {len(images)} and {batch}")
    one, other = (_features(model, images, layers, batch) for model in (a, b))
    tokens = {len(x) for x in (*one.values(), *other.values())}
    if len(tokens) > 1:
        raise UnsupportedError(
            f"compare_layers pairs tokens, and these layers have {min(tokens)} to {max(tokens)} of them; give layers= "
            "of one stage"
        )
    values = [[_similarity(x, y) for y in other.values()] for x in one.values()]
    return LayerSimilarity(tuple(one), tuple(other), torch.tensor(values, dtype=torch.float64))


def _features(model: nn.Module, images: Tensor, layers: str, batch: int) -> dict[str, Tensor]:
    """The centred inputs (tokens of all images, C) of each layer."""
    chosen = {name: model.get_submodule(name) for name in matching_layers(model, layers)}
    parts: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for some in images.split(batch):
            for name, x in layer_calls(model, chosen, some, _first_tensor).items():
                parts.setdefault(name, []).append(x.flatten(0, -2))
    return {name: _centre(torch.cat(xs)) for name, xs in parts.items()}


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))


def _centre(x: Tensor) -> Tensor:
    x = x.double()
    return x - x.mean(0)


def _similarity(x: Tensor, y: Tensor) -> float:
    between, own_x, own_y = (torch.linalg.matrix_norm(p.mT @ q) for p, q in ((x, y), (x, x), (y, y)))
    return float(between.square() / (own_x * own_y))
