"""The site of the documentation in a real browser, opened from its folder: the search finds pages without a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import Browser
from tests.helpers.site import build_site

CHROMIUM = os.environ.get("CHROMIUM")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM names no browser; `make test-browser` does")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build_site(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        browser.open(site / "docs/faults.html")
        yield browser
        # Of all tests: nothing but files of the site was asked for, and nothing went wrong.
        asked = {request["request"]["url"] for request in browser.named("Network.requestWillBeSent")}
        assert asked and all(url.startswith((site.as_uri(), "data:", "about:")) for url in asked), asked
        assert browser.named("Runtime.exceptionThrown") == []
        assert [entry["entry"]["text"] for entry in browser.named("Log.entryAdded")] == []


def test_a_search_finds_the_page_that_has_the_words(browser: Browser) -> None:
    browser.value(
        "(field => { field.focus(); field.value = 'staleness' })(document.querySelector('.md-search__input'))"
    )
    browser.value(
        "document.querySelector('.md-search__input').dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
    )
    browser.wait_for(lambda: browser.value("document.querySelectorAll('.md-search-result__link').length > 2"))
    links = browser.value("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any("docs/disaggregated.html" in link for link in links)


def test_the_browser_refuses_a_request_of_a_page(browser: Browser) -> None:
    browser.value("fetch('http://127.0.0.1:9/').then(() => window.asked = 'sent', () => window.asked = 'refused')")
    browser.wait_for(lambda: browser.value("window.asked") == "refused")
    entries = [entry["entry"]["text"] for entry in browser.named("Log.entryAdded")]
    assert entries and "violates the following Content Security Policy" in entries[0]
    browser.events = [event for event in browser.events if event.get("method") != "Log.entryAdded"]
