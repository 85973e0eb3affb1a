"""Every noun is what it was after JSON, and files of an older run are read and written as they were."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmdrl import conversation
from spmdrl import types as nouns
from spmdrl.algo.metrics import TokenValue
from spmdrl.rollout.codec import Codec
from spmdrl.rollout.files import read_part
from spmdrl.rollout.group import SAVED_GROUP, PromptGroup, SavedGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.types import Response, Span

BEFORE = Path(__file__).parents[1] / "data/written_before"  # by the version that converted each noun by hand
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)
PLAIN = {
    Any: ANYTHING,
    int: st.integers(0, 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=3),
    bool: st.booleans(),
    bytes: st.binary(max_size=4),
    type(None): st.none(),
}


WITH_TENSORS = (nouns.Sequence, nouns.MicroBatch, nouns.PrefixTree, nouns.TopTokens)


def is_noun(kind: Any) -> bool:
    """True for a dataclass or a named tuple that needs no tensor."""
    fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    return inspect.isclass(kind) and fields and kind not in WITH_TENSORS


NOUNS = [kind for module in (nouns, conversation) for kind in vars(module).values() if is_noun(kind)]


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any values of a type as annotations have it."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, inner))
    if origin is tuple and inner[-1] is not ...:
        return st.tuples(*map(values_of, inner))
    if origin in (tuple, frozenset):
        return st.lists(values_of(inner[0]), max_size=2).map(origin)
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(*map(values_of, inner), max_size=2)
    hints = {
        name: hint
        for name, hint in typing.get_type_hints(kind).items()
        if typing.get_origin(hint) is not typing.ClassVar
    }
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


@pytest.mark.parametrize("kind", [*dict.fromkeys(NOUNS), SavedGroup], ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_noun_is_what_it_was_after_json(kind: Any, data: st.DataObject) -> None:
    value, codec = data.draw(values_of(kind)), Codec[Any](kind)
    read = codec.load(json.loads(json.dumps(codec.dump(value))))
    assert read == value and type(read) is type(value)


def test_numbers_that_are_none_and_halves_of_characters_are_what_they_were() -> None:
    codec = Codec[Response](Response)
    response = Response(token_ids=(1, 2), logprobs=(math.nan, -math.inf), finish_reason="stop", spans=(Span(0, 2),))
    assert repr(codec.load(json.loads(json.dumps(codec.dump(response))))) == repr(response)
    action = conversation.Action(
        text="\udc00", tool_calls=(conversation.ToolCall(name="f", arguments={"x": "a\ud800"}),)
    )
    calls = Codec[conversation.Action](conversation.Action)
    assert calls.load(json.loads(json.dumps(calls.dump(action)))) == action


@pytest.mark.parametrize(
    "change",
    [{"spans": [[1]]}, {"token_ids": ["x"]}, {"finish_reason": "done"}, {"logprob": []}, {"token_ids": None}],
    ids=str,
)
def test_another_form_is_refused(change: dict[str, Any]) -> None:
    whole = {"token_ids": [1], "logprobs": [0.0], "finish_reason": "stop", "spans": [[1, 1]]}
    assert Codec[Response](Response).load(whole).spans == (Span(1, 1),)
    with pytest.raises(ValueError, match="validation error"):
        Codec[Response](Response).load(whole | change)


def test_an_unfinished_group_of_an_older_run_goes_on() -> None:
    written = json.loads((BEFORE / "carried_group.json").read_text(encoding="utf-8"))
    saved = SAVED_GROUP.load(written)
    assert SAVED_GROUP.load(SAVED_GROUP.dump(saved)) == saved
    assert SAVED_GROUP.dump(saved)["episodes"][0].keys() >= written["episodes"][0].keys()
    (first,) = saved.episodes[0].trajectories[0]
    assert first.observation is not None and first.observation.images == (bytes(range(250, 256)),)
    sampling = Sampling(group_size=2, temperature=1.0, max_response_tokens=16, stop_token_ids=frozenset({2}))
    messages = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " how many?"}]},)
    prompt = nouns.Prompt(
        prompt_id=saved.prompt_id,
        token_ids=saved.prompt_ids,
        text="",
        answer="2",
        task="count",
        metadata={},
        messages=messages,
        images=saved.prompt_images,
    )
    group = PromptGroup.restored(saved, prompt, sampling, None)
    assert [episode.is_finished for episode in group.episodes] == [True, False] and group.pending.keys() == {0}
    assert group.saved() == saved


PROMPT = nouns.Prompt(prompt_id=0, token_ids=(1,), text="", answer="", task="", metadata={})
ROLLOUT = nouns.Rollout(
    prompt=PROMPT,
    sample_index=0,
    seed=1,
    trajectories=(),
    end="done",
    initial_observation=conversation.Observation(role="x"),
)


@pytest.mark.parametrize(
    ("value", "field", "key"),
    [
        (ROLLOUT, "initial_observation", "greeting"),
        (TokenValue(1.0, 2, 3, (4,), -0.5, sequence_segment=6), "sequence_segment", "sequence_part"),
    ],
)
def test_a_renamed_field_has_the_key_of_older_files(value: Any, field: str, key: str) -> None:
    codec = Codec[Any](type(value))
    dumped = codec.dump(value)
    assert field not in dumped and codec.load({key: dumped.pop(key), **dumped}) == value


def test_a_recording_of_an_older_form_is_refused() -> None:
    with pytest.raises(nouns.UserError, match="has the form of an earlier version; record the rollouts again"):
        read_part(BEFORE / "rank-0.safetensors")
