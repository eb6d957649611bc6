"""Mechanisms on the frames of a clip, or the slices of a volume: `Grid.depth`."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import regard.mixers
from regard import ops
from regard.core import ConfigError, Grid, GridError, MixerConfig, RegardError, Site, UnsupportedError
from regard.mixers.factors.factors import Factors
from regard.mixers.factors.forms import frames_basis, sinusoids
from regard.mixers.shared.landmarks import pool_landmarks, pool_matrix
from regard.mixers.shared.tiles import balanced_tiles, fixed_size_tiles, grid_tiles
from regard.mixers.spelling import parse
from regard.mixers.static_keys.grids import former_grid, resample
from regard.mixers.table import MECHANISMS
from regard.testing import check

CLIP, TAGGED = Grid(3, 5, depth=2), Grid(4, 6, 1, 2, depth=2)
TAKEN = tuple(name for name in MECHANISMS if getattr(regard.mixers, name)().depth)
BOXES = (
    "MiTA(m=(2, 1, 2), k=4)", "Agent(m=(1, 2, 2), dwc=3)", 'Nystrom(m=(2, 1, 2), landmarks="avg2d")',
    "MHLA(m=(2, 1, 3))", "MoBA(block=(2, 2, 2), k=2)", "NSA(block=(1, 2, 3), k=2)", "BRA(regions=(1, 2, 2), k=2)",
    "Window(size=(2, 2, 3), shift=(1, 0, 1))", 'Window(size=(2, 2, 3), pattern="grid")', "FLatten(local=3)",
    "Softmax(dwc=3)", 'Factors(terms="0000")', 'Factors(terms="1010", dwc=3)',
    "Factors()", 'Factors(terms="0110")', 'Factors("0001", execution="factorised")',
)  # fmt: skip


def test_at_least_twenty_mechanisms_take_clips() -> None:
    assert len(TAKEN) >= 20


@pytest.mark.parametrize("spelling", BOXES)
def test_the_contract_holds_for_boxes(spelling: str) -> None:
    """On one clip and with defaults it holds for every mechanism of `TAKEN`, see tests/test_contract.py."""
    report = check(parse(spelling), grids=(CLIP, TAGGED), skip={"compile": "in the test below"})
    assert report.grids == (CLIP, TAGGED)


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_the_contract_holds_on_a_longer_clip_and_compiled(name: str) -> None:
    spelling = (getattr(regard.mixers, name).samples or (f"{name}()",))[0]
    assert check(parse(spelling), grids=(Grid(7, 7, 1, depth=4),)).grids


def test_one_frame_is_an_image() -> None:
    assert Grid(3, 5, 1, depth=1) == Grid(3, 5, 1)
    assert repr(Grid(3, 5, 1, depth=1)) == "Grid(height=3, width=5, prefix=1, suffix=0)"
    assert repr(CLIP).endswith("suffix=0, depth=2)")
    assert str(CLIP).startswith("2x3x5 patch")
    assert (CLIP.cells, CLIP.sides, CLIP.every(2), CLIP.frame) == (30, (2, 3, 5), Grid(2, 3, depth=2), Grid(3, 5))
    with pytest.raises(GridError, match="at least 1x1"):
        Grid(3, 5, depth=0)


def test_tokens_are_frames_of_rows() -> None:
    x = torch.randn(2, TAGGED.tokens, 3)
    extra, cells = TAGGED.to_map(x)
    assert cells.shape == (2, 3, 2, 4, 6)
    assert torch.equal(cells[:, :, 1, 2, 3], x[:, 1 + 24 + 2 * 6 + 3])
    assert torch.equal(TAGGED.from_map(extra, cells), x)


def test_a_number_gives_boxes_whose_sides_are_most_alike() -> None:
    assert Grid(14, 14, depth=8).factor(32) == (2, 4, 4)
    assert Grid(14, 14, depth=14).factor(27) == (3, 3, 3)
    assert Grid(14, 14, depth=2).factor(49) == (1, 7, 7)
    with pytest.raises(GridError, match="nearest possible: 10, 12, 15, 16"):
        CLIP.factor(13)


@pytest.mark.parametrize("counts", [(2, 2, 3), (1, 3, 2), (3, 1, 1), (2, 3, 4)])
def test_landmarks_are_means_over_boxes(counts: tuple[int, int, int]) -> None:
    grid = Grid(4, 7, 1, 1, depth=5)
    x = torch.randn(2, 3, grid.tokens, 4, dtype=torch.float64)
    volume = x[:, :, grid.span].mT.unflatten(-1, grid.sides).flatten(0, 1)
    expected = F.adaptive_avg_pool3d(volume, counts).flatten(2).mT.unflatten(0, (2, 3))
    assert torch.allclose(pool_landmarks(x, grid, counts), expected)
    assert torch.allclose(pool_matrix(grid, counts, dtype=x.dtype) @ x, expected)
    keep = torch.ones(2, grid.tokens, dtype=torch.bool)
    assert torch.allclose(pool_landmarks(x, grid, counts, keep=keep), expected, atol=1e-5)
    parts = pool_landmarks(x, grid, counts, policy="partition")
    assert torch.allclose(parts, pool_matrix(grid, counts, policy="partition", dtype=x.dtype) @ x)


@pytest.mark.parametrize("make", [fixed_size_tiles, grid_tiles, balanced_tiles])
@pytest.mark.parametrize("numbers", [(2, 2, 3), (1, 2, 4), (2, 3, 2)])
def test_tiles_are_boxes(make, numbers: tuple[int, int, int]) -> None:
    """Each cell is in one tile; joining undoes cutting; the cells of a tile span a box of its size at most."""
    grid = Grid(4, 6, depth=4)
    tiles = make(grid, numbers)
    x = torch.arange(grid.cells, dtype=torch.float64)[None, None, :, None]
    cut = tiles.cut(x)
    assert torch.equal(tiles.join(cut), x)
    places = torch.cartesian_prod(*map(torch.arange, grid.sides))
    for tile, (cells, real) in enumerate(zip(tiles.tables.cell, tiles.tables.real, strict=True)):
        assert torch.equal(cut[0, 0, tile, real, 0].long(), cells[real])
        assert (tiles.tile_of_cell[cells[real]] == tile).all()
        if tiles.kind != "spread":
            found = places[cells[real]]
            assert all(found.amax(0) - found.amin(0) < torch.tensor(tiles.size))


def test_keys_are_resampled_along_frames_too() -> None:
    keys = torch.randn(2, 4 * 3 * 5, 6, dtype=torch.float64)
    old, new = Grid(3, 5, depth=4), Grid(3, 5, depth=7)
    image = keys.mT.reshape(12, 1, 4, 15)  # frames as rows
    expected = F.interpolate(image, (7, 15), mode="bicubic", antialias=True).reshape(2, 6, -1).mT
    assert torch.allclose(resample(keys, old, new), expected, atol=1e-10)
    assert resample(keys, old, Grid(6, 10, depth=2)).shape == (2, 120, 6)
    assert former_grid(2 * 9, Grid(6, 6, depth=2)) == Grid(3, 3, depth=2)
    assert former_grid(19, Grid(6, 6, depth=2)) is None


@pytest.mark.parametrize("config", [getattr(regard.mixers, name) for name in MECHANISMS if name not in TAKEN])
def test_other_mechanisms_refuse_clips(config: type[MixerConfig]) -> None:
    site = Site(dim=16, heads=2, grid=Grid(4, 4, depth=2))
    mixer = parse((config.samples or (f"{config.__name__}()",))[0])
    with pytest.raises(UnsupportedError, match=f"{config.__name__} takes images, not 2 frames"):
        mixer.build(site)
    layer = mixer.build(dataclasses.replace(site, grid=Grid(4, 4)))
    with pytest.raises(UnsupportedError, match=f"{config.__name__} takes images, not 2 frames"):
        layer(torch.randn(1, 32, 16), Grid(4, 4, depth=2))


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("Agent(m=4, bias=True)", "give bias=False"),
        ("InLine(residual=True)", "residual=False"),
        ('SKA(resize="window")', "another resize="),
        ('MiTA(m=4, k=5, landmarks="conv")', 'choose landmarks="avg2d"'),
        ("MiTA(m=(1, 2), k=5)", r"m is a whole number or \(frames, rows, columns\), not \(1, 2\)"),
        ("BRA(regions=(3, 2, 2), k=2)", r"cannot be divided into 3x2x2 regions; nearest: regions=\(2, 2, 2\)"),
        ("MoBA(block=(2, 2, 2, 2))", "MoBA"),
        ("Window(size=(1, 2, 2, 2))", "size"),
    ],
)
def test_options_of_images_are_refused_on_clips(spelling: str, message: str) -> None:
    with pytest.raises((ConfigError, GridError, UnsupportedError), match=message):
        parse(spelling).build(Site(dim=16, heads=2, grid=Grid(4, 4, depth=2)))


@pytest.mark.parametrize(
    "spelling",
    ["MoBA(block=(1, 2, 2))", "NSA(block=(1, 2, 2))", "BRA(regions=(1, 2, 2), k=1)", "Window(size=(1, 2, 2))"],
)
def test_boxes_are_refused_on_images(spelling: str) -> None:
    with pytest.raises(ConfigError, match=r"\(1, 2, 2\) are 3 numbers for the 2 sides of 4x4 patch"):
        parse(spelling).build(Site(dim=16, heads=2, grid=Grid(4, 4)))


def test_operators_of_images_refuse_clips() -> None:
    x = torch.randn(1, 2, CLIP.tokens, 4)
    with pytest.raises(UnsupportedError, match="axial takes images, not 2 frames"):
        ops.axial(x, x, x, CLIP)
    assert ops.window(x, x, x, CLIP, (2, 3, 5)).allclose(ops.softmax(x, x, x), atol=1e-6)
    with pytest.raises(RegardError, match="4 numbers for the 3 sides"):
        ops.window(x, x, x, CLIP, (1, 2, 3, 4))


@pytest.mark.parametrize("spelling", ["Softmax(dwc=3)", "FLatten(local=3, position=False)"])
def test_convolutions_of_clips_take_one_frame_and_those_of_images_one_alone(spelling: str) -> None:
    """One frame is the clip whose other frames are zeros to the convolution, as its padding is."""
    layer = parse(spelling).build(Site(dim=16, heads=2, grid=CLIP)).double()
    x = torch.randn(16, 15, 16, dtype=torch.float64)  # as many images as channels
    conv = layer.dwc if layer.dwc is not None else layer.local
    flat = parse(spelling).build(Site(dim=16, heads=2, grid=Grid(3, 5))).double()
    state = layer.state_dict()
    flat.load_state_dict({key: value[:, :, 1] if value.ndim == 5 else value for key, value in state.items()})
    assert conv.weight.ndim == 5
    assert torch.allclose(layer(x, Grid(3, 5)), flat(x, Grid(3, 5)))
    with pytest.raises(UnsupportedError, match="built for images takes no frames"):
        flat(torch.randn(2, 30, 16, dtype=torch.float64), CLIP)


@pytest.mark.parametrize("terms", ["1111", "0110", "0001", "0011", "1000"])
@pytest.mark.parametrize("execution", ["auto", "materialised", "flex"])
def test_factors_have_a_third_axis(terms: str, execution: str) -> None:
    """E2 and E4 by the sum of three projected sinusoids, one for each axis, pair by pair."""
    config = Factors(terms=terms, execution=execution)  # type: ignore[arg-type]
    layer = config.build(Site(dim=16, heads=2, grid=TAGGED)).double()
    operator = layer.operator
    q, k, v = torch.randn(3, 1, 2, TAGGED.tokens, 8, dtype=torch.float64)
    places = torch.cartesian_prod(*(torch.arange(side) for side in TAGGED.sides)).double()
    logits = torch.zeros(2, TAGGED.tokens, TAGGED.tokens, dtype=torch.float64)
    if terms[0] == "1":
        logits += (q @ k.mT)[0]
    if terms[2] == "1":
        logits += torch.einsum("hd,hmd->hm", operator.u, k[0])[:, None]
    if config.relative:
        weights = operator.positions_z, operator.positions_y, operator.positions_x
        r = torch.zeros(2, TAGGED.tokens, TAGGED.tokens, 8, dtype=torch.float64)
        for axis, weight in enumerate(weights):
            steps = (places[None, :, axis] - places[:, None, axis]).flatten()  # key - query
            waves = sinusoids(steps, 8, 1000.0)
            cells = (waves @ weight.T).unflatten(-1, (2, 8)).unflatten(0, (TAGGED.cells, -1)).permute(2, 0, 1, 3)
            r[:, TAGGED.span, TAGGED.span] += cells
        if terms[1] == "1":
            logits += torch.einsum("hnd,hnmd->hnm", q[0], r)
        if terms[3] == "1":
            logits += torch.einsum("hd,hnmd->hnm", operator.t, r)
    with torch.no_grad():
        out = operator(q, k, v, grid=TAGGED)
    assert torch.allclose(out, logits.softmax(-1) @ v, atol=1e-12)


def test_factors_that_were_built_for_images_refuse_clips() -> None:
    layer = Factors().build(Site(dim=16, heads=2, grid=Grid(4, 6)))
    with pytest.raises(GridError, match="built for one frame, not for 2x4x6 patch"):
        layer(torch.randn(1, 48, 16), Grid(4, 6, depth=2))
    with pytest.raises(UnsupportedError, match="Factors takes images"):
        Factors(window=3).build(Site(dim=16, heads=2, grid=CLIP))


def test_the_basis_of_frames_spans_their_tables() -> None:
    basis = frames_basis(8, 14, 64, 1000.0)
    assert basis.shape[0] == 112
    assert basis.shape[1] < 24
    assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64), atol=1e-12)
    row, frame = torch.arange(112).remainder(14).double(), torch.arange(112).div(14, rounding_mode="floor").double()
    waves = torch.cat([sinusoids(row - 5, 64, 1000.0), sinusoids(frame - 3, 64, 1000.0)], 1)
    assert torch.allclose(basis @ (basis.T @ waves), waves, atol=1e-5)
