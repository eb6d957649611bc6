"""What the explorer's page has are the weights that `capture` gives, within half a step."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import create_model
from regard.core import Grid, UnsupportedError
from regard.explain.rollout import rollout
from regard.explorer import weights as explorer_weights
from regard.explorer.weights import Weights, encode, read_weights
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from regard.swapping.capture import capture, with_regard_softmax
from regard.swapping.swap import swap
from small_hosts import draw_large_weights, swin, vit, xcit

MOST = 10**8


def decoded(weights: Weights) -> Tensor:
    zero, levels = (128, 127) if weights.signed else (0, 255)
    return torch.from_numpy((weights.codes.astype(np.float32) - zero) * weights.scales[..., None] / levels)


def test_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = vit()
    monkeypatch.setattr(explorer_weights, "MOST_TOKENS", 3)
    for network in (model.eval(), swap(copy.deepcopy(model).eval(), "MiTA(m=4, k=3)")):
        with pytest.raises(UnsupportedError, match="blocks.0.attn has .* tokens, of which a page shows 3 at most"):
            read_weights(network, x[0], "*", 10**6)


@pytest.mark.parametrize("mixer", ["", "MiTA(m=4, k=3)", "Agent(m=4)", "TopK(k=3)", "SKA()"])
def test_weights_are_those_of_capture(mixer: str) -> None:
    model, x = vit()
    draw_large_weights(swap(model.eval(), mixer) if mixer else model.eval())
    reading = read_weights(model, x[0], "*", MOST)
    reader = model if mixer else with_regard_softmax(model, x[:1])
    with capture(reader) as maps, torch.no_grad():
        reader(x[:1])
    assert [weights.name for weights in reading.layers] == [*maps, "rollout over all layers"]
    for weights in reading.layers[:-1]:
        expected = maps[weights.name][0]
        half = expected.abs().amax(-1, keepdim=True) * (0.5 / weights.levels) + 1e-7
        assert ((decoded(weights) - expected).abs() <= half).all()
    total = rollout(reader, x[:1])
    torch.testing.assert_close(decoded(reading.layers[-1]), total, rtol=0, atol=0.5 / 255)


def test_cells_are_joined_where_weights_are_too_many() -> None:
    """A class token, 5 x 4 cells of which 2 x 2 are one: keys are added, queries averaged."""
    weights = torch.rand(2, 21, 21)
    found = encode("a", weights, Grid(5, 4, prefix=1), 2)
    assert found.codes.shape == (2, 7, 7)
    blocks = [
        [0],
        *([1 + y * 4 + x for y in ys for x in xs] for ys in ((0, 1), (2, 3), (4,)) for xs in ((0, 1), (2, 3))),
    ]
    expected = torch.stack([
        torch.stack([weights[:, queries][:, :, keys].sum(-1).mean(-1) for keys in blocks], -1) for queries in blocks
    ], 1)  # fmt: skip
    assert ((decoded(found) - expected).abs() <= expected.amax(-1, keepdim=True) * 0.51 / 255).all()
    model, x = vit()
    tokens = read_weights(model.eval(), x[0], "*", MOST).layers[0].codes.shape[-1]
    few = read_weights(model, x[0], "*", 2000)
    assert few.layers[0].stride > 1
    assert sum(each.codes.size for each in few.layers[:-1]) <= 2000 < 2 * 2 * tokens**2


def test_statistics_by_hand() -> None:
    """Two cells in a row behind a class token: one looks at itself, one at the class token and the other cell."""
    rows = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]])
    found = encode("a", rows, Grid(1, 2, prefix=1), 1)
    assert found.entropy[0] == pytest.approx(np.log(2) / 2)
    assert found.distance[0] == pytest.approx(0.5)
    assert found.extra[0] == pytest.approx(0.25)


def test_windows_lie_where_the_host_cuts_them() -> None:
    """The tokens of a window are those that its output depends on, also behind a shift."""
    model, x = swin()
    draw_large_weights(swap(model.eval(), Softmax()))
    reading = read_weights(model, x[0], "*", MOST)
    blocks = {name: block for name, block in model.named_modules() if name.endswith(("blocks.0", "blocks.1"))}
    for weights in reading.layers:
        block = blocks[weights.name.removesuffix(".attn")]
        height, width = weights.grid.height, weights.grid.width
        assert weights.places is not None
        assert sorted(weights.places.flatten().tolist()) == list(range(height * width))
        inputs = torch.randn(1, height, width, block.dim, requires_grad=True)
        cell = int(weights.places[0, 0])
        block._attn(inputs)[0].flatten(0, 1)[cell].sum().backward()
        reached = inputs.grad[0].abs().sum(-1).flatten() > 1e-12
        looks = decoded(weights)[:, 0].amax(0) > 0  # of the first token of the first window
        assert set(np.flatnonzero(reached)) <= set(weights.places[0].tolist())
        assert set(weights.places[0][looks.numpy()].tolist()) <= set(np.flatnonzero(reached).tolist())


def test_layers_without_weights_between_the_pictures_tokens_are_named() -> None:
    model, x = xcit()
    with pytest.raises(UnsupportedError, match="no weights between tokens"):
        read_weights(swap(model.eval(), XCA()), x[0], "*", MOST)


@pytest.mark.parametrize("mixer", ["", "MiTA(m=(2, 2, 3), k=3)", "TopK(k=3)"])
def test_frames_of_a_clip_lie_side_by_side(mixer: str) -> None:
    host = "vit_desk_video(size=(14, 21), frames=4, tube=2, patch=7, dim=16, depth=2)"
    model, clip = create_model(host).eval(), torch.randn(1, 3, 4, 14, 21)
    draw_large_weights(swap(model, mixer, example=clip) if mixer else model)
    reading = read_weights(model, clip[0], "*", MOST)
    reader = model if mixer else with_regard_softmax(model, clip)
    with capture(reader) as maps, torch.no_grad():
        reader(clip)
    places = [(frame, y, x) for y in range(2) for frame in range(2) for x in range(3)]
    order = [6 * frame + 3 * y + x for frame, y, x in places]
    for weights in reading.layers[:-1]:
        expected = maps[weights.name][0][:, order][:, :, order]
        half = expected.abs().amax(-1, keepdim=True) * (0.5 / weights.levels) + 1e-7
        assert ((decoded(weights) - expected).abs() <= half).all()
        assert weights.grid == Grid(2, 6)
        apart = torch.tensor([[np.hypot(a[1] - b[1], a[2] - b[2]) for b in places] for a in places])
        shares = expected.abs() / expected.abs().sum(-1, keepdim=True)
        assert weights.distance == pytest.approx((shares * apart).sum(-1).mean(-1).numpy(), abs=1e-4)
    total = rollout(reader, clip)[:, order][:, :, order]
    torch.testing.assert_close(decoded(reading.layers[-1]), total, rtol=0, atol=0.5 / 255)
    for view in reading.layers[0].views:
        own = view.row_of
        assert own is None or own.shape[-1] == 12
    joined = read_weights(model, clip[0], "*", 500)
    assert joined.layers[0].stride == 3  # 2 would join cells of two frames
