"""The recommendation, end to end on a small model, and through the command line."""

import copy
import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from library_hosts import SQUARE, hugging
from regard.advice.answer import Question, Recommendation
from regard.advice.distill import distill_model
from regard.advice.learning import Distillation
from regard.advice.page import render_advice
from regard.advice.recommend import candidates, recommend
from regard.advice.search import Budget
from regard.advice.substitutes import Substitutes
from regard.advice.user_model import UserModel, load_user_model, read_user_images, split_images
from regard.cli.app import run as command
from regard.core import ConfigError, DataError, StoreError, UnsupportedError
from regard.mixers.linear import Linear
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model, loads_weights
from regard.models.saving import load, save
from regard.swapping.layer_plan import spell_or_none
from regard.swapping.removed import Removed
from regard.swapping.swap import swap

from .models import HOST, SWIN, images, user_model

QUESTION = Question(budget=Budget("macs", 0.9), mixers=(SKA(), Linear(), Removed()), minutes=0.02, batch=2, steps=10)


Answered = tuple[Path, UserModel, Recommendation]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """The folder that keeps what was found for the question, the model that was asked about, and the answer."""
    folder, model = tmp_path_factory.mktemp("answered"), user_model()
    return folder, model, recommend(model, images(), QUESTION, folder=folder)


@pytest.fixture
def first(answered: Answered, tmp_path: Path) -> Recommendation:
    """The answer; what was found for it is in the folder of the test."""
    shutil.copytree(answered[0], tmp_path, dirs_exist_ok=True)
    return answered[2]


def test_the_plan_meets_the_budget_and_is_what_was_measured(
    answered: Answered, first: Recommendation, tmp_path: Path
) -> None:
    _, model, result = answered
    assert result.met
    assert result.best.macs <= 0.9
    within = [plan.divergence.mean for plan in result.plans if plan.macs <= 0.9]
    assert result.best.divergence.mean == min(within)  # type: ignore[type-var]
    whole = result.plans[0]
    assert (whole.spelling, whole.latency, whole.macs, whole.divergence.mean) == ("", 1.0, 1.0, 0.0)
    assert all(plan.expected == pytest.approx(plan.macs, abs=0.02) for plan in result.plans)
    lines: list[str] = []
    again = recommend(user_model(), images(), QUESTION, folder=tmp_path, report=lines.append)
    assert any("continuing" in line for line in lines)
    assert [plan.divergence for plan in again.plans] == [plan.divergence for plan in result.plans]
    for plan in result.plans:
        swapped = [swap(user_model().network, source)(model.example) for source in (plan.choice, plan.spelling or {})]
        assert torch.equal(*swapped)
        assert torch.equal(swapped[0], user_model().network(model.example)) == (plan is whole)
    lines = repr(result).splitlines()
    assert len(lines) == len(result.plans) + 2 + len(result.doubts)
    assert lines[0].startswith("  3 x its own: 1.00x the time, 1.00x the multiply-accumulates, divergence 0")
    assert [line.startswith("* ") for line in lines].index(True) == result.plans.index(result.best)
    assert "Recommended within macs=0.9x: " in repr(result)
    untouched = user_model().network.state_dict()
    assert all(torch.equal(value, untouched[key]) for key, value in model.network.state_dict().items())


def test_what_was_chosen_once_judges_again(
    first: Recommendation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first answer has spent its time, so that a new choice would take a single batch."""
    monkeypatch.setattr("regard.advice.recommend._Work._seconds_left", lambda work: 0.0)
    again = recommend(user_model(), images(), replace(QUESTION, budget=Budget("macs", 0.8)), folder=tmp_path)
    assert again.images == first.images
    assert len({*map(len, (first.alone[key].distance for key in first.alone))}) == 1


def test_an_unknown_peak_memory_is_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.advice.layer_costs.peak_growth", lambda *_, **__: None)
    with pytest.raises(UnsupportedError, match="does not tell the peak memory: take --budget latency"):
        recommend(user_model(), images(), replace(QUESTION, budget=Budget("memory", 0.5)))


def test_another_share_of_a_kind_is_answered_from_what_is_known(first: Recommendation, tmp_path: Path) -> None:
    lines: list[str] = []
    question = replace(QUESTION, budget=Budget("macs", 0.8))
    second = recommend(user_model(), images(), question, folder=tmp_path, report=lines.append)
    assert not any("step" in line or "costs:" in line for line in lines)
    assert {key: change.distance.tolist() for key, change in second.alone.items()} == {
        key: change.distance.tolist() for key, change in first.alone.items()
    }
    other = replace(QUESTION, budget=Budget("latency", 0.8))
    recommend(user_model(), images(), other, folder=tmp_path, report=lines.append)
    assert any("costs:" in line for line in lines)


@pytest.mark.parametrize("stop", [pytest.param("left out", marks=pytest.mark.slow), "verifying"])
def test_an_interrupted_answer_goes_on(tmp_path: Path, stop: str) -> None:
    question = replace(QUESTION, mixers=(SKA(), Softmax(), Removed()))

    def report(text: str) -> None:
        if text.startswith(stop):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recommend(user_model(), images(), question, folder=tmp_path, report=report)
    lines: list[str] = []
    result = recommend(user_model(), images(), question, folder=tmp_path, report=lines.append)
    assert lines[0].startswith("continuing")
    assert not any("costs:" in line for line in lines)
    assert len({len(change.distance) for change in result.alone.values()}) == 1


def test_what_saves_nothing_is_left_out(tmp_path: Path) -> None:
    """A substitute of softmax attention has as many products as the model's own."""
    question = replace(QUESTION, mixers=(Softmax(), SKA()))
    result = recommend(user_model(), images(), question)
    assert {mixer for _, mixer in result.alone} == {SKA()}
    assert any("Softmax() cost no less" in doubt for doubt in result.doubts)
    page = render_advice(result)
    assert "saves nothing" in page
    nothing = recommend(user_model(), images(), replace(question, mixers=(Softmax(),)))
    assert (nothing.best.spelling, nothing.met, nothing.alone) == ("", False, {})
    assert "Keep the model as it is" in render_advice(nothing)


@pytest.mark.slow
def test_windowed_hosts_are_described_as_such() -> None:
    """Swin's relative biases refuse Linear; its windows are no global attention, whatever their weights."""
    question = replace(QUESTION, mixers=(SKA(), Linear()))
    result = recommend(user_model(SWIN, (32, 64)), images(size=(32, 64)), question)
    assert isinstance(result.use, Mapping)
    assert [(use.windows, use.word) for use in result.use.values()] == [(8, "windows"), (8, "windows"), (2, "windows")]
    assert sum("Linear() fits no layer: " in doubt for doubt in result.doubts) == 1
    assert "Linear at 3 layers (it passes a bias mask" in render_advice(result)


def test_a_budget_that_cannot_be_met_gives_the_nearest_plan() -> None:
    question = Question(budget=Budget("macs", 0.01), mixers=(SKA(),), minutes=0.1, batch=2, steps=0)
    result = recommend(user_model(), images(), question)
    assert not result.met
    assert result.best.macs == min(plan.macs for plan in result.plans)
    assert any("no plan of these mechanisms meets macs=0.01x" in doubt for doubt in result.doubts)


def test_a_budget_below_all_that_mixes_tokens_is_named() -> None:
    question = Question(budget=Budget("macs", 0.01), mixers=(SKA(), Removed()), minutes=0.1, batch=2, steps=0)
    result = recommend(user_model(), images(), question)
    least = 1 + sum(row[SKA()].macs - row[None].macs for row in result.costs.values()) / result.usage.macs
    said = [doubt for doubt in result.doubts if "of some kind in every layer" in doubt]
    assert len(said) == 1
    assert f"costs {least:.2f}x at least, so that {len(result.costs)} layers have none" in said[0]


def test_the_state_of_another_question_is_replaced_with_a_line_and_a_damaged_one_refused(
    first: Recommendation, tmp_path: Path
) -> None:
    lines, question = [], Question(budget=Budget("macs", 0.9), mixers=(SKA(),), minutes=0.01, batch=2, steps=0)
    recommend(user_model(), images(), question, folder=tmp_path, report=lines.append)
    assert any("of another question" in line for line in lines)
    assert not any("continuing" in line for line in lines)
    state = tmp_path / "advice.state"
    for content in (b"{}", state.read_bytes()[:-1], b"x" + state.read_bytes()[1:]):
        state.write_bytes(content)
        with pytest.raises(StoreError, match=r"advice\.state.*delete it to start again"):
            recommend(user_model(), images(), question, folder=tmp_path)
        assert state.read_bytes() == content


@pytest.mark.untyped
@pytest.mark.parametrize(
    "fields",
    [{"minutes": "x"}, {"minutes": 0}, {"batch": 2.5}, {"where": None}, {"mixers": ("SKA()",)}, {"budget": "x"}],
)
def test_a_wrong_question_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Question(**fields)
    with pytest.raises(ConfigError, match="share=None; a finite number"):
        Budget("latency", None)  # type: ignore[arg-type]


def test_images_of_a_folder_are_read_whatever_its_form(tmp_path: Path) -> None:
    for row in range(20):
        folder = tmp_path / ("nested/deep" if row % 2 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (12 * row, 0, 0)).save(folder / f"{row}.png")
    (tmp_path / "damaged.png").write_bytes(b"no image")
    pictures, damaged = read_user_images(str(tmp_path), (16, 24), 3, 100)
    assert pictures.pixels.shape == (20, 16, 24, 3)
    assert len(damaged) == 1
    assert "damaged.png" in damaged[0]
    few, _ = read_user_images(str(tmp_path), (16, 24), 1, 17)
    assert few.pixels.shape[-1] == 1
    learned, judged = split_images(pictures)
    assert (len(learned), len(judged)) == (10, 10)
    learned, judged = split_images(images(80))
    assert (len(learned), len(judged)) == (60, 20)
    with pytest.raises(DataError, match="at least 16"):
        read_user_images(str(tmp_path / "nested"), (16, 24), 3, 100)


def test_sizes_that_lose_a_border_are_refused(tmp_path: Path) -> None:
    saved = str(save(create_model("vit_desk(size=8, patch=4, dim=16, depth=1, heads=2)", None), tmp_path / "saved"))
    for size, nearest in (((7, 7), "4x4 or 8x8"), ((12, 9), "12x8 or 12x12")):
        with pytest.raises(ConfigError, match=f"{size[0]}x{size[1]} are not divided by the 4x4 .*nearest: {nearest}$"):
            load_user_model(saved, size=size)
    with pytest.raises(ConfigError, match="does not take inputs of 3x3x8"):
        load_user_model(saved, size=(3, 8))
    assert load_user_model(saved, size=(12, 8)).size == (12, 8)
    small = "vit_tiny_patch16_224(embed_dim=16, depth=1, num_heads=2)"
    with pytest.raises(ConfigError, match="nearest: 32x32 or 48x48"):
        load_user_model(small, size=(40, 40))
    assert load_user_model(f"{small[:-1]}, img_size=40)", size=(40, 40)).size == (40, 40)  # as it was built


def test_models_that_give_no_answer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --pretrained and --weights out"):
        load_user_model(str(save(create_model(HOST, None), tmp_path / "saved")), pretrained=True)
    network = user_model().network
    for wrong, message in (
        (torch.compile(network), "wrapped in OptimizedModule: give the model inside it, ._orig_mod"),
        (torch.nn.DataParallel(network), "wrapped in DataParallel: give the model inside it, .module"),
        (copy.deepcopy(network).half(), r"torch.float16: give it in float32"),
    ):
        model = replace(user_model(), network=wrong)
        for work in (
            lambda model=model: recommend(model, images(), QUESTION),
            lambda model=model: distill_model(model, SKA(), images(), Distillation(steps=1), Distillation(steps=0)),
        ):
            with pytest.raises(UnsupportedError, match=message):
                work()


def test_images_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    for row in range(16):
        Image.new("RGB", (24, 16), (90, 90, 90)).save(tmp_path / f"{row}.png")
    with pytest.raises(DataError, match="all 16 images .* are equal at 16x24"):
        read_user_images(str(tmp_path), (16, 24), 3, 100)
    with pytest.raises(DataError, match="1 images cannot be parted"):
        recommend(user_model(), images(1), QUESTION)


@pytest.mark.slow
def test_the_commands_of_a_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """swap-check, advise, distill and finetune, one after another, on a saved model and digits."""
    host = "vit_desk(size=8, patch=2, dim=16, depth=2, heads=2, in_chans=1)"
    saved = str(save(create_model(host, None), tmp_path / "saved"))
    assert command(["swap-check", saved, "SKA()", "--data", "digits", "--images", "32", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in rows] == ["blocks.0.attn", "blocks.1.attn", "all"]
    out = str(tmp_path / "advice")
    arguments = ["--data", "digits", "--images", "48", "--minutes", "0.02", "--mixers", "SKA; None", "--out", out]
    assert command(["advise", saved, "--budget", "macs=0.95x", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "Recommended " in printed
    page = (tmp_path / "advice" / "advice.html").read_text()
    assert "Where attention looks" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    plan = str(tmp_path / "advice" / "plan.json")
    new = str(tmp_path / "new")
    (hint,) = [line for line in printed.splitlines() if line.startswith("  regard distill")]
    options = ["--images", "48", "--steps", "3", "--output-steps", "2", "--out", new]
    assert command([*shlex.split(hint)[1:], *options]) == 0
    capsys.readouterr()
    changes = ["--set", "recipe.epochs=1", "--set", "task.limit=64", "--results", str(tmp_path / "results"), "--json"]
    for start, further in ((new, []), (saved, ["--plan", plan])):
        assert command(["finetune", start, "--data", "digits", "--size", "8x8", *further, *changes]) == 0
        outcome = json.loads(capsys.readouterr().out)
        assert "SKA()" in outcome["row"] or "None" in outcome["row"]
    assert outcome["row"].startswith("blocks.")
    assert load(new) is not None
    old = ["advise", saved, "--budget", "macs=0.999999x", *arguments[:-4], "--mixers", "Softmax", "--out", out]
    assert command(old) == 0
    assert "Keep the model as it is" in capsys.readouterr().out
    assert not Path(plan).exists()  # it would contradict the page


def test_a_model_of_random_weights_is_not_to_be_distilled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "digits", "--images", "16", "--minutes", "0.02", "--mixers", "None", "--out", str(tmp_path)]
    assert command(["advise", "vit_desk(size=8, patch=2, dim=16, depth=2, heads=2, in_chans=1)", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "are random" in " ".join(printed.split())
    assert "regard distill" not in printed


def test_candidates_suit_the_layer_with_the_fewest_tokens() -> None:
    spelled = [spell_or_none(mixer) for mixer in candidates(user_model())]
    assert spelled == ["MiTA(m=4, k=4)", "Agent(m=4)", "Linear()", "SKA()", "Window(size=3)", "None"]
    with Substitutes(user_model().network, candidates(user_model()), user_model().example) as substitutes:
        assert not substitutes.refused


@pytest.mark.slow
def test_layers_that_are_called_by_keyword_are_measured() -> None:
    sizes = {**SQUARE, "image_size": 16, "patch_size": 4, "projection_dim": 8}
    network = hugging("CLIPVisionModelWithProjection", 2, (16, 16), **sizes).model.eval()
    model = UserModel(network, "CLIP", (16, 16), ([0.5] * 3, [0.25] * 3))
    question = Question(budget=Budget("macs", 0.9), mixers=(Linear(),), minutes=0.05, steps=1)
    answer = recommend(model, images(32, (16, 16)), question)
    assert answer.usage.macs > 0


@pytest.mark.parametrize(
    ("text", "pretrained", "trained"),
    [("vit_desk", False, False), ("vit_desk", True, True), ("resnet18(pretrained=True)", False, True),
     ("resnet18(checkpoint_path='mine.pth')", False, True), ("resnet18(pretrained=False)", False, False)],
)  # fmt: skip
def test_weights_that_a_spelling_loads_are_not_called_random(text: str, pretrained: bool, trained: bool) -> None:
    assert loads_weights(text, pretrained) is trained
