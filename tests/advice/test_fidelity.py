"""Fidelity: the original as its own reference, by hand and by properties."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from regard.advice.fidelity import Fidelity
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import tensors
from regard.core import DataError, SwapError
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.projections.sne import FSNE
from regard.swapping.removed import Removed
from regard.swapping.swap import swap

from .models import SWIN, images, user_model


def test_the_same_mechanism_changes_nothing_and_another_does() -> None:
    model, inputs = user_model(), None
    with Substitutes(model.network, [Softmax(), SKA(), Removed()], model.example) as substitutes:
        inputs = model.prepare(tensors(images(20)))
        fidelity = Fidelity(substitutes, inputs, batch=8)
        outputs, alone = fidelity.outputs(), fidelity.alone()
        for name in substitutes.names:
            assert outputs[name, Softmax()].error.max() < 1e-5
            assert alone[name, Softmax()].distance.max() < 1e-6
            assert np.allclose(outputs[name, Removed()].error, 1)
            assert outputs[name, SKA()].error.min() > 0.01
            assert alone[name, SKA()].distance.mean() > 1e-5
        assert fidelity.of_plan({}).agreement.mean == 100


def test_scores_are_those_of_a_swapped_model() -> None:
    """Against the definition, with a real swap of the same weights."""
    model = user_model()
    plan = {"blocks.0.attn": MiTA(m=2, k=3), "blocks.2.attn": Removed()}
    inputs = model.prepare(tensors(images(20)))
    with Substitutes(model.network, [MiTA(m=2, k=3), Removed()], model.example) as substitutes, torch.no_grad():
        change = Fidelity(substitutes, inputs, batch=7).of_plan(plan)
        applied = substitutes.apply(plan)(inputs)
        before = model.network(inputs)
        after = swap(model.network, plan)(inputs)
    assert torch.allclose(applied, after, atol=1e-6)
    kl = F.kl_div(after.log_softmax(1), before.log_softmax(1), log_target=True, reduction="none").sum(1)
    assert np.allclose(change.distance, kl.numpy(), atol=1e-6)
    assert np.array_equal(change.agrees == 1, (before.argmax(1) == after.argmax(1)).numpy())
    assert 0 < change.agreement.low <= change.agreement.mean <= change.agreement.high <= 100  # type: ignore[operator]


def test_the_model_is_as_it_was_afterwards() -> None:
    model = user_model()
    inputs = model.prepare(tensors(images(20)))
    before = model.network(inputs)
    hooks = sum(len(module._forward_hooks) for module in model.network.modules())
    substitutes = Substitutes(model.network, [SKA()], model.example)
    with pytest.raises(SwapError, match="not among the substitutes"), substitutes.install({"blocks.0.attn": MiTA()}):
        pass
    substitutes.close()
    assert torch.equal(model.network(inputs), before)
    assert sum(len(module._forward_hooks) for module in model.network.modules()) == hooks
    assert not any("regard" in key for key in model.network.state_dict())


def test_what_cannot_be_compared_is_refused() -> None:
    model = user_model()
    with pytest.raises(SwapError, match="share parameters"):
        Substitutes(model.network, [Softmax(projection=FSNE(code=4))], model.example)


def test_outputs_that_are_nan_are_compared_with_nothing() -> None:
    model = create_model("vit_desk(patch=8, dim=16, depth=1, heads=2)").eval()
    with torch.no_grad():
        model.head.weight[0] = torch.nan
    with pytest.raises(DataError, match="the model's own output is NaN for some images"):
        Fidelity(Substitutes(model, [SKA()], torch.zeros(1, 3, 32, 32)), torch.zeros(2, 3, 32, 32))


def test_windows_of_an_image_are_one_image() -> None:
    """Swin's layers see windows as a larger batch; the changes are by image all the same."""
    network, inputs = create_model(SWIN, None, num_classes=5).eval(), torch.randn(4, 3, 32, 64)
    with Substitutes(network, [Removed(), SKA()], inputs[:1]) as substitutes:
        outputs = Fidelity(substitutes, inputs, batch=3).outputs()
        assert {key[1] for key in outputs} == {Removed(), SKA()} or all(
            "bias" in r for r in substitutes.refused.values()
        )
        assert all(change.error.shape == (4,) for change in outputs.values())
        assert np.allclose(outputs[substitutes.names[0], Removed()].error, 1)


def test_a_mechanism_that_fails_on_what_a_layer_gets_is_refused() -> None:
    """MiTA applies biases of keys; Swin's are for each pair of a query and a key, which only a pass shows."""
    network = create_model(SWIN, None, num_classes=5).eval()
    with Substitutes(network, [MiTA(m=4, k=4), Removed()], torch.randn(1, 3, 32, 64)) as substitutes:
        assert all(substitutes.choices(name) == [Removed()] for name in substitutes.names)
        assert all("bias" in reason for reason in substitutes.refused.values())


def test_a_swapped_model_is_the_original_of_further_swaps() -> None:
    model = user_model()
    swap(model.network, SKA())
    inputs = model.prepare(tensors(images(20)))
    before = model.network(inputs)
    with Substitutes(model.network, [SKA(), Removed()], model.example) as substitutes:
        fidelity = Fidelity(substitutes, inputs)
        alone = fidelity.alone()
        plan = {"blocks.1.attn": Removed()}
        applied = substitutes.apply(plan)
        assert fidelity.of_model(applied).distance == pytest.approx(fidelity.of_plan(plan).distance, abs=1e-9)
    assert max(alone[name, SKA()].distance.max() for name in substitutes.names) < 1e-6
    assert min(alone[name, Removed()].distance.mean() for name in substitutes.names) > 1e-6
    assert torch.equal(model.network(inputs), before)
