"""Attention rollout: how much of each token of the input reaches each token of the last layer, over all layers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import ShapeError, UnsupportedError
from regard.core.eval_mode import eval_mode
from regard.core.validation import check_arguments, short_repr
from regard.swapping.capture import readable_mixers, with_regard_softmax
from regard.swapping.inspect import explain_inputs

Score = Callable[[Any], Float[Tensor, " B"]]
"""Of a model's output: a number for each image, such as `lambda logits: logits[:, 3]`."""


@check_arguments
def rollout(
    model: nn.Module, images: Float[Tensor, "B ..."], layers: str = "*", score: Score | None = None
) -> Float[Tensor, "B N N"]:
    """The product of the layers' weights A, averaged over heads, each with the residual path beside it: rows of A + I,
    divided by their sum (Abnar & Zuidema 2020, Eq. 1). Row i: the tokens of the input that token i of the end is of.

    score: makes it the gradient-weighted form (Chefer et al. 2021, Eqs. 5 and 6): a layer adds A' R to R, where A' is
    the mean over heads of the positive part of A times the gradient of the score with respect to A. images: as the
    model expects them. layers: a glob on layer names, in the order in which they are called. A layer that is not
    swapped is read as by `with_regard_softmax`, and no model is changed. float32, on the CPU; O(N^2 H) memory.
    Raises: as `capture`; UnsupportedError for layers of different tokens, or in windows; ShapeError for a score of
    another shape, or no tensor; ConfigError for other arguments, such as images that the model does not take.
    """
    reader = with_regard_softmax(model, images, layers)
    calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], Tensor]] = []

    def recorder(name: str) -> Callable[..., None]:
        def record(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            calls.append((name, operator, args, kwargs, output))

        return record

    gradients: list[Tensor] = []
    with eval_mode(reader), ExitStack() as stack, torch.inference_mode(False), torch.set_grad_enabled(bool(score)):
        for name, mixer in readable_mixers(reader, layers).items():
            stack.callback(mixer.operator.register_forward_hook(recorder(name), with_kwargs=True).remove)
        with explain_inputs(reader, images):  # with gradients for a score, as all weights may be frozen
            output = reader(images if score is None else images.detach().clone().requires_grad_())
        if score is not None:
            gradients = _gradients(score(output), len(images), [out for *_, out in calls])
    total = Rollout()
    with torch.no_grad():
        for number, (name, operator, (q, k, v), kwargs, _) in enumerate(calls):
            weights = operator.weights(q, k, v, **kwargs)
            if weights.shape[0] != len(images) or not total.fits(weights):
                raise UnsupportedError(
                    f"{name} has weights of {tuple(weights.shape)}, not of {len(images)} images and the tokens of the "
                    "layers before: name layers of the same tokens"
                )
            if gradients:  # the output is A v, so that its gradient times v is that of A
                total.add((weights * (gradients[number] @ v.mT)).clamp_min(0), weighted=True)
            else:
                total.add(weights)
    return total.shares()


class Rollout:
    """The product over layers, which are added in the order of their calls."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def fits(self, weights: Float[Tensor, "B H N M"]) -> bool:
        """Whether they are of the tokens of the layers before."""
        return self.total is None or self.total.shape[1:] == weights.shape[2:]

    def add(self, weights: Float[Tensor, "B H N N"], *, weighted: bool = False) -> None:
        """A layer. weighted: by gradients, so that its part is added and not mixed with the residual path."""
        mean = weights.mean(1).float().cpu()
        total = _eye(mean) if self.total is None else self.total
        if weighted:
            self.total = total + mean @ total
        else:
            mean = mean + _eye(mean)
            self.total = (mean / mean.sum(-1, keepdim=True)) @ total

    def shares(self) -> Float[Tensor, "B N N"]:
        """Row i: the tokens of the input that token i of the end is of."""
        assert self.total is not None
        return self.total


def _eye(like: Float[Tensor, "B N M"]) -> Float[Tensor, "B N M"]:
    return torch.eye(*like.shape[1:]).expand(len(like), -1, -1)


def _gradients(scores: object, images: int, outputs: list[Tensor]) -> list[Tensor]:
    """Of the scores, with respect to the outputs of operators. Raises: ShapeError, UnsupportedError."""
    if not isinstance(scores, Tensor) or scores.shape != (images,):
        given = f"{tuple(scores.shape)} numbers" if isinstance(scores, Tensor) else short_repr(scores)
        raise ShapeError(f"score gives {given}, expected one for each of {images} images, in a tensor")
    if not scores.requires_grad:
        raise UnsupportedError("the score has no gradient: it does not depend on the output, or not smoothly")
    return list(torch.autograd.grad(scores.sum(), outputs))
