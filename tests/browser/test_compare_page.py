"""The page of spmdrl compare in a real browser: it is drawn, fits its window, and asks for nothing.

With PICTURES in the environment, the pictures of the documentation are written into that folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdrl.report.curves import RUN_COLORS
from spmdrl.tools import runs
from tests.helpers.browser import Browser
from tests.helpers.pictures import doctor_picture, watch_picture
from tests.helpers.recorded import SEEDS, SLOW

CHROMIUM, PICTURES = os.environ.get("CHROMIUM"), os.environ.get("PICTURES")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM names no browser; `make test-browser` does")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that shows the comparison of the recorded runs."""
    folder = tmp_path_factory.mktemp("compare")
    page = folder / "compare.html"
    assert runs.compare([*map(str, (*SEEDS, SLOW)), "--output", str(page)]) == 0
    assert CHROMIUM is not None
    with Browser(CHROMIUM, folder / "profile") as browser:
        browser.prefer("light")
        browser.open(page)
        yield browser
        asked = [one["request"]["url"] for one in browser.named("Network.requestWillBeSent")]
        assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]  # a chart is in its own address
        for event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            assert browser.named(event) == []


def test_each_line_has_a_colour_of_its_own_that_its_curves_have_too(browser: Browser) -> None:
    swatches = browser.value(
        "[...document.querySelectorAll('.swatch')].map((s) => getComputedStyle(s).backgroundColor)"
    )
    curves = [
        f"rgb({', '.join(str(int(color[place : place + 2], 16)) for place in (1, 3, 5))})" for color in RUN_COLORS
    ]
    assert swatches == curves[:2]


def test_every_chart_is_drawn(browser: Browser) -> None:
    hidden = browser.value(
        "[...document.images].filter((one) => !one.complete || !one.naturalWidth).map((one) => one.alt)"
    )
    assert hidden == [] and browser.value("document.images.length") >= 12


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_narrow_and_wide_windows(browser: Browser, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.wait_for(lambda: browser.value("window.innerWidth") == width)
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_it_is_light_or_dark_as_the_reader_prefers(browser: Browser) -> None:
    def brightness() -> int:
        colours = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
        return sum(browser.value(colours))

    browser.prefer("dark")
    dark = brightness()
    browser.prefer("light")
    assert dark < 150 < 600 < brightness()


@pytest.mark.skipif(PICTURES is None, reason="PICTURES names no folder; `make pictures` does")
def test_pictures_of_the_documentation_are_written(browser: Browser, tmp_path: Path) -> None:
    assert PICTURES is not None
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    for name, picture in (
        ("compare.png", browser.screenshot()),
        ("watch.svg", watch_picture(tmp_path).encode()),
        ("doctor.svg", doctor_picture().encode()),
    ):
        (Path(PICTURES) / name).write_bytes(picture)
