"""Judges of outputs: which takes what, distances by hand, and losses that lead back to the original."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.advice.distill import change_text
from regard.advice.fidelity import AnswerChange, Fidelity
from regard.advice.judges import KINDS, Judge, choose
from regard.advice.judges.boxes import QueryBoxes, average_precision
from regard.advice.judges.class_maps import ClassMaps
from regard.advice.judges.embedding import Embedding
from regard.advice.judges.own import Own
from regard.advice.judges.real_maps import RealMaps
from regard.advice.judges.scores import Scores
from regard.advice.judges.tokens import Tokens
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import tensors
from regard.core import ConfigError, UnsupportedError
from regard.mixers.static_keys.ska import SKA

from .models import images, user_model

IMAGES = torch.zeros(3, 3, 32, 48)
PLAIN = nn.Sequential(nn.Linear(8, 5))


def headed() -> nn.Module:
    network = nn.Module()
    network.head = nn.Linear(8, 5)
    return network


def boxes(number: int = 4) -> dict[str, Tensor]:
    corner = torch.arange(2.0 * number).view(number, 2)
    return {
        "boxes": torch.cat([corner, corner + 3], 1),
        "labels": torch.arange(number) % 2,
        "scores": torch.linspace(0.9, 0.1, number),
    }


OUTPUTS: list[tuple[Any, nn.Module, list[str]]] = [
    (torch.randn(3, 5), headed(), ["scores"]),
    (torch.randn(3, 5), PLAIN, ["embedding"]),
    ((torch.randn(3, 5), None), headed(), ["scores (0)"]),
    ({"loss": torch.tensor(1.0), "logits": torch.randn(3, 7), "hidden_states": (torch.randn(3, 4, 8),)}, PLAIN,
     ["scores (logits)"]),
    ({"out": torch.randn(3, 7, 8, 8), "aux": torch.randn(3, 7, 8, 8)}, PLAIN, ["classes (out)"]),
    (SimpleNamespace(predicted_depth=torch.randn(3, 9, 9)), PLAIN, ["map (predicted_depth)"]),
    ({"last_hidden_state": torch.randn(3, 6, 8), "pooler_output": torch.randn(3, 8)}, PLAIN,
     ["tokens (last_hidden_state)", "embedding (pooler_output)"]),
    ({"last_hidden_state": torch.randn(3, 8, 4, 6)}, PLAIN, ["tokens (last_hidden_state)"]),
    ([torch.randn(3, 8, 16, 24), torch.randn(3, 16, 8, 12)], PLAIN, ["tokens (0)", "tokens (1)"]),
    (torch.randn(3, 1, 32, 48), PLAIN, ["map"]),
    (torch.randn(3, 2, 32, 48), PLAIN, ["map"]),
    (torch.randn(3, 16, 24), PLAIN, ["map"]),
    (torch.randn(3, 24, 16), PLAIN, ["tokens"]),
    (torch.randn(3, 4, 32, 48), PLAIN, ["classes"]),
    (torch.randn(3, 1), PLAIN, ["map"]),
    (torch.randn(3), PLAIN, ["map"]),
    ([boxes()] * 3, PLAIN, ["boxes"]),
    ({"logits": torch.randn(3, 6, 4), "pred_boxes": torch.rand(3, 6, 4)}, PLAIN, ["boxes"]),
]  # fmt: skip


@pytest.mark.parametrize(("output", "network", "expected"), OUTPUTS, ids=[" ".join(row[2]) for row in OUTPUTS])
def test_an_output_is_judged_by_its_names_and_shape(output: Any, network: nn.Module, expected: list[str]) -> None:
    """The same output again is at distance 0, and agrees as far as this is known."""
    judges = choose(output, IMAGES, network)
    assert list(map(str, judges)) == expected
    for judge in judges:
        distance, agrees = judge.change(judge.read(output), judge.read(output))
        assert distance.shape == agrees.shape == (3,)
        assert distance.abs().max() < 1e-6
        assert agrees.min() > 0.999


def test_as_many_numbers_as_the_training_had_classes_are_scores() -> None:
    output = torch.randn(3, 5)
    assert [str(choose(output, IMAGES, PLAIN, classes=classes)[0]) for classes in (0, 4, 5)] == [
        "embedding", "embedding", "scores"
    ]  # fmt: skip


def test_a_kind_is_chosen_and_what_cannot_be_is_refused() -> None:
    output = {"a": torch.randn(3, 6, 8), "b": torch.randn(3, 5), "c": torch.randn(3, 7, 8, 8)}
    chosen = {"scores": "b", "classes": "c", "map": "a", "embedding": "b", "tokens": "a"}
    for kind, name in chosen.items():
        (judge,) = choose(output, IMAGES, PLAIN, kind)
        assert str(judge) == f"{kind} ({name})"
    assert {*chosen, "boxes"} == set(KINDS)
    with pytest.raises(ConfigError, match="judged as scores, classes, map"):
        choose(output, IMAGES, PLAIN, "boxe")
    for wrong, kind in (
        (output, "boxes"),
        (torch.zeros(3, 4, dtype=torch.long), ""),
        (torch.tensor(1.0), ""),
        ((), ""),
    ):
        with pytest.raises(UnsupportedError, match="nothing that can be judged.*judge= takes a function"):
            choose(wrong, IMAGES, PLAIN, kind)
    with pytest.raises(UnsupportedError, match="has no 'b' now; it has a"):
        Scores("b").read({"a": torch.zeros(3, 5)})


def test_maps_of_classes_agree_by_their_mean_iou() -> None:
    """By hand: classes 0 (3 of 5 pixels in both of either) and 1 (1 of 3); a class that neither has does not count."""
    best = torch.tensor([[[0, 0, 0], [0, 1, 1]], [[0, 0, 0], [1, 1, 0]]])
    before, after = (10 * torch.nn.functional.one_hot(x, 3).permute(2, 0, 1)[None].float() for x in best)
    assert ClassMaps().change(before, after)[1].tolist() == pytest.approx([(3 / 5 + 1 / 3) / 2])


def test_errors_of_maps_by_hand() -> None:
    """A shift by one deviation is an error of 1 and a correlation of 1; the sign changed is 2 and -1."""
    before = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])[None, None]
    error, correlation = RealMaps().change(before.expand(2, -1, -1, -1), torch.cat([before + 1, -before]))
    assert error.tolist() == pytest.approx([1, 2])
    assert correlation.tolist() == pytest.approx([1, -1])
    flat = torch.full((2, 1, 4, 4), 0.3)
    assert RealMaps().change(flat, flat)[1].tolist() == [1, 1]
    numbers = torch.tensor([[0.0], [1.0], [2.0]])
    error, correlation = RealMaps(whole=True).change(numbers, torch.tensor([[0.0], [1.0], [1.0]]))
    assert error.tolist() == pytest.approx([0, 0, math.sqrt(3 / 2)])
    assert correlation.tolist() == pytest.approx([math.sqrt(3) / 2] * 3)


def test_intervals_are_of_shares_or_of_the_values_of_images() -> None:
    """A correlation is no share of yes and no: three of 0.9 to 1 are nowhere near 0.5."""
    values = np.array([0.9, 0.95, 1.0])
    share, correlation = (AnswerChange(0 * values, values, shares).agreement for shares in (True, False))
    assert share.mean == correlation.mean == pytest.approx(95)
    assert correlation.half == pytest.approx(4.303 * 5 / math.sqrt(3), rel=1e-3)
    assert share.half > 2 * correlation.half  # type: ignore[operator]
    assert AnswerChange(0 * values, values - 2, False).agreement.mean == pytest.approx(-105)
    assert AnswerChange(0 * values, values * 0 + 0.5, False).agreement.low is None


def test_neighbours_of_vectors_and_tokens() -> None:
    """A vector that turns to another one has another neighbour."""
    angle = torch.tensor([0.0, 0.1, 1.0, 1.1])
    before = torch.stack([angle.cos(), angle.sin()], 1)
    turned = angle + torch.tensor([0.85, 0.0, 0.0, 0.0])
    after = torch.stack([turned.cos(), turned.sin()], 1)
    distance, same = Embedding().change(before, after)
    assert distance.tolist() == pytest.approx([1 - math.cos(0.85), 0, 0, 0], abs=1e-6)
    assert same.tolist() == [0, 1, 1, 1]  # the first is now nearest to the third
    of_tokens = Tokens().change(before[None], after[None])
    assert [float(x) for x in of_tokens] == pytest.approx([(1 - math.cos(0.85)) / 4, 3 / 4], abs=1e-6)


def test_average_precision_by_hand() -> None:
    truth, found = boxes(2), boxes(2)
    assert average_precision(truth, found) == 1
    assert average_precision(truth, {**found, "labels": torch.tensor([1, 1])}) == pytest.approx(1 / 4)  # second of two
    assert average_precision(truth, {name: x[:1] for name, x in found.items()}) == 0.5
    twice = {name: torch.cat([x, x]) for name, x in found.items()}
    twice["scores"] = torch.tensor([0.9, 0.4, 0.8, 0.3])  # the first box is found twice before the second
    assert average_precision(truth, twice) == pytest.approx((1 + 2 / 3) / 2)
    none = {name: x[:0] for name, x in found.items()}
    assert (average_precision(none, none), average_precision(none, found), average_precision(truth, none)) == (1, 0, 0)


@pytest.mark.parametrize(
    ("judge", "shape"),
    [
        (Scores(), (6, 5)), (ClassMaps(), (6, 5, 4, 4)), (RealMaps(), (6, 1, 4, 4)), (Embedding(), (6, 8)),
        (Tokens(), (6, 9, 8)), (QueryBoxes(), (6, 9, 9)), (QueryBoxes(sigmoid=True), (6, 9, 9)),
        (Own(lambda old, new: (new - old).square().flatten(1).mean(1)), (6, 4)),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)  # fmt: skip
def test_the_loss_leads_back_to_the_original(judge: Judge, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    before = torch.randn(shape)
    after = nn.Parameter(before + 0.5 * torch.randn(shape))
    start = judge.change(before, after.detach())[0].mean()
    optimizer = torch.optim.Adam([after], 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        judge.loss(before, after).backward()
        optimizer.step()
    assert judge.change(before, after.detach())[0].mean() < 0.3 * start


def test_a_distance_of_ones_own_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="^judge gave a distance that is not a number"):
        Own(lambda old, new: torch.full((3,), torch.nan)).change(torch.zeros(3, 5), torch.zeros(3, 5))


def test_a_step_has_no_agreement_where_a_judge_knows_none() -> None:
    judge = Own(lambda old, new: (new - old).square().mean(1))
    distance, agrees = judge.change(torch.zeros(3, 5), torch.ones(3, 5))
    change = AnswerChange(distance.numpy(), agrees.numpy(), judge.shares)
    assert change_text("swapped", change, judge) == "swapped: divergence 1"


def test_further_outputs_are_judged_beside_the_first() -> None:
    class Two(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"last_hidden_state": self.network.forward_features(x), "pooler_output": self.network(x)}  # type: ignore[operator]

    model = user_model()
    with Substitutes(Two(model.network), [SKA()], model.example) as substitutes:
        fidelity = Fidelity(substitutes, model.prepare(tensors(images(20))), batch=8)
        change = fidelity.of_plan(dict.fromkeys(substitutes.names, SKA()))
    assert [judge.kind for judge in fidelity.judges] == ["tokens", "embedding"]
    (other,) = change.others.values()
    assert change.distance.shape == other.distance.shape == (20,)
    assert min(change.distance.min(), other.distance.min()) > 0


def test_rows_that_are_probabilities_already_are_said() -> None:
    rows = torch.rand(4, 5).softmax(1)
    with pytest.warns(UserWarning, match="rows sum to 1"):
        Scores().change(rows, rows)
