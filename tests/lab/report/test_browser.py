"""The page in a real browser: it draws, asks for nothing, and its controls work. Needs Chromium."""

import pytest

from regard.lab.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture
def opened(browser, study, tmp_path):
    """Opens the page at a width; afterwards there must be no error and no request but for the file itself."""
    (path,) = write_report(study(), tmp_path / "pages")
    complaints, requests, pages = [], [], []

    def go(width: int = 1280, scheme: str = "light", script: bool = True):
        context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, java_script_enabled=script
        )
        page = context.new_page()
        pages.append(context)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield go
    for context in pages:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in requests) == len(pages)


def column(page, index: int = 0) -> list[str]:
    return page.locator(f"#results tbody td:nth-child({index + 1})").all_inner_texts()


def test_headings_sort_the_table_both_ways(opened):
    page = opened()
    page.get_by_role("button", name="Mean", exact=True).click()
    assert column(page)[0] == "SKA"
    assert page.locator("#results th").nth(1).get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="Mean", exact=True).click()
    assert column(page)[0] == "w/o"
    page.get_by_role("button", name="Row", exact=True).first.click()
    assert column(page) == sorted(column(page), key=str.lower)


def test_cells_without_a_value_stay_last(opened):
    page = opened()
    heading = page.locator("#results th button", has_text="Paper").first
    for _ in range(2):
        heading.click()
        assert column(page)[0] == "softmax"


def test_axes_can_be_chosen(opened):
    page = opened()
    before = page.locator("#tradeoff").inner_html()
    page.select_option("#x-axis", "macs")
    assert "MACs per sample (lower is better)" in page.locator("#tradeoff").inner_text()
    page.select_option("#y-axis", "loss")
    assert "test loss" in page.locator("#tradeoff").inner_text()
    assert page.locator("#tradeoff").inner_html() != before


def test_the_theme_follows_the_system_and_the_button(opened):
    page = opened(scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    light = page.evaluate(ground)
    assert (dark, light) == ("rgb(20, 23, 26)", "rgb(255, 255, 255)")


def test_the_pointer_reads_values(opened):
    page = opened()
    plot = page.locator(".curves .plot.wide").first
    plot.scroll_into_view_if_needed()
    plot.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "epoch" in tip.inner_text()
    assert "softmax" in tip.inner_text()
    page.locator('#tradeoff g[data-row="1"] path').hover()
    assert "SKA" in tip.inner_text()
    assert "training samples per second" in tip.inner_text()


def test_a_name_hides_its_row_everywhere(opened):
    page = opened()
    assert page.locator('#tradeoff g[data-row="1"]').count() == 1
    page.locator('.chip[data-row="1"]').click()
    assert page.locator('#tradeoff g[data-row="1"]').count() == 0
    assert not page.locator('.curves .wide .line[data-row="1"]').first.is_visible()


def test_layers_and_heads_can_be_chosen(opened):
    page = opened()
    image = page.locator(".map img").first
    mean = image.get_attribute("src")
    page.select_option("#map-head", "1")
    first = image.get_attribute("src")
    page.select_option("#map-head", "2")
    assert len({mean, first, image.get_attribute("src")}) == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_does_not_scroll_sideways(opened, scheme):
    page = opened(390, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for details in page.locator("details").all():
        details.evaluate("node => { node.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".curves .plot.narrow").first.is_visible()


def test_without_scripts_the_figures_are_there(opened):
    page = opened(script=False)
    assert page.locator("#tradeoff svg").is_visible()
    assert page.locator(".curves svg").first.is_visible()
    assert not page.locator("#x-axis").is_visible()
