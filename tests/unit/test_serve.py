"""`spmdrl serve` answers in the forms of clients, with the tokens and log-probabilities of the model itself."""

from __future__ import annotations

import copy
import functools
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmdrl.data.tokenizer import encode_prompt
from spmdrl.envs.forms import CallError, MessagesForm
from spmdrl.tools.serve import Handler, Served, Server, main, open_served
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.types import Request

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TEXT = "12 + 30 ="
VARIED = {"max_tokens": 6, "temperature": 9.0, "seed": 0}  # six characters, no two the same
ASKED = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    save_tiny_model(path, num_layers=2)
    (path / "chat_template.jinja").write_text(CHATML)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    served = open_served(str(folder), max_running=8)
    yield served
    served.sampling.close()


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    server = Server(("127.0.0.1", 0), functools.partial(Handler, served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_completions_are_the_models_own_with_its_logprobs(folder: Path, client: OpenAI) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT, add_special_tokens=False, return_tensors="pt").input_ids
    greedy = model.generate(ids, max_new_tokens=6, do_sample=False)[0]
    found = client.completions.create(
        model="policy", prompt=TEXT, max_tokens=6, temperature=0, logprobs=2, echo=True
    ).choices[0]
    with torch.no_grad():
        logprobs = model(greedy[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, greedy[1:, None])[:, 0].tolist()
    assert found.logprobs is not None and found.logprobs.token_logprobs is not None
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    # A harness calls a token greedy where its own number is the largest.
    best = found.logprobs.top_logprobs or []
    greedy_places = range(len(ids[0]), len(greedy))
    assert all(found.logprobs.token_logprobs[place] == max(best[place].values()) for place in greedy_places)
    assert found.text.startswith(TEXT) and "".join(found.logprobs.tokens or []) == found.text
    alone = client.completions.create(model="policy", prompt=TEXT, max_tokens=6, temperature=0, logprobs=2).choices[0]
    assert alone.logprobs is not None
    assert alone.logprobs.text_offset == (found.logprobs.text_offset or [])[len(ids[0]) :]
    assert alone.logprobs.token_logprobs == pytest.approx(found.logprobs.token_logprobs[len(ids[0]) :], abs=1e-6)
    given = client.completions.create(model="policy", prompt=ids[0].tolist(), max_tokens=0, logprobs=1, echo=True)
    assert given.choices[0].logprobs is not None
    assert (given.choices[0].logprobs.token_logprobs or [])[1:] == pytest.approx(expected[: len(ids[0]) - 1], abs=1e-5)


def test_chat_logprobs_are_those_of_completions_and_of_the_engine(served: Served, client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    prompt, _ = encode_prompt(served.tokenizer, messages, system_prompt=None, chat_template="auto")
    greedy: dict[str, Any] = {"model": "policy", "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **greedy)
    completion = client.completions.create(prompt=[*prompt], logprobs=3, **greedy).choices[0].logprobs
    found = chat.choices[0].logprobs
    assert found is not None and completion is not None
    content = found.content or []
    assert [one.token for one in content] == completion.tokens
    assert [one.logprob for one in content] == completion.token_logprobs
    assert all(bytes(one.bytes or []).decode() == one.token for one in content)
    for one, best in zip(content, completion.top_logprobs or [], strict=True):
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == max(best.values())
        assert {other.token: other.logprob for other in reversed(one.top_logprobs)} == best
    request = Request(prompt_ids=prompt, seed=0, max_response_tokens=6, temperature=0.0, stop_token_ids=served.stops)
    sampled = served.sampling.submit(request).result()
    assert [one.logprob for one in content] == pytest.approx(sampled.logprobs, abs=1e-5)
    parts = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, stream=True, **greedy)
    streamed = [part.choices[0].logprobs for part in parts if part.choices]
    assert [one for some in streamed if some for one in some.content or []] == content
    two = client.chat.completions.create(messages=messages, logprobs=True, n=2, **greedy).choices
    assert [[one.logprob for one in (choice.logprobs and choice.logprobs.content) or []] for choice in two] == (
        [completion.token_logprobs] * 2
    )
    assert client.chat.completions.create(messages=messages, **greedy).choices[0].logprobs is None


def test_a_stop_cuts_the_logprobs_with_the_text(client: OpenAI) -> None:
    """Those of chat and of completions; each token has one character."""
    asked: dict[str, Any] = {"model": "policy"} | VARIED
    messages: list[Any] = [{"role": "user", "content": TEXT}]

    def chat(**more: Any) -> tuple[str, list[str], list[float], str]:
        choice = client.chat.completions.create(messages=messages, logprobs=True, **asked, **more).choices[0]
        content = (choice.logprobs and choice.logprobs.content) or []
        tokens, logprobs = [one.token for one in content], [one.logprob for one in content]
        return choice.message.content or "", tokens, logprobs, choice.finish_reason

    def complete(**more: Any) -> tuple[str, list[str], list[float], str]:
        choice = client.completions.create(prompt=TEXT, logprobs=0, **asked, **more).choices[0]
        assert choice.logprobs is not None
        own = [value or 0.0 for value in choice.logprobs.token_logprobs or []]
        return choice.text, choice.logprobs.tokens or [], own, choice.finish_reason

    for ask in (chat, complete):
        text, tokens, logprobs, reason = ask()
        assert (len(set(tokens)), reason) == (6, "length") and "".join(tokens) == text
        for stops in ([text[2:4]], [text[3], text[2:4]], [text[:1]], [text[5]]):
            end = min(text.find(stop) for stop in stops)
            cut, before, own, why = ask(stop=stops)
            assert ("".join(before), before, why) == (cut, tokens[:end], "stop")
            assert own == pytest.approx(logprobs[:end], abs=1e-6)
        assert ask(stop=["no such"]) == (text, tokens, logprobs, reason)


def test_a_token_inside_which_a_stop_begins_is_the_last(served: Served) -> None:
    asked = {"prompt": TEXT, "logprobs": 0} | VARIED
    (plain,) = served.complete(asked)["choices"]
    tokenizer, third = copy.deepcopy(served.tokenizer), plain["text"][2]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace(third, "[long]"), decoders.Fuse()])
    (choice,) = replace(served, tokenizer=tokenizer).complete(asked | {"stop": "ng]"})["choices"]
    assert (choice["text"], choice["finish_reason"]) == (plain["text"][:2] + "[lo", "stop")
    assert choice["logprobs"]["tokens"] == [*plain["text"][:2], "[long]"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"][:3], abs=1e-6)


def test_tokens_are_the_text_where_a_tokenizer_leaves_out_its_first_space(served: Served) -> None:
    """The decoder of Llama's tokenizers: joined, the tokens of a prompt and of a response are the text."""
    tokenizer = copy.deepcopy(served.tokenizer)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    prompt, words = " 12 + 30", replace(served, tokenizer=tokenizer)
    assert tokenizer.decode(tokenizer(" ", add_special_tokens=False).input_ids) == ""
    (choice,) = words.complete({"prompt": prompt, "max_tokens": 0, "logprobs": 0, "echo": True})["choices"]
    assert choice["text"] == prompt[1:] == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"] == [0, *range(len(prompt) - 1)]


def test_seeds_repeat_and_requests_run_together(client: OpenAI) -> None:
    def sampled(seed: int) -> str:
        made = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": TEXT}], max_tokens=12, seed=seed, temperature=1.0
        )
        assert made.usage is not None and made.usage.completion_tokens <= 12
        return made.choices[0].message.content or ""

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(sampled, range(6)))
    assert len(set(texts)) > 1
    assert texts == list(map(sampled, range(6)))
    asked: list[Any] = [{"role": "user", "content": TEXT}]
    of_three = client.chat.completions.create(
        model="policy", messages=asked, max_tokens=12, seed=0, temperature=1.0, n=3
    )
    said = [choice.message.content for choice in of_three.choices]
    assert [choice.index for choice in of_three.choices] == [0, 1, 2] and said[0] == texts[0] and len(set(said)) > 1
    assert of_three.usage is not None and of_three.usage.completion_tokens > 12
    twice = client.completions.create(model="policy", prompt=[TEXT, TEXT], max_tokens=12, temperature=1.0, seed=1)
    assert twice.choices[0].text != twice.choices[1].text
    several = client.completions.create(model="policy", prompt=[TEXT, "1"], max_tokens=3, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_other_forms_say_the_same_greedy_answer(url: str, client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(model="m", messages=messages, max_tokens=5, temperature=0).choices[0]
    text = chat.message.content
    response = client.responses.create(model="m", input=TEXT, max_output_tokens=5, temperature=0)
    assert response.output_text == text
    body = {"model": "m", "max_tokens": 5, "temperature": 0, "messages": messages}
    status, answer = post(url, "/v1/messages", body)
    message = json.loads(answer)
    assert (status, message["content"], message["stop_reason"]) == (200, [{"type": "text", "text": text}], "max_tokens")
    _, streamed = post(url, "/v1/messages", body | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events][::5] == ["message_start", "message_stop"]
    assert events[2]["delta"]["text"] == text
    parts = client.chat.completions.create(model="m", messages=messages, max_tokens=5, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 10**6}, "do not fit into the model's"),
        ("/v1/completions", {"prompt": ""}, "a prompt has no token"),
        ("/v1/completions", {"prompt": [10**6]}, "one that the model does not know"),
        ("/v1/completions", {"prompt": TEXT, "temperature": -1}, "temperature must be a number from 0 to 1000"),
        ("/v1/completions", {"prompt": TEXT, "stream": True}, "stream = true is not supported for completions"),
        ("/v1/completions", {"prompt": TEXT, "stop": [1]}, "stop must be a text or a list of texts"),
        ("/v1/completions", {"prompt": TEXT, "logprobs": [1]}, "logprobs and n must be whole numbers"),
        ("/v1/completions", {"prompt": TEXT, "n": 129}, "n from 1 to 128"),
        ("/v1/chat/completions", ASKED | {"n": 129}, "from 1 to 128, not 129"),
        ("/v1/completions", {"prompt": TEXT, "seed": 0.5}, "seed must be a whole number"),
        ("/v1/chat/completions", ASKED | {"logprobs": True, "top_logprobs": 21}, "a whole number from 0 to 20, not 21"),
        ("/v1/chat/completions", ASKED | {"top_logprobs": 2}, "top_logprobs = 2 needs logprobs = true"),
        ("/v1/chat/completions", ASKED | {"logprobs": 5}, "logprobs must be true or false, not 5"),
        ("/v1/chat/completions", {"messages": []}, "the conversation has no message"),
        ("/v1/messages", {"messages": [{"role": "system", "content": "x"}]}, "one of the roles user, assistant"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(url: str, path: str, body: dict[str, Any], said: str) -> None:
    status, answer = post(url, path, body)
    assert status == 400 and said in json.loads(answer)["error"]["message"]


def test_clients_read_the_refusal(client: OpenAI, url: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(BadRequestError, match="top_logprobs") as refused:
        client.chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=21)
    assert refused.value.type == "invalid_request_error" and refused.value.param is None
    assert [one.id for one in client.models.list()] == ["policy"]
    assert post(url, "/v1/embeddings", {})[0] == 404
    connection = HTTPConnection(url.removeprefix("http://"))
    for path, last in (("/v1/models", None), ("/v1/nothing", "close")):  # a client would send the next one into its end
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["Connection"] == last


def test_messages_carry_tools_and_their_results() -> None:
    call = MessagesForm().read(
        {
            "system": "s",
            "max_tokens": 9,
            "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "add", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "3"}]},
            ],
        }
    )
    assert [message["role"] for message in call.messages] == ["system", "user", "assistant", "tool"]
    assert call.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert call.messages[3] == {"role": "tool", "content": "3", "name": "add"}
    assert call.tools[0]["function"]["parameters"] == {"type": "object"}
    with pytest.raises(CallError, match="an input_schema"):
        MessagesForm().read({"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "x"}]})


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "holds no exported model" in capsys.readouterr().err


def test_special_tokens_are_not_said(url: str, folder: Path) -> None:
    """The model repeats its last token: a special one is counted, and has a log-probability, but no text."""
    unknown = AutoTokenizer.from_pretrained(folder).unk_token_id
    _, answer = post(
        url, "/v1/completions", {"prompt": [unknown] * 8, "max_tokens": 3, "temperature": 0, "logprobs": 0}
    )
    (choice,) = json.loads(answer)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("", ["<unk>"] * 3)


def test_many_connect_at_once(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    waiting = [socket.create_connection((host, int(port)), timeout=5) for _ in range(200)]
    assert [one.id for one in OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).models.list()] == ["policy"]
    for one in waiting:
        one.close()
