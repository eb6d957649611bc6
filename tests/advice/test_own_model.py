"""`regard.recommend` and `regard.distill` take any network, and a folder or an array of images."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from regard import SKA, ConfigError, DataError, create_model, distill, recommend, save, swap
from regard.images.normalise import Statistics
from regard.swapping.layer import Port

PIXELS = np.random.default_rng(0).integers(0, 255, (24, 20, 20, 3), np.uint8)


def network() -> nn.Module:
    """That no catalogue knows."""
    return nn.Sequential(create_model("vit_desk(size=16, patch=4, dim=16, depth=2, heads=2)", None))


def test_a_network_of_ones_own_is_distilled_and_advised(tmp_path: Path) -> None:
    for number, picture in enumerate(PIXELS):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    model = network().train()
    learned = distill(model, SKA(), tmp_path, size=(16, 16), steps=3, output_steps=2)
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in learned.model.modules())
    errors = [change.divergence.mean for change in learned.changes.values()]
    assert [line.partition(":")[0] for line in str(learned).splitlines()] == [*learned.changes, "divergence"]
    assert errors == sorted(errors, reverse=True)  # a step that leads away is left out
    assert sum(isinstance(layer, Port) for layer in learned.model.modules()) == 2
    assert not any(isinstance(layer, Port) for layer in model.modules())
    result = recommend(model, PIXELS, "macs=0.999x", mixers=[SKA()], minutes=0.01, size=(16, 16))
    assert sum(result.images) == 24
    assert result.best.choice
    saved = tmp_path / "saved"
    learned = distill(model, result.best.choice, PIXELS, size=(16, 16), steps=1, output_steps=0, folder=str(saved))
    other = swap(network().eval(), str(saved / "plan.json"), example=torch.zeros(1, 3, 16, 16))
    other.load_state_dict(load_file(saved / "weights.safetensors"))
    assert torch.equal(other(torch.ones(1, 3, 16, 16)), learned.model(torch.ones(1, 3, 16, 16)))
    with pytest.raises(ConfigError, match=r"regard.distill\(..., folder=FOLDER\)"):
        save(learned.model, tmp_path / "other")


@pytest.mark.parametrize("normal", [None, ([0.3] * 3, [0.4] * 3)])
def test_the_normalisation_is_said(normal: Statistics | None) -> None:
    lines: list[str] = []
    how = {"size": (16, 16), "steps": 0, "output_steps": 0, "normal": normal}
    distill(network(), SKA(), PIXELS, report=lines.append, **how)
    assumed = "mean 0.485, 0.456, 0.406, deviation 0.229, 0.224, 0.225 (assumed, as the model does not say it: "
    text = "mean 0.3, 0.3, 0.3, deviation 0.4, 0.4, 0.4 (normal=(mean, std))" if normal else assumed
    assert sum(text in line for line in lines) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distill(network(), SKA(), PIXELS, **how)
    assert [assumed in str(one.message) for one in caught] == ([] if normal else [True])
    kept = network()
    kept.regard_data = {"normal": [[0.3] * 3, [0.4] * 3]}
    distill(kept, SKA(), PIXELS, report=lines.append, **how | {"normal": None})
    assert "mean 0.3, 0.3, 0.3" in lines[-4]


def test_trials_have_at_most_half_of_the_steps() -> None:
    for steps, expected in ((5, 0), (13, 3)):
        lines: list[str] = []
        distill(network(), SKA(), PIXELS, size=(16, 16), steps=0, output_steps=steps, report=lines.append)
        assert sum(line.startswith("trial of 2 steps") for line in lines) == expected
        assert sum(line.startswith("trial") for line in lines) == expected


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 readable images"):
        distill(network().eval(), SKA(), tmp_path, size=(16, 16))
    with pytest.raises(ConfigError, match="nothing to teach"):
        distill(network().eval(), {}, PIXELS, size=(16, 16))


def test_a_loader_gives_its_images_and_wrong_ones_are_refused() -> None:
    """Normalised by the statistics that are given; batches of several sizes are cut to the model's."""
    images = (torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    model, normal, how = network().eval(), ([0.5] * 3, [0.25] * 3), {"size": (16, 16), "steps": 2, "output_steps": 0}
    loader = DataLoader(TensorDataset(images, torch.zeros(24)), batch_size=8)
    one, other = (distill(model, SKA(), source, normal=normal, **how).changes["swapped"] for source in (loader, PIXELS))
    assert one.distance == pytest.approx(other.distance, rel=1e-4)
    mapped = DataLoader([{"pixel_values": image} for image in images], batch_size=8)
    assert distill(model, SKA(), mapped, normal=normal, **how).judged == one.distance.size
    for wrong, message in (
        (DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4), "no images"),
        (DataLoader(TensorDataset(100 * images), batch_size=8), "not normalised by the mean and deviation"),
        (PIXELS.transpose(0, 3, 1, 2), "pixels .n, h, w, channels. of uint8"),
        (DataLoader(TensorDataset(images[:, :, :8]), batch_size=8), "8x.* pixels, fewer than the 16x16 of the model"),
        (DataLoader(TensorDataset(images[:, :1]), batch_size=8), r"no images \(n, 3, h, w\): it has shape \(8, 1, "),
        (DataLoader(TensorDataset(images * torch.nan), batch_size=8), "not finite"),
        (PIXELS[:, :8, :8], "none smaller than the 16x16 of the model"),
        (PIXELS[:0], "at least one is needed"),
    ):
        with pytest.raises(DataError, match=message):
            distill(model, SKA(), wrong, normal=normal, **how)


@pytest.mark.slow
def test_a_judge_of_ones_own_gives_a_distance_of_each_image() -> None:
    how = {"size": (16, 16), "steps": 2, "output_steps": 2}
    learned = distill(network().eval(), SKA(), PIXELS, judge=lambda old, new: (new - old).square().mean(1), **how)
    assert learned.changes["swapped"].distance.min() > 0
    for given, message in ((torch.zeros(2), "judge gave 2 distances"), ("near", "judge gave 'near'")):
        with pytest.raises(ConfigError, match=message):
            distill(network().eval(), SKA(), PIXELS, judge=lambda old, new, given=given: given, **how)
