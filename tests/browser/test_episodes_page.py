"""The page of spmdrl episodes in a real browser: what it shows, and that nothing written by a policy runs in it.

`make test-browser` names the browser.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from spmdrl.tools import runs
from spmdrl.types import Rollout
from tests.helpers.browser import Browser
from tests.helpers.rollouts import MISMATCH_NATS, byte_tokenizer, recorded_episodes, write_recording

CHROMIUM = os.environ.get("CHROMIUM")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM names no browser; `make test-browser` does")


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return [rollout for rollout, _ in recorded_episodes(byte_tokenizer())]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that shows the page; each test chooses its episode."""
    folder = tmp_path_factory.mktemp("episodes")
    run = write_recording(folder, recorded_episodes(byte_tokenizer()), byte_tokenizer())
    assert runs.episodes([str(run.path), "--step", "7"]) == 0
    assert CHROMIUM is not None
    with Browser(CHROMIUM, folder / "profile") as browser:
        browser.open(run.episodes(7))
        yield browser
        # Of all tests: no error, no warning, no request but for the page, and no script of a response.
        assert browser.value("document.title") == "run, step 7"
        assert [request["request"]["url"] for request in browser.named("Network.requestWillBeSent")] == [
            run.episodes(7).as_uri()
        ]
        for event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            assert browser.named(event) == []


def choose(browser: Browser, address: str, *, view: str = "writer") -> None:
    """Show an episode by its place in the list, coloured by one thing."""
    browser.value(f"document.querySelector('input[value={view}]').click()")
    browser.value(f"location.hash = '{address}'")
    browser.wait_for(lambda: browser.value(f"location.hash === '#{address}'"))
    browser.wait_for(
        lambda: browser.value(
            "document.querySelector('h2').textContent.match(/\\d+/g).join('-') === location.hash.slice(1)"
        )
    )


def count(browser: Browser, selector: str) -> int:
    return int(browser.value(f"document.querySelectorAll('{selector}').length"))


def tip(browser: Browser) -> dict[str, str]:
    """The tooltip's lines; empty when there is none."""
    rows = browser.value(
        "document.getElementById('tip').hidden ? [] : "
        "[...document.querySelectorAll('#tip dt')].map((name) => [name.innerText, name.nextSibling.innerText])"
    )
    return dict(rows)


def test_every_token_has_the_colour_of_its_writer(browser: Browser, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        choose(browser, f"{rollout.prompt.prompt_id}-{rollout.sample_index}")
        kept = sum(len(trajectory.token_ids) for trajectory in rollout.trajectories)
        assert count(browser, ".t") == kept
        assert count(browser, ".t.policy") == rollout.num_sampled
        assert count(browser, ".t.untrained") == (rollout.num_sampled if rollout.is_masked else 0)
        assert count(browser, ".t.prompt") + count(browser, ".t.environment") == kept - rollout.num_sampled
    backgrounds = browser.value(
        "['prompt', 'environment', 'policy', 'untrained'].map((name) => {"
        "  const swatch = document.body.appendChild(document.createElement('span'));"
        "  swatch.className = `t ${name}`; const style = getComputedStyle(swatch);"
        "  const looks = style.backgroundColor + style.backgroundImage; swatch.remove(); return looks; })"
    )
    assert len(set(backgrounds)) == 4


def test_the_environments_words_are_its_own(browser: Browser) -> None:
    choose(browser, "0-0")
    said = browser.value("[...document.querySelectorAll('.t.environment')].map((t) => t.textContent).join('')")
    assert said.replace("⋯", "").replace("↵", "").replace("⇥", "") == "A lake.\tCity:  Zürich\n"


def test_a_text_of_the_policy_is_shown_and_not_run(browser: Browser, rollouts: list[Rollout]) -> None:
    choose(browser, "0-1")
    assert count(browser, "main script, main img, nav script, nav img, body > img") == 0
    wrote = browser.value(
        "[...document.querySelectorAll('.turn:last-child .t.policy')].map((t) => t.innerText).join('')"
    )
    assert "</script><script>document.title" in wrote and "U+202E" in wrote


def test_hovering_shows_what_is_known_of_a_token(browser: Browser, rollouts: list[Rollout]) -> None:
    choose(browser, "0-0")
    place = browser.value(
        "(() => { const box = document.querySelectorAll('.t.policy')[9].getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    browser.move_mouse(*place)
    response = rollouts[0].responses[0]
    assert tip(browser) == {
        "text": '"k"'.replace("k", "I must look"[9]),
        "token": str(response.token_ids[9]),
        "written by": "policy",
        "log-probability": f"{response.logprobs[9]:g} nats",
        "mismatch": f"{MISMATCH_NATS} nats",
        "version": "3",
    }
    browser.move_mouse(2, 2)
    assert tip(browser) == {}


def test_the_keyboard_moves_from_token_to_token(browser: Browser) -> None:
    choose(browser, "0-1")
    browser.value("document.querySelector('.t').focus()")
    assert tip(browser)["token"].endswith(", special")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.press(key)
    assert tip(browser)["text"] == '"u"' and tip(browser)["written by"] == "prompt or template"
    browser.press("Escape")
    assert tip(browser) == {}
    browser.value("document.querySelector('.t.untrained').focus()")
    assert tip(browser)["mismatch"] == "not known" and "not trained on" in tip(browser).values()


def test_colours_by_mismatch_and_by_log_probability_are_of_the_policys_tokens(
    browser: Browser, rollouts: list[Rollout]
) -> None:
    choose(browser, "0-0", view="mismatch")
    assert count(browser, ".t.hot.h2") == count(browser, ".t.hot") == rollouts[0].num_sampled
    choose(browser, "0-0", view="surprise")
    unlikely = sum(logprob <= -0.1 for response in rollouts[0].responses for logprob in response.logprobs)
    assert count(browser, ".t.hot") == count(browser, ".t.policy.hot") == unlikely


def test_it_is_light_or_dark_as_the_reader_prefers(browser: Browser) -> None:
    def brightness() -> int:
        colour = browser.value("getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)")
        return sum(colour)

    browser.prefer("light")
    light = brightness()
    browser.prefer("dark")
    assert brightness() < 150 < 600 < light
