"""The report in a real browser (Debian's Chromium): light and dark, wide and on a phone, its charts pointed at."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from helpers_export import make_run
from test_report_page import fill

from eyas.report.compare import write_comparison
from eyas.report.page import write_report
from eyas.run import Run, open_run

SCREENSHOT = Path(__file__).parent.parent.parent / "docs/images/report.png"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "Debian's package chromium is missing: `make test-browser` installs it"
    with sync_playwright() as playwright:
        # A sandbox of its own needs user namespaces, which root in a container doesn't have.
        started = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = make_run(tmp_path_factory.mktemp("browser"), tiny_target)
    fill(made, tiny_target)
    return made


def open_page(browser: Any, path: Path, width: int, scheme: str) -> Any:
    """The page in a window of its own; any request for something else, or an error in it, fails the test."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: pytest.fail(f"script: {error}"))
    page.on("console", lambda message: message.type == "error" and pytest.fail(f"console: {message.text}"))
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_runs_over_the_edge_and_text_can_be_read(browser: Any, run: Run, width: int, scheme: str) -> None:
    page = open_page(browser, write_report(run), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Boxes scroll inside themselves; everything else lies within the window.
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main > *, .tile, figure, svg")]
            .filter((element) => element.getBoundingClientRect().right > innerWidth + 1).length"""
    )
    assert outside == 0
    for selector in ("h1", "td", ".soft", "svg .tick", "svg .label", "figcaption"):
        assert contrast(page, selector) >= 4.5, (selector, contrast(page, selector))


def contrast(page: Any, selector: str) -> float:
    """Contrast of an element's text with what lies behind it (WCAG 2.2, 1.4.3)."""
    return float(
        page.evaluate(
            """(selector) => {
              const element = document.querySelector(selector);
              const style = getComputedStyle(element);
              const ink = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
              let behind = element;
              const clear = (each) => getComputedStyle(each).backgroundColor === "rgba(0, 0, 0, 0)";
              while (behind && clear(behind)) behind = behind.parentElement;
              const light = (color) => {
                const [r, g, b] = color.match(/[0-9.]+/g).map(Number).map((value) => value / 255)
                  .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const values = [light(ink), light(getComputedStyle(behind || document.body).backgroundColor)];
              return (Math.max(...values) + 0.05) / (Math.min(...values) + 0.05);
            }""",
            selector,
        )
    )


def test_what_is_pointed_at_says_what_it_is(browser: Any, run: Run) -> None:
    page = open_page(browser, write_report(run), 1200, "light")
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator("svg rect.bar[data-tip*='position 1']").first.hover()
    assert tip.is_visible() and tip.inner_text() == "replay, position 1: 42.0%"
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 1200
    page.locator("h1").hover()
    assert not tip.is_visible()


def test_a_tap_on_a_phone_does_the_same(browser: Any, run: Run) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(write_report(run).as_uri())
    bar = page.locator("svg rect.bar[data-tip*='digits']").first
    bar.scroll_into_view_if_needed()
    bar.tap()
    assert page.locator("#tip").inner_text() == "digits: 100 accepted"
    context.close()


def test_without_scripts_the_marks_keep_their_titles(browser: Any, run: Run) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(write_report(run).as_uri())
    assert page.locator("svg title").count() > 50
    context.close()


def test_the_comparison_opens_too(browser: Any, run: Run, tiny_target: Path) -> None:
    other = open_run(run.dir.parent.parent / "tiny.toml", ["name=other", "train.lr=5e-4"])
    fill(other, tiny_target)
    page = open_page(browser, write_comparison(run, other), 390, "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "train.lr" in page.inner_text("main")


def test_a_screenshot_for_the_docs(browser: Any, run: Run, tmp_path: Path) -> None:
    """docs/images/report.png is what this test sees: of EYAS_REPORT (a report of a real run) where that is given."""
    report = Path(os.environ["EYAS_REPORT"]) if "EYAS_REPORT" in os.environ else write_report(run)
    page = open_page(browser, report, 1200, "light")
    shot = SCREENSHOT if "EYAS_REPORT" in os.environ else tmp_path / "report.png"
    page.screenshot(path=shot, clip={"x": 0, "y": 0, "width": 1200, "height": 1000}, full_page=True)
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and shot.stat().st_size > 20_000
