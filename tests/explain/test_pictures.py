import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli.app import run
from regard.core import ConfigError, Grid, GridError, UnsupportedError
from regard.explain import pictures
from regard.explain.views import draw_view
from regard.mixers.softmax import Softmax
from regard.models.create import create_model
from regard.swapping.capture import capture
from regard.swapping.layer import Port
from regard.swapping.swap import remove, swap

HOST = "vit_desk(size=(12, 20), patch=4, dim=32, depth=2, heads=2)"  # 3 rows, 5 columns


def model(swapped: bool = True):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return create_model(HOST, Softmax() if swapped else None).eval()


def image() -> torch.Tensor:
    return torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(1))


def test_maps_are_the_rows_of_the_softmax_for_the_query():
    network, x = model(False), image()
    grey = np.full((12, 20, 1), 90, np.uint8)
    maps = pictures.attention_maps(network, x, (2, 1), picture=grey)
    assert base64.b64decode(maps["image"]) == pictures.png(grey)
    attention = network.blocks[0].attn
    tokens = network._pos_embed(network.patch_embed(x[None]))
    q, k, _ = attention.qkv(network.blocks[0].norm1(tokens)).reshape(1, 15, 3, 2, 16).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 4).softmax(-1)[0, :, 2 * 5 + 1]
    assert maps["grid"] == [3, 5]
    assert maps["query"] == [2, 1]
    assert np.allclose(maps["layers"][0]["heads"], weights.detach().numpy(), atol=1e-5)
    assert np.allclose(maps["layers"][0]["mean"], weights.mean(0).detach().numpy(), atol=1e-5)


def test_a_hosts_own_attention_gives_the_maps_of_our_softmax_and_is_left_alone():
    network = model(False)
    before = [type(module) for module in network.modules()]
    maps = pictures.attention_maps(network, image())["layers"]
    assert [type(module) for module in network.modules()] == before
    assert len(maps) == 2
    twin = swap(network, Softmax())
    assert pictures.attention_maps(twin, image())["layers"] == maps


@pytest.mark.parametrize("host", ["regard_vit5_small(img_size=(32, 48), embed_dim=48, depth=2, num_heads=3)",
                                  "cait_s_32(img_size=(8, 12), keep_talking=False)",
                                  "vit_tiny_patch16_224(img_size=(32, 48), depth=2)"])  # fmt: skip
def test_a_cell_lies_at_its_place_before_and_behind_other_tokens(host):
    """Of two images that differ in one cell, the weights of the first layer differ, up to a factor, there alone."""
    network = create_model(host, Softmax()).eval()
    image = torch.randn(3, *network.patch_embed.img_size, generator=torch.Generator().manual_seed(2))
    other, side = image.clone(), image.shape[-1] // 3
    other[:, side : 2 * side, 2 * side :] *= 8.0  # row 1, column 2
    first, second = (pictures.attention_maps(network, each, (0, 0)) for each in (image, other))
    assert first["grid"] == [2, 3]
    assert len(first["layers"]) == sum(isinstance(module, Port) for module in network.modules())
    change = np.log(np.divide(second["layers"][0]["heads"], first["layers"][0]["heads"]))
    change = np.abs(change - np.median(change, -1, keepdims=True)).max(0)
    assert change.argmax() == 5
    assert change[:5].max() < 0.01


def test_a_landscape_in_a_model_of_portraits_has_the_grid_of_the_landscape():
    network = create_model("vit_tiny_patch16_224(img_size=(48, 32), depth=1, dynamic_img_size=True)", None).eval()
    maps = pictures.attention_maps(network, torch.randn(3, 32, 48), (1, 2))
    assert maps["grid"] == [2, 3]
    assert np.shape(maps["layers"][0]["mean"]) == (6,)
    assert 0 < sum(maps["layers"][0]["mean"]) < 1  # the class token, which has the rest, is no part of the map


def test_a_model_without_attention_has_no_maps():
    maps = pictures.attention_maps(remove(model(False)), image())
    assert maps["layers"] == []
    with pytest.raises(UnsupportedError, match="no layer"):
        pictures.draw(maps, "", trained=True)


def test_training_mode_is_put_back():
    network = model().train()
    pictures.attention_maps(network, image())
    assert network.training


def test_a_query_outside_the_grid_is_refused():
    with pytest.raises(GridError, match="columns 0 to 4"):
        pictures.attention_maps(model(), image(), (0, 5))


def test_samples_are_real_pictures_of_the_asked_size():
    photo = pictures.sample_image((30, 50))
    assert photo.shape == (30, 50, 3)
    assert photo.std() > 30
    assert pictures.sample_image(12, grey=True).shape == (12, 12, 1)
    with pytest.raises(ConfigError, match="flower"):
        pictures.sample_image(8, name="flwer")


def test_the_frame_and_the_brightest_cell_lie_where_they_should():
    weights = np.zeros((3, 5))
    weights[2, 4] = 1.0
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    pictures.overlay(axes, np.full((12, 20, 3), 100, np.uint8), weights, (1, 3))
    overlay = axes.images[1]
    assert np.argwhere(np.asarray(overlay.get_array())[..., 3] > 0.5).tolist() == [[2, 4]]
    assert overlay.get_extent() == [0, 20, 12, 0] or tuple(overlay.get_extent()) == (0, 20, 12, 0)
    xs, ys = axes.lines[0].get_data()
    assert (min(xs), max(xs), min(ys), max(ys)) == (12, 16, 4, 8)


def red(data: bytes) -> int:
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    return int(((pixels[..., 0] > 150) & (pixels[..., 1] < 80) & (pixels[..., 2] < 80)).sum())


def test_one_head_can_be_drawn_and_an_unknown_one_is_refused():
    maps = pictures.attention_maps(model(), image())
    widths = [Image.open(io.BytesIO(pictures.draw(maps, "", trained=True, head=head))).width for head in ("all", "1")]
    assert widths[0] > widths[1]
    with pytest.raises(ConfigError, match="mean or 0 to 1"):
        pictures.draw(maps, "", trained=True, head="2")


def test_a_foreign_grid_leaves_layers_out():
    assert pictures.attention_maps(model(), image(), grid=Grid(2, 2))["layers"] == []


def test_the_verb_writes_a_picture(tmp_path, capsys):
    out = tmp_path / "m.png"
    assert run(["maps", HOST, "china", "--mixer", "Softmax()", "--query", "1,2", "--out", str(out)]) == 0
    assert "untrained weights" in capsys.readouterr().err
    assert red(out.read_bytes()) > 200


def test_attention_of_the_hosts_own_that_is_not_softmax_is_refused() -> None:
    network = create_model("vit_s_32_spt", None)
    with pytest.raises(UnsupportedError, match="attention of its own"):
        pictures.attention_maps(network, torch.randn(3, 32, 32))


def test_frames_of_a_clip_lie_side_by_side():
    network = create_model(
        "vit_desk_video(size=(14, 21), frames=4, tube=2, patch=7, dim=16, depth=2)", Softmax()
    ).eval()
    clip = torch.randn(3, 4, 14, 21)
    pixels = np.arange(12, dtype=np.uint8) * np.ones((14, 21, 1), np.uint8)  # channel c of frame t is 3 t + c
    maps = pictures.attention_maps(network, clip, (1, 5), picture=pixels)  # of the second pair of frames, column 2
    assert maps["grid"] == [2, 6]
    with torch.no_grad(), capture(network, "blocks.0.attn") as found:
        network(clip[None])
    row = found["blocks.0.attn"][0, :, 6 + 3 + 2].reshape(2, 2, 2, 3)  # heads, frames, rows, columns
    assert np.allclose(np.reshape(maps["layers"][0]["heads"], (2, 2, 6))[:, :, :3], row[:, 0], atol=1e-5)
    assert np.allclose(np.reshape(maps["layers"][0]["heads"], (2, 2, 6))[:, :, 3:], row[:, 1], atol=1e-5)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(maps["image"]))))
    assert shown.shape == (14, 42, 3)
    assert shown[0, 0].tolist() == [3, 4, 5]  # frame 1 stands for 0 and 1
    assert shown[0, 41].tolist() == [9, 10, 11]
    drawn, layers = draw_view("maps", network, clip, pixels, "a clip", trained=True)
    assert Image.open(io.BytesIO(drawn)).width > 300
    assert len(layers) == 2
