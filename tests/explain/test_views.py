"""Which views a model has, and that what is drawn lies where it should."""

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from regard.core import ConfigError, Grid, UnsupportedError
from regard.explain import pictures, views
from regard.explain.factor_terms import TermMaps
from regard.explain.sampling_points import DynamicKernels, SamplingPoints
from regard.mixers.convolutions.deformable import DeformableConv
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from regard.models.create import create_model
from regard.swapping.swap import remove

VIT = "vit_desk(size=(12, 20), patch=4, dim=16, depth=2, heads=2)"
RESNET = "attended_resnet18(channels=(8, 8, 16, 16), stem=1, img_size=(12, 20), stages=(2, 3), heads=2{})"
PICTURE = np.random.default_rng(0).integers(0, 255, (12, 20, 3), np.uint8)
MODELS = {
    "own attention": (VIT, None, ("maps",)),
    "softmax": (VIT, Softmax(), ("maps",)),
    "channels": (VIT, XCA(), ()),
    "factors": (VIT, Factors(terms="0110"), ("maps", "terms")),
    "deformable": (VIT, DeformableConv(version=2, groups=2), ("offsets",)),
    "dynamic": (VIT, DynamicConv(kernel=5, groups=4), ("kernels",)),
    "plain resnet": (RESNET.format(""), None, ()),
    "resnet": (RESNET.format(""), Factors(terms="0010"), ("maps", "terms")),
    "deformable resnet": (RESNET.format(", deformable=True"), Factors(terms="0010"), ("maps", "terms", "offsets")),
}


def model(name: str) -> nn.Module:
    host, mixer, _ = MODELS[name]
    torch.manual_seed(0)
    return create_model(host, None).eval() if mixer is None else create_model(host, mixer).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_views_of_its_layers(name: str) -> None:
    assert views.available_views(model(name)) == MODELS[name][2]


def test_a_view_is_chosen_or_refused() -> None:
    assert views.select_view(model("factors")) == "maps"
    assert views.select_view(model("factors"), "terms") == "terms"
    assert views.select_view(model("deformable")) == "offsets"
    with pytest.raises(UnsupportedError, match="has no offsets to show; it has maps, terms"):
        views.select_view(model("factors"), "offsets")
    with pytest.raises(UnsupportedError, match="nothing to show"):
        views.select_view(remove(model("softmax")))
    with pytest.raises(ConfigError, match="did you mean kernels"):
        views.select_view(model("dynamic"), "kernel")


def size(data: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(data)).size


@pytest.mark.parametrize(
    ("name", "view", "layers"),
    [
        ("factors", "maps", ["blocks.1.attn"]),
        ("factors", "terms", ["blocks.1.attn"]),
        ("deformable", "offsets", ["blocks.1.attn"]),
        ("dynamic", "kernels", ["blocks.1.attn"]),
        ("deformable resnet", "offsets", ["layer3.1.conv1"]),
    ],
)
def test_views_are_drawn_and_warn_where_nothing_was_trained(name: str, view: str, layers: list[str]) -> None:
    x, points = torch.randn(3, 12, 20), {}
    for trained in (True, False):
        data, shown = views.draw_view(view, model(name), x, PICTURE, "t", trained=trained, last=True)
        assert shown == layers
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
        points[trained] = int(((pixels[..., 0] > 150) & (pixels[..., 1] < 80) & (pixels[..., 2] < 80)).sum())
    assert points[False] > points[True] + 200


def test_a_part_is_one_head_or_group() -> None:
    x = torch.randn(3, 12, 20)

    def drawn(name: str, view: str, part: str) -> tuple[int, int]:
        return size(views.draw_view(view, model(name), x, PICTURE, "t", trained=True, last=True, part=part)[0])

    assert drawn("factors", "terms", "all")[1] > 2 * drawn("factors", "terms", "1")[1]
    assert drawn("deformable", "offsets", "")[0] > drawn("deformable", "offsets", "0")[0]
    for name, view in (("factors", "terms"), ("dynamic", "kernels"), ("deformable", "offsets")):
        with pytest.raises(ConfigError, match="give all, mean or 0"):
            drawn(name, view, "4")


def test_a_grey_picture_is_drawn_too() -> None:
    host = "vit_desk(size=12, patch=4, dim=16, depth=1, heads=2, in_chans=1)"
    network = create_model(host, Factors(terms="0011")).eval()
    grey = PICTURE[:, :12, :1]
    assert views.draw_view("terms", network, torch.randn(1, 12, 12), grey, "t", trained=True)[1] == ["blocks.0.attn"]


# places


def moves(factors: torch.Tensor | None = None, field: float = 0.0) -> SamplingPoints:
    """On a 3 x 5 grid over 12 x 20 pixels: a cell has 4 x 4."""
    regular = torch.tensor([[1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    points = (regular + torch.tensor([1.0, -2.0]))[None]
    vectors = torch.zeros(3, 5, 2, dtype=torch.float64)
    vectors[1, 3, 0] = field  # down, at the cell of the second row and fourth column
    return SamplingPoints(
        layer="a", grid=Grid(3, 5), source=Grid(3, 5), cell=(1, 2), regular=regular, points=points, factors=factors,
        field=vectors, lengths=vectors.norm(dim=-1),
    )  # fmt: skip


def test_taps_and_samples_lie_at_the_centres_of_cells() -> None:
    axes = Figure().add_subplot()
    values = torch.cat([moves().points[0], torch.tensor([[1.0], [0.0]], dtype=torch.float64)], 1)
    views.paint_points(axes, PICTURE, moves(), values)
    quiver, regular, points = axes.collections
    assert np.asarray(regular.get_offsets()).tolist() == [[10, 6], [14, 6]]
    assert np.asarray(points.get_offsets()).tolist() == [[2, 10], [6, 10]]
    assert (list(quiver.U), list(quiver.V)) == ([-8, -8], [4, 4])  # type: ignore[attr-defined]
    opacity = points.get_alpha()
    assert opacity[0] == 1  # type: ignore[index]
    assert 0 < opacity[1] < 0.2  # type: ignore[index, operator]
    xs, ys = axes.lines[0].get_data()
    assert (min(xs), max(xs), min(ys), max(ys)) == (8, 12, 4, 8)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_the_field_points_down_where_rows_grow() -> None:
    axes = Figure().add_subplot()
    points = moves(field=0.1)
    views.paint_field(axes, PICTURE, points)
    (quiver,) = axes.collections
    arrows = np.stack([quiver.X, quiver.Y, quiver.U, quiver.V], -1)  # type: ignore[attr-defined]
    (moved,) = arrows[np.abs(arrows[:, 2:]).sum(-1) > 0]
    assert views.arrow_scale(points) == 8
    assert moved.tolist() == pytest.approx([14, 6, 0, 8 * 0.1 * 4])
    assert axes.get_ylim() == (12, 0)


@pytest.mark.parametrize(("longest", "factor"), [(0.0, 1), (0.6, 1), (3.0, 1), (0.3, 2), (0.01, 64)])
def test_short_movements_are_magnified_by_a_power_of_two(longest: float, factor: int) -> None:
    assert views.arrow_scale(moves(field=longest)) == factor


def test_a_kernel_is_drawn_with_all_its_taps_around_the_cell() -> None:
    axes = Figure().add_subplot()
    kernel = np.zeros((3, 5))
    kernel[2, 0] = 1
    points = DynamicKernels(layer="a", grid=Grid(3, 5), cell=(0, 1), kernels=torch.tensor(kernel)[None])
    views.paint_kernel(axes, PICTURE, points, kernel)
    shown = axes.images[1]
    assert tuple(shown.get_extent()) == (-4, 16, 8, -4)
    assert np.argwhere(np.asarray(shown.get_array())[..., 3] > 0.5).tolist() == [[2, 0]]
    assert (axes.get_xlim(), axes.get_ylim()) == ((-4, 16), (8, -4))


def test_terms_say_how_many_cells_they_cover() -> None:
    logits = {"E3": torch.zeros(2, 15, dtype=torch.float64)}
    points = TermMaps(
        layer="a", grid=Grid(3, 5), keys=Grid(3, 5), cell=(1, 2), logits=logits,
        bias=torch.zeros(1, 15, dtype=torch.float64),
    )  # fmt: skip
    ((name, panels),) = views.term_rows(points, PICTURE)
    assert name == "a\ncell 1,2, mean of 2 heads"
    assert [title for title, _ in panels] == [
        "E3: covers 15 of 15\nkey content",
        "all: covers 15 of 15\nas the layer attends",
    ]
    assert [name for name, _ in views.term_rows(points, PICTURE, "all")] == [
        f"a\ncell 1,2, {part}" for part in ("mean of 2 heads", "head 0", "head 1")
    ]


def test_keys_on_a_coarser_grid_fill_the_picture_and_the_frame_is_of_the_query() -> None:
    axes = Figure().add_subplot()
    pictures.overlay(axes, PICTURE, np.ones((1, 2)), (2, 4), (3, 5))
    assert tuple(axes.images[1].get_extent()) == (0, 20, 12, 0)
    xs, ys = axes.lines[0].get_data()
    assert (min(xs), max(xs), min(ys), max(ys)) == (16, 20, 8, 12)
