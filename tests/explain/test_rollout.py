"""Rollout beside a plain computation of the papers' equations."""

import pytest
import torch
from torch import Tensor, nn

from regard.core import ConfigError, ShapeError, UnsupportedError
from regard.explain.rollout import rollout
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.swapping.capture import capture
from regard.swapping.swap import swap
from small_hosts import draw_large_weights, swin, vit


class Plain(nn.Module):
    """timm's attention with its map, whose gradient is kept."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.own = attention
        self.weights: Tensor

    def forward(self, x: Tensor, **_: object) -> Tensor:
        q, k, v = self.own.qkv(x).unflatten(-1, (3, self.own.num_heads, -1)).permute(2, 0, 3, 1, 4)
        self.weights = (q @ k.mT * self.own.scale).softmax(-1)
        self.weights.retain_grad()
        return self.own.proj((self.weights @ v).transpose(1, 2).flatten(2))


def test_both_forms_are_those_of_the_equations() -> None:
    model, x = vit(3)
    draw_large_weights(model.eval())
    found = rollout(model, x)
    score = lambda logits: logits[:, 2]  # noqa: E731
    weighted = rollout(model, x, score=score)
    assert not any("regard" in name for name, _ in model.named_modules())  # it was read by a copy
    for block in model.blocks:
        block.attn = Plain(block.attn)
    score(model(x)).sum().backward()
    plain = expected = torch.eye(found.shape[-1]).expand_as(found)
    for block in model.blocks:
        weights = block.attn.weights
        step = weights.mean(1) + torch.eye(weights.shape[-1])
        plain = (step / step.sum(-1, keepdim=True)) @ plain
        expected = expected + (weights * weights.grad).clamp_min(0).mean(1) @ expected
    torch.testing.assert_close(found, plain.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weighted, expected.detach(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]))


def test_a_swapped_model_is_read_by_its_own_weights() -> None:
    model, x = vit()
    draw_large_weights(swap(model.eval(), MiTA(m=4, k=3)))
    with torch.inference_mode():
        found = rollout(model, x)
    with capture(model) as maps, torch.no_grad():
        model(x)
    total = torch.eye(found.shape[-1])
    for weights in maps.values():
        step = weights.mean(1) + torch.eye(found.shape[-1])
        total = (step / step.sum(-1, keepdim=True)) @ total
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)


def test_layers_that_are_shared_or_left_as_they_are_count_too() -> None:
    model, x = vit()
    draw_large_weights(model.eval())
    whole = rollout(model, x)
    torch.testing.assert_close(rollout(swap(model, Softmax(), "blocks.0.*"), x), whole, rtol=1e-4, atol=1e-6)
    model.blocks[1] = model.blocks[0]
    with capture(model) as maps, torch.no_grad():
        model(x)
    twice = rollout(model, x)
    step = maps["blocks.0.attn"].mean(1) + torch.eye(whole.shape[-1])  # of the second call
    assert not torch.allclose(twice, step / step.sum(-1, keepdim=True))
    frozen = rollout(model.requires_grad_(False), x, score=lambda logits: logits[:, 0])
    assert frozen.shape == twice.shape


def test_what_cannot_be_is_refused() -> None:
    model, x = vit()
    swap(model, Softmax())
    with pytest.raises(ShapeError, match="expected one for each"):
        rollout(model, x, score=lambda logits: logits)
    with pytest.raises(ShapeError, match="expected one for each"):
        rollout(model, x, score=lambda logits: logits[:-1, 0])
    for score in (lambda logits: logits[0, 0].item(), lambda logits: {"score": logits[:, 0]}):
        with pytest.raises(ShapeError, match="expected one for each"):
            rollout(model, x, score=score)
    with pytest.raises(UnsupportedError, match="has no gradient"):
        rollout(model, x, score=lambda logits: logits.argmax(1).float())
    windows, x = swin()
    with pytest.raises(UnsupportedError, match="name layers of the same tokens"):
        rollout(swap(windows, Softmax()), x)


@pytest.mark.untyped
@pytest.mark.parametrize("swapped", [False, True])
def test_other_arguments_are_named(swapped: bool) -> None:
    model, x = vit()
    if swapped:
        swap(model, Softmax())
    for arguments in ((None, x), (model, x.numpy()), (model, x, 3), (model, x, "*", 3)):
        with pytest.raises(ConfigError, match="rollout: .* expected"):
            rollout(*arguments)
    for images in (x[0], x[..., :-1], x.double()):
        with pytest.raises(ConfigError, match="does not take inputs of"):
            rollout(model, images)
