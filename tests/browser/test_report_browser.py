"""The report in a real browser (Debian's Chromium): light and dark, wide and on a phone, its charts pointed at."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from helpers_export import make_run
from helpers_served import measure, trained_run, tuned, write_curve
from test_report_page import fill

from eyas.report.compare import write_comparison
from eyas.report.page import write_report
from eyas.run import Run, open_run

SCREENSHOT = Path(__file__).parent.parent.parent / "docs/images/report.png"


@pytest.fixture(scope="module")
def browser(served: Run) -> Iterator[Any]:
    """Started after the measurement: playwright's event loop would be in the way of its own."""
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


@pytest.fixture(scope="module")
def served(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One that was measured in an engine, tuned, and has a curve."""
    made = measure(trained_run(tmp_path_factory.mktemp("served"), tiny_target))
    tuned(made, {"drafts 5": 130.0, "drafts 4": 120.0}, ("drafts 7",))
    write_curve(made)
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


@pytest.mark.parametrize("kind", ["run", "served"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_runs_over_the_edge_and_text_can_be_read(
    browser: Any, request: pytest.FixtureRequest, kind: str, width: int, scheme: str
) -> None:
    page = open_page(browser, write_report(request.getfixturevalue(kind)), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Boxes scroll inside themselves; everything else lies within the window.
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main > *, .tile, figure, svg")]
            .filter((element) => element.getBoundingClientRect().right > innerWidth + 1).length"""
    )
    assert outside == 0
    spilled = page.evaluate(
        """() => [...document.querySelectorAll("svg text")].filter((text) => {
            const box = text.getBoundingClientRect(), room = text.ownerSVGElement.getBoundingClientRect();
            return box.left < room.left - 1 || box.right > room.right + 1 || box.bottom > room.bottom + 1;
        }).map((text) => text.textContent)"""
    )
    assert spilled == []
    for selector in ("h1", "td", ".soft", "svg .tick", "svg .label", "svg .value", "figcaption"):
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_colour_can_be_seen(browser: Any, run: Run, scheme: str) -> None:
    page = open_page(browser, write_report(run), 1200, scheme)
    for number in range(1, 7):
        page.evaluate(f"document.querySelector('svg .bar').setAttribute('class', 'bar s{number}')")
        assert contrast(page, "svg .bar") >= 3, f"s{number} (WCAG 2.2, 1.4.11)"


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


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("rect.hover[data-tip^='over all, 1 stream']", "over all, 1 stream: 1.285 times (1.265 to 1.302 in 3 repeats)"),
        ("rect.hover[data-tip^='gsm8k:']", "gsm8k: 2.525 ± 0.175 in 1,200 verifications"),
        ("rect.bar[data-tip^='the engine, position 1']", "the engine, position 1: {}%"),
        ("rect.hover[data-tip^='drafts 5']", "drafts 5: "),
        ("circle.hover[data-tip^='16 streams, acceptance length 3']", "16 streams, acceptance length 3: 1.40 ("),
        ("circle.ring[data-tip^='1 stream']", "1 stream, measured 2.127: 1.56 on the curve"),
    ],
)
def test_the_engines_charts_answer_pointer_and_finger(browser: Any, served: Run, mark: str, told: str) -> None:
    path = write_report(served)
    shares = json.loads((served.dir / "serving.json").read_text())["parity"]["engine"]["acceptance_per_position"]
    told = told.format(f"{100 * shares[0]:.1f}")  # of a drafter that was trained here: it differs by number of threads
    page = open_page(browser, path, 1200, "dark")
    page.locator(f"svg {mark}").first.hover()
    assert page.locator("#tip").inner_text().startswith(told)
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(path.as_uri())
    page.locator(f"svg {mark}").first.tap()
    assert page.locator("#tip").inner_text().startswith(told)
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    context.close()


def test_without_scripts_the_marks_keep_their_titles(browser: Any, run: Run) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(write_report(run).as_uri())
    assert page.locator("svg title").count() > 50
    context.close()


def test_the_comparison_opens_too(browser: Any, run: Run, served: Run, tiny_target: Path) -> None:
    other = open_run(run.dir.parent.parent / "tiny.toml", ["name=other", "train.lr=5e-4"])
    fill(other, tiny_target)
    for second, words in ((other, "train.lr"), (served, "16 streams: speed-up")):
        page = open_page(browser, write_comparison(run, second), 390, "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert words in page.inner_text("main")


def test_a_screenshot_for_the_docs(browser: Any, run: Run, tmp_path: Path) -> None:
    """docs/images/report.png is what this test sees: of EYAS_REPORT (a report of a real run) where that is given."""
    report = Path(os.environ["EYAS_REPORT"]).resolve() if "EYAS_REPORT" in os.environ else write_report(run)
    page = open_page(browser, report, 1200, "light")
    shot = SCREENSHOT if "EYAS_REPORT" in os.environ else tmp_path / "report.png"
    page.screenshot(path=shot, clip={"x": 0, "y": 0, "width": 1200, "height": 1360}, full_page=True)
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 20_000 < shot.stat().st_size < 400_000
