"""The page of a step's episodes: it holds what was recorded, and nothing that a policy writes is part of its HTML."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spmdrl.model.policy import TokenLogprobs
from spmdrl.replay.recorder import LogprobHook, read_trainer_logprobs, write_trainer_logprobs
from spmdrl.report import RunFolder
from spmdrl.report.episodes import TokenTexts, writers_of_context
from spmdrl.rollout.files import folder_of
from spmdrl.step.batch import lay_end_to_end
from spmdrl.tools import runs
from spmdrl.types import PADDING_INDEX, MicroBatch, Rollout, Sequence, UserError
from tests.helpers.rollouts import (
    HOSTILE,
    MISMATCH_NATS,
    byte_tokenizer,
    chat_prompt,
    one_turn,
    recorded_episodes,
    response_of,
    write_recording,
)

TOKENIZER = byte_tokenizer()


class Page(HTMLParser):
    """A page's elements, and the texts that follow their start tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self._begun: str | None = tag

    def handle_endtag(self, tag: str) -> None:
        self._begun = None

    def handle_data(self, data: str) -> None:
        if self.elements and self._begun:
            self.texts[self._begun][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """The episodes that it shows."""
        data: dict[str, Any] = json.loads(self.texts["script"][0])
        return data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_recording(tmp_path_factory.mktemp("run"), recorded_episodes(TOKENIZER), TOKENIZER)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return [rollout for rollout, _ in recorded_episodes(TOKENIZER)]


@pytest.fixture(scope="module")
def page(run: RunFolder) -> Page:
    assert runs.episodes([str(run.path), "--step", "7"]) == 0
    return Page(run.episodes(7).read_text(encoding="utf-8"))


def shown(page: Page) -> list[dict[str, Any]]:
    """All rollouts of the page, in order."""
    return [rollout for group in page.data["groups"] for rollout in group["rollouts"]]


def test_it_holds_every_token_with_the_engines_logprob_and_version(page: Page, rollouts: list[Rollout]) -> None:
    strings = page.data["strings"]
    for found, rollout in zip(shown(page), rollouts, strict=True):
        turns = [turn for trajectory in found["trajectories"] for turn in trajectory]
        assert len(found["trajectories"]) == len(rollout.trajectories)
        for turn, recorded in zip(turns, rollout.turns, strict=True):
            assert tuple(turn["context"]["ids"]) == recorded.context_ids
            assert tuple(turn["response"]["ids"]) == recorded.response.token_ids
            assert turn["response"]["logprobs"] == pytest.approx(recorded.response.logprobs, abs=1e-6)
            assert turn["response"]["spans"] == [[span.version, span.num_tokens] for span in recorded.response.spans]
            for part in ("context", "response"):
                text = "".join(strings[place] for place in turn[part]["pieces"])
                assert text == TOKENIZER.decode(turn[part]["ids"])
        assert found["is_trained"] != rollout.is_masked
        assert (found["end"], found["seed"]) == (rollout.end, str(rollout.seed))


def test_turns_have_their_calls_rewards_and_errors(page: Page) -> None:
    ((first, second),) = shown(page)[0]["trajectories"]
    assert first["tool_calls"] == [{"name": "lookup", "arguments": '{"key": "Zürichsee"}'}]
    assert first["observation"] == {"reward": 0.0, "done": False, "metrics": {"lookups": 1.0}, "tool_errors": 0}
    assert second["tool_calls"] == [] and second["observation"]["reward"] == 1.0
    ((broken,),) = shown(page)[3]["trajectories"]
    assert HOSTILE in broken["malformed"] and broken["observation"] is None
    assert HOSTILE in shown(page)[3]["environment_failure"]


def test_the_mismatch_is_the_trainers_logprob_minus_the_engines(page: Page) -> None:
    for rollout in shown(page):
        for turn in (turn for trajectory in rollout["trajectories"] for turn in trajectory):
            mismatch = turn["response"]["mismatch"]
            assert len(mismatch) == (len(turn["response"]["ids"]) if rollout["is_trained"] else 0)
            assert mismatch == pytest.approx([MISMATCH_NATS] * len(mismatch), abs=1e-6)


def test_what_the_environment_said_is_told_from_what_was_there_before(page: Page) -> None:
    """Also in a history that the template wrote anew, where the question has the same words."""

    def said(turn: dict[str, Any]) -> str:
        context = turn["context"]
        texts = [page.data["strings"][place] for place in context["pieces"]]
        return "".join(text for text, writer in zip(texts, context["writers"], strict=True) if writer == "e")

    ((first, second),) = shown(page)[0]["trajectories"]
    assert (said(first), said(second)) == ("", "A lake.\tCity:  Zürich\n")
    (_,), (again,) = shown(page)[2]["trajectories"]
    assert said(again) == HOSTILE
    assert again["context"]["writers"].index("e") > len(HOSTILE)


def test_what_policies_write_is_no_part_of_the_html(page: Page) -> None:
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and "img" not in tags and "b" not in tags
    assert page.texts["title"] == ["run, step 7"]
    assert len(page.texts["script"]) == 2  # the data, and the one program


def test_it_asks_for_nothing_and_runs_one_program_only(page: Page) -> None:
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "data", "onload", "onclick", "style"} & attributes.keys()
    (policy,) = (attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    assert policy is not None and policy.startswith("default-src 'none'; ")
    for kind, text in (("style", page.texts["style"][0]), ("script", page.texts["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
        assert "http" not in text and "url(" not in text and "@import" not in text
    assert "innerHTML" not in page.texts["script"][1]


def test_one_prompt_into_a_file_of_ones_own(run: RunFolder, tmp_path: Path) -> None:
    arguments = [str(run.path), "--step", "7", "--prompt", "5", "--output", str(tmp_path / "five.html")]
    assert runs.episodes(arguments) == 0
    assert [group["prompt_id"] for group in Page((tmp_path / "five.html").read_text()).data["groups"]] == [5]


def test_rollouts_without_an_environment_and_without_a_finished_step(tmp_path: Path) -> None:
    """With a greedy baseline, and a log-probability that is not finite, as of a step in which training diverged."""
    prompt = chat_prompt(TOKENIZER, "1 + 1?")
    response = dataclasses.replace(response_of(TOKENIZER, "2"), logprobs=(-0.5, -float("inf")))
    outcome = recorded_episodes(TOKENIZER)[0][1]
    outcomes = [(one_turn(prompt, response, sample_index=i, is_baseline=i == 1), outcome) for i in range(2)]
    run = write_recording(tmp_path, outcomes, TOKENIZER)
    (folder_of(run.rollouts, 7) / "trainer-0.safetensors").unlink()
    assert runs.episodes([str(run.path), "--step", "7"]) == 0
    page = Page(run.episodes(7).read_text())
    assert not page.data["shows_mismatch"]
    assert [rollout["is_baseline"] for rollout in shown(page)] == [False, True]
    ((turn,),) = shown(page)[0]["trajectories"]
    assert turn["response"]["logprobs"] == [-0.5, None] and turn["response"]["mismatch"] == []
    assert (turn["observation"], turn["malformed"], turn["tool_calls"]) == (None, None, [])


def test_what_cannot_be_shown_is_refused_in_a_sentence(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        ([str(tmp_path), "--step", "7"], f"{tmp_path} is not the folder of a run: it has no config.toml"),
        ([str(run.path), "--step", "8"], "holds no rollouts of step 8; the steps it holds: 7"),
        ([str(run.path), "--step", "7", "--prompt", "4"], "--prompt 4: step 7 has no such prompt; its prompts: 0, 5"),
        (
            [str(run.path), "--step", "7", "--output", str(tmp_path / "nowhere/page.html")],
            "cannot be written (No such file or directory); name a file in a folder that is there: --output",
        ),
    ):
        assert runs.episodes(arguments) == 2
        assert words in capsys.readouterr().err


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20), st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12))
def test_pieces_are_the_text_one_for_each_token(text: str, any_tokens: list[int]) -> None:
    token_ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    pieces = TokenTexts(TOKENIZER).pieces(token_ids)
    assert len(pieces) == len(token_ids) and "".join(pieces) == TOKENIZER.decode(token_ids)
    assert len(TokenTexts(TOKENIZER).pieces(any_tokens)) == len(any_tokens)


def test_a_text_that_the_template_changed_counts_as_the_templates() -> None:
    pieces = ["<tool>", " a", "b ", "</tool>", "c"]
    assert writers_of_context(pieces, [("ab", "environment")]) == [
        "prompt",
        "environment",
        "environment",
        *["prompt"] * 2,
    ]
    assert writers_of_context(pieces, [("AB", "environment"), ("  c\n", "environment")]) == [
        *["prompt"] * 4,
        "environment",
    ]


class Doubles(nn.Module):
    """Stands for a policy: the log-probability of a loss token is its id times a factor."""

    factor = -0.5
    adapters = None

    def forward(self, micro_batch: MicroBatch) -> TokenLogprobs:
        logprobs = self.factor * micro_batch.token_ids * micro_batch.loss_mask
        return TokenLogprobs(logprobs.float().requires_grad_(), torch.zeros_like(logprobs))


def sequence(index: int, *token_ids: int, segment: int = 0) -> Sequence:
    mask = tuple(place > 0 for place in range(len(token_ids)))
    return Sequence(
        index=index,
        segment=segment,
        token_ids=token_ids,
        loss_mask=mask,
        rollout_logprobs=(0.0,) * len(token_ids),
        reward=0.0,
    )


def test_the_first_forward_of_each_sequence_is_kept(tmp_path: Path) -> None:
    """Not those of later updates, of batches that are not the step's, of filling, of a reference, or of an update that
    was left out."""
    policy = Doubles()
    hook, before = LogprobHook(policy), policy.factor
    probe, first, second, left_out = (
        lay_end_to_end(some, {}, multiple=4)
        for some in (
            [sequence(0, 9, 9)],
            [sequence(3, 1, 2), sequence(3, 1, 4, segment=1)],
            [sequence(1, 6, 7, 8)],
            [sequence(2, 5)],
        )
    )
    policy.factor, policy.adapters = 7.0, SimpleNamespace(is_on=False)  # type: ignore[assignment]
    policy(first)  # as the reference, which is the policy without its adapters
    policy.factor, policy.adapters = before, SimpleNamespace(is_on=True)  # type: ignore[assignment]
    for micro_batch in (probe, first, second):
        policy(micro_batch)
    policy.factor = 1.0
    policy(first)
    found = hook.take([[first], [second], [left_out]])
    assert PADDING_INDEX not in {index for index, _ in found}
    assert {key: values[1:].tolist() for key, values in found.items()} == {
        (3, (1, 2)): [-1.0],
        (3, (1, 4)): [-2.0],
        (1, (6, 7, 8)): [-3.5, -4.0],
    }
    assert all(values[0].isnan() and not values.requires_grad for values in found.values())
    assert hook.take([[first]]) == {}

    folder_of(tmp_path, 2).mkdir()
    write_trainer_logprobs(tmp_path, 2, 1, found)
    read = read_trainer_logprobs(tmp_path, 2, num_ranks=3)
    assert read.keys() == found.keys()
    for key in read:
        assert torch.equal(read[key].nan_to_num(5.0), found[key].nan_to_num(5.0))
    with pytest.raises(UserError, match=r"trainer-0\.safetensors cannot be written"):
        write_trainer_logprobs(tmp_path, 3, 0, found)
