"""Distillation: layers learn what they replace, the same bits after an interruption, the model itself untouched."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.advice.distill import distill_model
from regard.advice.fidelity import Fidelity
from regard.advice.learning import Distillation, LayerDistillation
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import tensors
from regard.cli.app import run as command
from regard.core import ConfigError, StoreError
from regard.files.tensor_files import read_state, write_state
from regard.mixers.linear import Linear
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.models.saving import load, save

from .models import HOST, images, user_model

HOW = Distillation(steps=60, batch=32, lr=5e-3)


def test_few_images_take_a_smaller_rate() -> None:
    """At the full rate they lead a trained network away; parameters that start at random keep theirs."""
    model = user_model()
    with Substitutes(model.network, [SKA()], model.example) as substitutes:
        rates = []
        for steps in (120, 30, 1000):
            learning = LayerDistillation(substitutes, model, images(), Distillation(steps=steps, batch=16, lr=4e-3))
            rates.append([rate for _, rate in learning.groups])
    assert rates == [[4e-3, 16e-3], [2e-3, 16e-3], [4e-3, 16e-3]]


def test_each_layer_learns_its_predecessors_output() -> None:
    model = user_model()
    before = {key: value.clone() for key, value in model.network.state_dict().items()}
    with Substitutes(model.network, [SKA(), Linear()], model.example) as substitutes:
        fidelity = Fidelity(substitutes, model.prepare(tensors(images())))
        first = {key: change.error.mean() for key, change in fidelity.outputs().items()}
        learning = LayerDistillation(substitutes, model, images(), HOW)
        assert learning.run()
        last = {key: change.error.mean() for key, change in fidelity.outputs().items()}
    assert all(last[key] < (0.6 if key[1] == Linear() else 0.98) * first[key] for key in first)
    assert all(torch.equal(value, before[key]) for key, value in model.network.state_dict().items())
    assert all(value.grad is None for value in model.network.parameters())


def test_a_stop_changes_no_bit() -> None:
    weights = []
    for stops in (False, True):
        model = user_model()
        with Substitutes(model.network, [SKA()], model.example) as substitutes:
            learning = LayerDistillation(substitutes, model, images(), replace(HOW, steps=15))
            if stops:
                assert not learning.run(seconds=-1)
            assert learning.run()
            weights.append({key: value.clone() for key, value in learning.state()["weights"].items()})
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_a_distilled_model_is_saved_and_closer_to_the_original(tmp_path: Path) -> None:
    model = user_model()
    scores = Distillation(steps=20, batch=8, lr=5e-4)
    lines: list[str] = []
    outcome = distill_model(model, "*=SKA()", images(), HOW, scores, tmp_path / "out", report=lines.append)
    divergences = [change.distance.mean() for change in outcome.changes.values()]
    assert list(outcome.changes) == ["swapped", "layers learned", "outputs learned"]
    assert divergences[1] < divergences[0]
    assert divergences[2] < divergences[1]
    inputs = model.prepare(tensors(images(8)))
    assert torch.allclose(load(tmp_path / "out")(inputs), outcome.model(inputs), atol=1e-6)
    assert not (tmp_path / "out" / "distill.state").exists()
    assert any(line.startswith("layers learned: divergence") for line in lines)


class Killed(BaseException):
    """In the place of a signal: no line of the package catches it."""


def test_a_killed_distillation_leaves_a_state_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues with the same bits; another distillation neither takes nor replaces its state."""
    monkeypatch.setattr("regard.advice.kept.SECONDS_BETWEEN", 0.01)  # a state after each step or two
    monkeypatch.setattr("regard.advice.kept.WRITING", 1e9)
    how = Distillation(steps=6, batch=8, lr=5e-3)

    def distilled(out: str, plan: str = "*=SKA()", kill: int = -1) -> bytes:
        seen: list[str] = []

        def report(line: str) -> None:
            seen.append(line)
            if len(seen) == kill:
                raise Killed

        distill_model(user_model(), plan, images(), how, how, tmp_path / out, report=report)
        return (tmp_path / out / "model.safetensors").read_bytes()

    with pytest.raises(Killed):
        distilled("out", kill=5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["distill.state"]
    with pytest.raises(StoreError, match=r"distill\.state is of another question.*choose another folder"):
        distilled("out", "*=Linear()")
    state = (tmp_path / "out" / "distill.state").read_bytes()
    (tmp_path / "out" / "distill.state").write_bytes(state[:-1])
    with pytest.raises(StoreError, match="does not fit its checksum.*delete it to start again"):
        distilled("out")
    (tmp_path / "out" / "distill.state").write_bytes(state)
    for damage in ({"step": 99}, {"step": "1"}, {"weights": {}}, {"weights": None}):
        value = read_state(tmp_path / "out" / "distill.state") or {}
        value["content"]["layers"] |= damage
        write_state(tmp_path / "out" / "distill.state", value)
        with pytest.raises(StoreError, match="does not fit the model"):
            distilled("out")
        (tmp_path / "out" / "distill.state").write_bytes(state)
    assert distilled("out") == distilled("at once")


def test_a_model_is_not_replaced_by_what_it_teaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(save(create_model(HOST, None), tmp_path / "saved"))
    assert command(["distill", saved, "--plan", "SKA()", "--data", "digits", "--out", saved]) == 2
    assert "is the folder of the model itself" in capsys.readouterr().err


def test_a_saved_model_is_not_replaced_by_another_distillation(tmp_path: Path) -> None:
    none = Distillation(steps=0)
    distill_model(user_model(), "*=SKA()", images(), none, none, tmp_path / "out")
    saved = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="out has a saved model already, .* choose another .folder=, --out."):
        distill_model(user_model(), "*=Linear()", images(), none, none, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == saved
    (tmp_path / "out" / "model.json").unlink()  # as another library's folder is, which `save` would refuse at the end
    with pytest.raises(ConfigError, match="out has a saved model already"):
        distill_model(user_model(), "*=Linear()", images(), none, none, tmp_path / "out")


@pytest.mark.untyped
@pytest.mark.parametrize(
    "fields",
    [
        *({"steps": steps} for steps in (-1, 2.5)),
        *({"batch": batch} for batch in (0, "4")),
        *({"lr": lr} for lr in (2.0, "fast")),
        *({"faster": faster} for faster in (0.0, float("inf"))),
        {"augment": "nothing"},
        {"seed": -1},
    ],
    ids=str,
)
def test_wrong_numbers_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Distillation(**fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_lora_learns_the_scores_and_leaves_no_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = user_model()
    scores = Distillation(steps=30, batch=8, lr=5e-3)
    outcome = distill_model(model, "*=SKA()", images(), Distillation(steps=5), scores, tmp_path / "out", rank=4)
    before, after = (outcome.changes[step].distance.mean() for step in ("layers learned", "outputs learned"))
    assert after < before
    assert not any("lora" in name for name, _ in outcome.model.named_modules())
    assert all(value.requires_grad for value in outcome.model.parameters() if value.ndim > 1)
    inputs = model.prepare(tensors(images(8)))
    assert torch.allclose(load(tmp_path / "out")(inputs), outcome.model(inputs), atol=1e-6)
