"""Distillation: layers learn what they replace, the same bits after an interruption, the model itself untouched."""

from pathlib import Path

import pytest
import torch

from regard.advice.distill import distill_model
from regard.advice.fidelity import Fidelity
from regard.advice.learning import Distillation, LayerDistillation
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import tensors
from regard.core import ConfigError
from regard.mixers.linear import Linear
from regard.mixers.static_keys.ska import SKA
from regard.models.saving import load

from .models import images, user_model

HOW = Distillation(steps=40, batch=8, lr=5e-3)


def test_each_layer_learns_its_predecessors_output() -> None:
    model = user_model()
    before = {key: value.clone() for key, value in model.network.state_dict().items()}
    with Substitutes(model.network, [SKA(), Linear()], model.example) as substitutes:
        fidelity = Fidelity(substitutes, model.prepared(tensors(images())))
        first = {key: change.error.mean() for key, change in fidelity.outputs().items()}
        learning = LayerDistillation(substitutes, model, images(), HOW)
        assert learning.run()
        last = {key: change.error.mean() for key, change in fidelity.outputs().items()}
    assert all(last[key] < (0.6 if key[1] == Linear() else 0.98) * first[key] for key in first)
    assert all(torch.equal(value, before[key]) for key, value in model.network.state_dict().items())
    assert all(value.grad is None for value in model.network.parameters())


def test_a_stop_changes_no_bit() -> None:
    def weights(stops: bool) -> dict[str, torch.Tensor]:
        model = user_model()
        with Substitutes(model.network, [SKA()], model.example) as substitutes:
            learning = LayerDistillation(substitutes, model, images(), HOW)
            if stops:
                assert not learning.run(seconds=-1)
                learning.how = Distillation(steps=15, batch=8, lr=5e-3)
                learning.run()
                learning.how = HOW
                state = {key: value for key, value in learning.state().items()}
                state["weights"] = {key: value.clone() for key, value in state["weights"].items()}
                again = Substitutes(user_model().network, [SKA()], model.example)
                learning = LayerDistillation(again, model, images(), HOW)
                learning.resume(state)
                again.close()
                return learning.state()["weights"]
            learning.how = Distillation(steps=15, batch=8, lr=5e-3)
            learning.run()
            return {key: value.clone() for key, value in learning.state()["weights"].items()}

    one, other = weights(False), weights(True)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_distilled_model_is_saved_and_closer_to_the_original(tmp_path: Path) -> None:
    model = user_model()
    scores = Distillation(steps=20, batch=8, lr=5e-4)
    lines: list[str] = []
    outcome = distill_model(model, "*=SKA()", images(), HOW, scores, tmp_path / "out", report=lines.append)
    divergences = [change.kl.mean() for change in outcome.changes.values()]
    assert list(outcome.changes) == ["swapped", "layers learned", "scores learned"]
    assert divergences[1] < divergences[0]
    assert divergences[2] < divergences[1]
    inputs = model.prepared(tensors(images(8)))
    assert torch.allclose(load(tmp_path / "out")(inputs), outcome.model(inputs), atol=1e-6)
    assert not (tmp_path / "out" / "distill.state").exists()
    assert any("after learning layer by layer" in line for line in lines)


@pytest.mark.parametrize("fields", [{"steps": -1}, {"batch": 0}, {"lr": 2.0}, {"faster": 0.0}])
def test_wrong_numbers_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Distillation(**fields)  # type: ignore[arg-type]
