"""Maps of a run: on a free picture that every row of a study shares, never on an image of the data set."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from photos import class_folders, decoded
from regard.explain.pictures import CREDITS, attention_maps, sample_image
from regard.files.records import read_record, write_record
from regard.lab.report.page_data import read_maps, read_study
from regard.lab.results.results import Results
from regard.lab.tasks import Classification
from regard.lab.train.execute import execute
from regard.lab.train.load import load_trained
from regard.lab.train.measurements import probe_maps
from regard.lab.train.recipe import Recipe
from regard.lab.train.run import Run
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA

from pilot_store import key_of, make_store  # isort: skip

HOST = "vit_desk(size=(12, 16), patch=4, dim=16, depth=1, heads=2)"


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two classes of colour images."""
    return class_folders(tmp_path_factory.mktemp("colours"), images=20, width=18, height=14)


def run_of(data: str, mixer=None, size=(12, 16)) -> Run:  # type: ignore[no-untyped-def]
    task = Classification(host=HOST.replace("(12, 16)", str(size)), data=data, size=size, limit=16)
    return Run(task=task, mixer=mixer, recipe=Recipe(epochs=1, batch=8, augment="none"))


def test_colour_models_look_at_the_photograph_and_say_whose_it_is(colours: Path, tmp_path: Path) -> None:
    store, found = Results(tmp_path), []
    for mixer in (Softmax(), SKA()):
        run = run_of(str(colours), mixer)
        execute(run, store, device="cpu")
        assert probe_maps(run, store) == "done"
        found.append(read_record(store.folder(run.key) / "probes" / "maps.json"))
    assert found[0]["image"] == found[1]["image"]
    assert found[0]["credit"] == CREDITS["flower"]
    assert np.array_equal(decoded(found[0]["image"]), sample_image((12, 16), name="flower"))


def test_the_photograph_is_normalised_as_the_task_does(colours: Path, tmp_path: Path) -> None:
    store, run = Results(tmp_path), run_of(str(colours), Softmax())
    execute(run, store, device="cpu")
    probe_maps(run, store)
    found = read_record(store.folder(run.key) / "probes" / "maps.json")
    pixels = torch.from_numpy(sample_image((12, 16), name="flower").copy()).permute(2, 0, 1)[None]
    image = run.task.prepare(pixels, torch.device("cpu"))[0]
    expected = attention_maps(load_trained(run, store), image)["layers"]
    raw = attention_maps(load_trained(run, store), pixels[0].float() / 255)["layers"]
    assert found["layers"] == expected
    assert found["layers"] != raw


def test_grey_models_look_at_a_digit(tmp_path: Path) -> None:
    store, run = Results(tmp_path), run_of("digits-canvas", Softmax(), (12, 12))
    execute(run, store, device="cpu")
    (tmp_path / "mine").mkdir()
    (store.folder(run.key) / "probes").symlink_to(tmp_path / "mine")  # what a link points to is not changed
    assert probe_maps(run, store) == "done"
    found = read_record(store.folder(run.key) / "probes" / "maps.json")
    assert not list((tmp_path / "mine").iterdir())
    assert found["credit"] == CREDITS["digit"]
    assert "scikit-learn" in found["credit"]
    assert np.array_equal(decoded(found["image"]), sample_image((12, 12), grey=True)[..., 0])


def test_small_grey_pictures_are_filled_by_the_digit() -> None:
    small = sample_image((8, 8), grey=True)
    assert small.any((0, 2)).sum() > 4  # the digit is not shrunk to 5 pixels


def test_a_run_without_attention_says_so(tmp_path: Path) -> None:
    run = dataclasses.replace(run_of("digits-canvas", None, (12, 12)), removed=True)
    assert probe_maps(run, Results(tmp_path)) == "attention was removed"


def test_the_page_has_the_credit(tmp_path: Path) -> None:
    from regard.lab.report import render

    store = make_store(tmp_path)
    for row, credit in ((0, CREDITS["flower"]), (1, CREDITS["flower"]), (2, None)):
        maps = {"image": "", "grid": [1, 2], "query": [0, 1],
                "layers": [{"layer": "a", "heads": [[0.5, 0.5]], "mean": [0.5, 0.5]}]}  # fmt: skip
        write_record(
            store.folder(key_of(row, 0)) / "probes" / "maps.json", maps | ({} if credit is None else {"credit": credit})
        )
    assert [maps.credit for maps in read_maps(read_study(tmp_path, "pilot", "desk"))] == [CREDITS["flower"]] * 2 + [""]
    assert render(tmp_path, "pilot", "desk").count("flower.jpg by dany13") == 1
