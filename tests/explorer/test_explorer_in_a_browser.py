"""The explorer in a real browser: pointing shows the weights that `capture` gives. Needs Chromium."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import capture, create_model, swap
from regard.explorer.explore import explore
from regard.swapping.capture import with_regard_softmax
from small_hosts import draw_large_weights

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def check_views(page: Any) -> None:
    """The keys of each query's expert, in both directions, and who shares it."""

    def rows(name: str, reverse: str = "false") -> torch.Tensor:
        page.locator("#view").select_option(name)
        every = "[...Array(layerOf(0).tokens).keys()]"
        return torch.tensor(page.evaluate(f"{every}.map((q) => [...shown(layerOf(0), 1, q, {reverse})])"))

    keys = rows("keys of its expert")
    assert (keys.sum(1) == 4).all()
    assert torch.equal(rows("keys of its expert", "true"), keys.mT)
    assert torch.equal(rows("queries of its expert").bool(), (keys[:, None] == keys[None]).all(-1))
    assert not (rows("keys that no expert has") * keys).any()
    assert "keys that no expert has" in page.locator("#readout").inner_text()


@pytest.mark.parametrize("mixer", ["", "MiTA(m=4, k=4)", "Agent(m=4)", "TopK(k=4)", "SKA()"])
def test_pointing_shows_the_weights(browser, tmp_path: Path, mixer: str) -> None:
    torch.manual_seed(0)
    model = create_model("vit_desk(size=32, patch=4, dim=16, depth=2, heads=2)").eval()
    draw_large_weights(swap(model, mixer) if mixer else model)
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    path = explore(model, pixels, "Linear()" if not mixer else None, normal=([0.5] * 3, [0.5] * 3)).save(
        tmp_path / "e.html"
    )
    image = (torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5
    reader = model if mixer else with_regard_softmax(model, image)
    with capture(reader) as maps, torch.no_grad():
        reader(image)
    complaints, requests = [], []
    page = browser.new_page(viewport={"width": 420, "height": 850})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    box = page.locator("#models .map").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * (5.5 / 8), box["y"] + box["height"] * (2.5 / 8))  # row 2, column 5
    name, (_, heads, tokens, _) = list(maps)[1], maps["blocks.1.attn"].shape
    prefix = tokens - 64
    page.keyboard.press("1")
    page.keyboard.press("+")
    page.keyboard.press("-")
    assert page.evaluate("[at.layer, at.head]") == [1, 1]
    for reverse in (False, True):
        query = page.evaluate("queryOf(layerOf(0))")
        assert query == prefix + 2 * 8 + 5
        found = torch.tensor(page.evaluate(f"[...weights(layerOf(0), 1, {query}, {str(reverse).lower()})]"))
        whole = maps[name][0, 1]
        expected = whole[:, query] if reverse else whole[query]
        half = 0.5 / 127 * (whole.abs().amax(-1) if reverse else expected.abs().max())
        assert ((found - expected).abs() <= half + 1e-6).all()
    assert "row 2, column 5" in page.locator("#readout").inner_text()
    page.keyboard.press("ArrowDown")
    assert "row 3, column 5" in page.locator("#readout").inner_text()
    page.keyboard.press("a")
    assert page.locator("#models figure").first.locator(".heads button").count() == heads
    page.locator("#plots circle").first.dispatch_event("click")
    assert page.evaluate("at.layer") == 0
    if not mixer:
        assert "Change of the output" in page.locator("#readout").inner_text()
        assert page.locator("#models figure").count() == 3
    if mixer.startswith("MiTA"):
        check_views(page)
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    page.close()


def test_one_frame_of_a_clip_is_shown_and_pointed_at(browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create_model("vit_desk_video(frames=4, dim=16, depth=1, heads=2, in_chans=1)").eval()
    pixels = np.random.default_rng(0).integers(0, 255, (28, 28, 4), np.uint8)
    path = explore(model, pixels, normal=([0.5] * 4, [0.5] * 4)).save(tmp_path / "e.html")
    page = browser.new_page(viewport={"width": 420, "height": 850})
    page.goto(path.as_uri())
    shape = "(({width, height}) => width / height)(document.querySelector('#models .map').getBoundingClientRect())"
    assert page.evaluate(shape) == pytest.approx(4, rel=0.01)
    for _ in range(2):
        page.keyboard.press("f")
    assert page.locator("#frame-name").inner_text() == "1"
    assert page.evaluate(shape) == pytest.approx(1, rel=0.01)
    box = page.locator("#models .map").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * (3.5 / 4), box["y"] + box["height"] * (2.5 / 4))
    assert "frame 1, row 2, column 3" in page.locator("#readout").inner_text()
    page.keyboard.press("ArrowRight")
    assert "frame 2, row 2, column 0" in page.locator("#readout").inner_text()
    assert page.locator("#frame-name").inner_text() == "2"
    page.close()
