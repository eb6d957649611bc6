"""Models whose attention is called, shared or built in ways that the usual models do not have."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.advice.advise import _kinds
from regard.advice.answer import Question
from regard.advice.attention_use import attention_use
from regard.advice.fidelity import Fidelity
from regard.advice.layer_costs import layer_costs
from regard.advice.recommend import recommend
from regard.advice.search import Budget
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import UserModel, load_user_model, tensors
from regard.mixers.linear import Linear
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.swapping.layer import Port
from regard.swapping.removed import Removed
from regard.swapping.swap import swap

from .models import images, user_model

SIZE = (16, 24)
NORMAL = ([0.5] * 3, [0.25] * 3)


class Tokens(nn.Module):
    """A classifier on patches with layers of PyTorch, whose tokens come first or second."""

    def __init__(self, layers: list[nn.Module], batch_first: bool) -> None:
        super().__init__()
        self.patch_embed, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 5)
        self.layers, self.batch_first = nn.ModuleList(layers), batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1 if self.batch_first else 0))


def encoder(batch_first: bool, heads: tuple[int, ...] = (2, 2)) -> UserModel:
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(16, number, 32, dropout=0.0, batch_first=batch_first) for number in heads
    ]
    return UserModel(Tokens(layers, batch_first).eval(), "an encoder", SIZE, NORMAL)


class Sized(Tokens):
    """A user's model that says its size by the default of an option alone."""

    def __init__(self, size: tuple[int, int] = SIZE) -> None:
        super().__init__([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)], batch_first=True)


def test_a_users_model_gets_images_of_the_size_that_its_options_say() -> None:
    for text, size in (("Sized", SIZE), ("Sized(size=(8, 12))", (8, 12))):
        assert load_user_model(text, extra=(Sized,)).size == size


def test_tokens_before_images_give_the_same_answer() -> None:
    inputs = user_model().prepare(tensors(images(6)))
    changes = []
    for batch_first in (True, False):
        model = encoder(batch_first)
        with Substitutes(model.network, [Linear()], model.example) as substitutes:
            changes.append(Fidelity(substitutes, inputs, batch=4).outputs())
    for key, first in changes[0].items():
        assert first.error.shape == (6,)
        assert changes[1][key].error == pytest.approx(first.error, rel=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_tokens_before_images_are_no_windows(batch_first: bool) -> None:
    model = encoder(batch_first)
    kinds = _kinds(swap(model.network, Softmax(), example=model.example), model.example)
    assert [kind.windows for _, kind in kinds.values()] == [1, 1]


def test_layers_with_other_numbers_of_heads_are_measured_apart() -> None:
    model, measured = encoder(True, (1, 4, 4)), []
    with Substitutes(model.network, [Linear()], model.example) as substitutes:
        layer_costs(substitutes, model.example, 0.01, measured.append)
    assert measured == ["layers.0.self_attn", "layers.1.self_attn"]


def test_attention_at_two_places_is_replaced_at_both() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    other = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    other.self_attn = layer.self_attn
    model = UserModel(Tokens([layer, other], True).eval(), "shared", SIZE, NORMAL)
    inputs = model.prepare(tensors(images(4)))
    before = model.network(inputs)
    with Substitutes(model.network, [Removed()], model.example) as substitutes:
        name = "layers.0.self_attn"
        assert substitutes.names == [name]
        with substitutes.install({name: Removed()}), torch.no_grad():
            changed = model.network(inputs)
        expected = substitutes.apply({name: Removed()})(inputs)
    assert torch.allclose(changed, expected, atol=1e-5)
    assert torch.allclose(model.network(inputs), before)
    assert other.self_attn is layer.self_attn


def test_maps_of_one_image_after_another_say_the_same() -> None:
    model = user_model()
    inputs = model.prepare(tensors(images(3)))
    together, alone = attention_use(model, inputs), [attention_use(model, image) for image in inputs.split(1)]
    assert isinstance(together, dict)
    for name, use in together.items():
        for field in ("tokens", "distance", "prefix"):
            values = [getattr(uses[name], field) for uses in alone]  # type: ignore[index]
            assert getattr(use, field) == pytest.approx(sum(values) / 3)
        assert 0 < use.tokens <= 1


class Forbidden(nn.Module):
    """A model with one class more, which no image can have: its score is -inf."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        scores = self.network(x)
        return torch.cat([scores, torch.full_like(scores[:, :1], -math.inf)], 1)


def test_a_class_that_is_never_possible_changes_nothing() -> None:
    plain = user_model()
    masked = replace(plain, network=Forbidden(plain.network), judge="scores")
    inputs, changes = plain.prepare(tensors(images(20))), []
    for model in (plain, masked):
        with Substitutes(model.network, [SKA()], model.example) as substitutes:
            changes.append(list(Fidelity(substitutes, inputs, model.judges()).alone().values()))
    for one, other in zip(*changes, strict=True):
        assert other.distance == pytest.approx(one.distance, rel=1e-3, abs=1e-7)


def test_a_mechanism_whose_scores_are_no_numbers_is_in_no_plan_and_said() -> None:
    model = user_model()
    block = model.network.blocks[1]  # type: ignore[index, operator]

    def spoil(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * math.nan if isinstance(block.attn, Port) else output

    block.register_forward_hook(spoil)
    question = Question(budget=Budget("macs", 0.97), mixers=(Linear(),), minutes=0.1, steps=1)
    answer = recommend(model, images(32), question)
    assert any("no numbers" in doubt and "blocks.1.attn" in doubt for doubt in answer.doubts)
    assert not any("blocks.1.attn" in plan.spelling for plan in answer.plans)
    assert any(plan.choice and plan.spelling for plan in answer.plans)
    assert all(math.isfinite(plan.loss) for plan in answer.plans)
