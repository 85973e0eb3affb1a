"""A call of the policy in the forms of others: OpenAI's chat completions and responses, Anthropic's messages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spmdrl.config.strict import MAX_DEPTH, depth
from spmdrl.conversation import Action, Message
from spmdrl.envs.observations import numbers_of

MODEL = "policy"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class CallError(ValueError):
    """The reason why a call cannot be answered, for the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A conversation that the policy is to continue. Ids of calls are left out: the policy has never seen any."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # JSON schemas, as chat templates take them
    max_tokens: int | None
    stops: tuple[str, ...] = ()  # texts that end what the agent reads; the policy has sampled on
    role: str | None = None  # in which the policy answers, as the model's name says

    def cut(self, action: Action) -> Action:
        """Return the action as this call wants to read it: without the first stop and what follows it."""
        ends = [action.text.find(stop) for stop in self.stops if stop and stop in action.text]
        return replace(action, text=action.text[: min(ends)]) if ends else action


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The policy's answer to a call."""

    number: int  # of the episode's replies, from 0
    action: Action

    def call_id(self, place: int) -> str:
        """Return the id of a call of a tool. It is the same when the episode is played again."""
        return f"c{self.number:04}x{place:03}"


class CallForm(Protocol):
    """One of OpenAI's two forms."""

    def read(self, body: dict[str, Any]) -> Call:
        """Read the body of a request. Raises CallError."""

    def write(self, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a request."""

    def events(self, response: dict[str, Any], body: dict[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
        """Return the same as server-sent events: their names, if they have any, and their data."""


def make_call(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    max_tokens: Any,
    *,
    model: Any,
    stops: Sequence[Any] = (),
) -> Call:
    """Put a call together. Raises CallError when the policy cannot answer such a one."""
    if not messages:
        raise CallError("the conversation has no message")
    if messages[-1]["role"] == "assistant":
        raise CallError("the last message must not be the assistant's: answers are not continued")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise CallError(f"the limit of tokens must be a positive number, not {max_tokens!r}")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise CallError("two tools have the same name")
    if not all(isinstance(stop, str) for stop in stops):
        raise CallError("stop must be a text or a list of texts")
    return Call(
        messages=tuple(messages), tools=tuple(tools), max_tokens=max_tokens, stops=tuple(stops), role=_role_of(model)
    )


def _role_of(model: Any) -> str | None:
    """Return the role in a model's name, `policy/ROLE`; None in another. Raises CallError for a role without a name."""
    kind, slash, role = model.partition("/") if isinstance(model, str) else ("", "", "")
    if kind != MODEL or not slash:
        return None
    try:
        numbers_of({role: 0.0}, "role")
    except ValueError as error:
        raise CallError(f'model = "{MODEL}/ROLE" names the role of the policy, but {error}') from error
    return role


def refuse_settings(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CallError for a setting whose value is neither null nor among the ones allowed."""
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and value not in values:
            either = " or ".join(json.dumps(one) for one in values)
            raise CallError(
                f"{name} = {json.dumps(value)[:80]} is not supported; leave it out"
                + (f" or set it to {either}" if either else "")
            )


def text_of(content: Any) -> str:
    """Join the text of a message's content. Raises CallError for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    raise CallError("a message's content must be a text or a list of texts")


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise CallError(f"content of the type {str(kind)[:40]!r} is not supported; the policy reads text")


def tool_of(function: Any) -> dict[str, Any]:
    """Return a function's description as a tool's schema for chat templates. Raises CallError."""
    match function:
        case {"name": str(name)} if name:
            known = {key: function[key] for key in ("description", "parameters") if function.get(key) is not None}
            if depth(known) > MAX_DEPTH:
                raise CallError(f"the description of a tool is nested more than {MAX_DEPTH} deep")
            return {"type": "function", "function": {"name": name, "description": "", "parameters": {}} | known}
    raise CallError("a tool must be a function with a name")


def tool_call_of(name: Any, arguments: Any) -> dict[str, Any]:
    """Return an assistant's call of a tool, with its arguments parsed. Raises CallError."""
    try:
        parsed = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(name, str) or not isinstance(parsed, dict):
        raise CallError("a call of a tool needs a name, and arguments that are a JSON object")
    if depth(parsed) > MAX_DEPTH:
        raise CallError(f"the arguments of a call of a tool are nested more than {MAX_DEPTH} deep")
    return {"type": "function", "function": {"name": name, "arguments": parsed}}


# OpenAI's chat completions: the bodies of `/v1/chat/completions`.


# Settings that would change what the response is, and that training could not account for.
_CHAT_KEYS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
}


class ChatForm:
    """Reads and writes chat completions."""

    def read(self, body: dict[str, Any]) -> Call:
        """Read the body of a request. Raises CallError."""
        refuse_settings(body, _CHAT_KEYS)
        stop = body.get("stop") or []
        match body.get("messages"), body.get("tools") or [], [stop] if isinstance(stop, str) else stop:
            case list(messages), list(tools), list(stops):
                limit = body.get("max_completion_tokens") or body.get("max_tokens")
                return make_call(
                    _chat_messages(messages),
                    [_chat_tool(tool) for tool in tools],
                    limit,
                    model=body.get("model"),
                    stops=stops,
                )
        raise CallError("messages must be a list, and tools and stop too where there are any")

    def write(self, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a request."""
        action = reply.action
        message: dict[str, Any] = {"role": "assistant", "content": action.text, "refusal": None}
        if action.tool_calls:
            message["content"] = action.text or None
            message["tool_calls"] = [
                {
                    "id": reply.call_id(place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for place, call in enumerate(action.tool_calls)
            ]
        reason = "length" if action.is_cut else "tool_calls" if action.tool_calls else "stop"
        return {
            "id": f"chatcmpl-{reply.number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(body.get("model") or MODEL),
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": action.num_context_tokens,
                "completion_tokens": action.num_tokens,
                "total_tokens": action.num_context_tokens + action.num_tokens,
            },
        }

    def events(self, response: dict[str, Any], body: dict[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
        """Return the same as server-sent events: the whole message, its end, and the usage if it is asked for."""
        (choice,) = response["choices"]
        delta = {key: value for key, value in choice["message"].items() if key != "refusal"}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": place} | call for place, call in enumerate(calls)]
        common = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        events = [
            common | {"choices": [{"index": 0, "delta": part, "finish_reason": reason, "logprobs": logprobs}]}
            for part, reason, logprobs in (
                (delta, None, choice["logprobs"]),
                ({}, choice["finish_reason"], None),
            )
        ]
        match body.get("stream_options"):
            case {"include_usage": True}:
                events.append(common | {"choices": [], "usage": response["usage"]})
        return [(None, event) for event in events]


def _chat_messages(given: list[Any]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    for message in given:
        if not isinstance(message, dict) or (role := ROLES.get(str(message.get("role")))) is None:
            raise CallError(f"a message must have one of the roles {', '.join(ROLES)}")
        read: Message = {"role": role, "content": text_of(message.get("content"))}
        if role == "assistant" and (calls := message.get("tool_calls")):
            if not isinstance(calls, list):
                raise CallError("tool_calls must be a list")
            read["tool_calls"] = [_tool_call(call, names) for call in calls]
        if role == "tool" and (name := names.get(str(message.get("tool_call_id"))) or message.get("name")):
            read["name"] = str(name)
        messages.append(read)
    return messages


def _chat_tool(tool: Any) -> dict[str, Any]:
    match tool:
        case {"type": "function", "function": function}:
            return tool_of(function)
    raise CallError("tools other than functions are not supported")


def _tool_call(call: Any, names: dict[str, str]) -> dict[str, Any]:
    match call:
        case {"id": str(number), "function": {"name": str(name), "arguments": arguments}}:
            names[number] = name
            return tool_call_of(name, arguments)
    raise CallError("an assistant's tool_calls must have an id, and a function with name and arguments")


# OpenAI's responses: the bodies of `/v1/responses`.


# Settings that would change what the response is, and conversations that this server would have to keep.
_RESPONSES_KEYS: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "top_logprobs": (0,),
    "prompt": (),
}


class ResponsesForm:
    """Reads and writes responses."""

    def read(self, body: dict[str, Any]) -> Call:
        """Read the body of a request. Raises CallError."""
        refuse_settings(body, _RESPONSES_KEYS)
        text = body.get("text")
        refuse_settings(text if isinstance(text, dict) else {}, {"format": ({"type": "text"},)})
        given, tools = body.get("input"), body.get("tools") or []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not isinstance(tools, list):
            raise CallError("input must be a text or a list, and tools a list where there are any")
        instructions = body.get("instructions")
        system = [{"role": "system", "content": text_of(instructions)}] if instructions else []
        messages = [*system, *_responses_messages(items)]
        return make_call(
            messages, [_responses_tool(tool) for tool in tools], body.get("max_output_tokens"), model=body.get("model")
        )

    def write(self, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a request."""
        action = reply.action
        cut = {"reason": "max_output_tokens"} if action.is_cut else None
        return {
            "id": f"resp_{reply.number}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if action.is_cut else "completed",
            "error": None,
            "incomplete_details": cut,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "model": str(body.get("model") or MODEL),
            "output": _output(reply),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "temperature": None,
            "top_p": None,
            "usage": {
                "input_tokens": action.num_context_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": action.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": action.num_context_tokens + action.num_tokens,
            },
        }

    def events(self, response: dict[str, Any], body: dict[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
        """Return the same as server-sent events, each item in one piece."""
        started = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
        ]
        for place, item in enumerate(response["output"]):
            events += _item_events(place, item)
        events.append({"type": f"response.{response['status']}", "response": response})
        return [(event["type"], event | {"sequence_number": number}) for number, event in enumerate(events)]


def _output(reply: Reply) -> list[dict[str, Any]]:
    action = reply.action
    status = "incomplete" if action.is_cut else "completed"
    content = {"type": "output_text", "text": action.text, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{reply.number}", "role": "assistant", "status": status}
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{reply.call_id(place)}",
            "call_id": reply.call_id(place),
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": "completed",
        }
        for place, call in enumerate(action.tool_calls)
    ]
    texts = [message | {"content": [content]}] if action.text or not calls else []
    return [*texts, *calls]


def _item_events(place: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"output_index": place, "item_id": item["id"]}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    started = item | {"status": "in_progress"} | empty
    yield {"type": "response.output_item.added", "output_index": place, "item": started}
    if item["type"] == "message":
        (part,) = item["content"]
        at |= {"content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": part | {"text": ""}}
        yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _responses_messages(items: list[Any]) -> list[Message]:
    """Return the items as messages: what an assistant says and the calls after it are one."""
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    shown = [item for item in items if not (isinstance(item, dict) and item.get("type") == "reasoning")]
    for is_of_assistant, group in itertools.groupby(shown, key=_is_of_assistant):
        if is_of_assistant:
            messages += _assistant(group, names)
        else:
            messages += [_other(item, names) for item in group]
    return messages


def _is_of_assistant(item: Any) -> bool:
    match item:
        case {"role": "assistant"} | {"type": "function_call"}:
            return True
    return False


def _assistant(items: Iterable[dict[str, Any]], names: dict[str, str]) -> Iterator[Message]:
    message: Message | None = None
    for item in items:
        if item.get("type") != "function_call":
            if message is not None:
                yield message
            message = {"role": "assistant", "content": text_of(item.get("content"))}
            continue
        message = message or {"role": "assistant", "content": ""}
        names[str(item.get("call_id"))] = str(item.get("name"))
        call = tool_call_of(item.get("name"), item.get("arguments"))
        message = message | {"tool_calls": [*message.get("tool_calls", ()), call]}
    if message is not None:
        yield message


def _other(item: Any, names: dict[str, str]) -> Message:
    match item:
        case {"type": "function_call_output", "call_id": call_id, "output": output}:
            name = names.get(str(call_id))
            return {"role": "tool", "content": text_of(output)} | ({"name": name} if name else {})
        case {"role": str(role)} if role in ROLES and item.get("type", "message") == "message":
            return {"role": ROLES[role], "content": text_of(item.get("content"))}
    kind = item.get("type", item.get("role")) if isinstance(item, dict) else item
    raise CallError(f"an item of the type {str(kind)[:40]!r} is not supported")


def _responses_tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") == "function":
        return tool_of(tool)
    raise CallError("tools other than functions are not supported")


# Anthropic's messages: the bodies of `/v1/messages`.


class MessagesForm:
    """Reads and writes messages."""

    def read(self, body: dict[str, Any]) -> Call:
        """Read the body of a request. Raises CallError."""
        given, tools, stops = body.get("messages"), body.get("tools") or [], body.get("stop_sequences") or []
        if not isinstance(given, list) or not isinstance(tools, list) or not isinstance(stops, list):
            raise CallError("messages must be a list, and tools and stop_sequences too where there are any")
        system = body.get("system")
        messages: list[Message] = [{"role": "system", "content": text_of(system)}] if system else []
        names: dict[str, str] = {}  # of the tools, by the ids of their calls
        for message in given:
            if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
                raise CallError("a message must have one of the roles user, assistant")
            messages += _messages_of(message["role"], message.get("content"), names)
        return make_call(
            messages, [_tool(tool) for tool in tools], body.get("max_tokens"), model=body.get("model"), stops=stops
        )

    def write(self, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a request."""
        action = reply.action
        texts = [{"type": "text", "text": action.text}] if action.text or not action.tool_calls else []
        calls = [
            {"type": "tool_use", "id": reply.call_id(place), "name": call.name, "input": call.arguments}
            for place, call in enumerate(action.tool_calls)
        ]
        return {
            "id": f"msg_{reply.number}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model") or MODEL),
            "content": [*texts, *calls],
            "stop_reason": "max_tokens" if action.is_cut else "tool_use" if calls else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": action.num_context_tokens, "output_tokens": action.num_tokens},
        }

    def events(self, response: dict[str, Any], body: dict[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
        """Return the same as server-sent events, each block in one piece."""
        usage = response["usage"]
        started = response | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": started}]
        for place, block in enumerate(response["content"]):
            if block["type"] == "text":
                empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                written = json.dumps(block["input"], ensure_ascii=False)
                empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
            events += [
                {"type": "content_block_start", "index": place, "content_block": empty},
                {"type": "content_block_delta", "index": place, "delta": delta},
                {"type": "content_block_stop", "index": place},
            ]
        ended = {"stop_reason": response["stop_reason"], "stop_sequence": None}
        events += [{"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]
        return [(event["type"], event) for event in events]


def _messages_of(role: str, content: Any, names: dict[str, str]) -> list[Message]:
    """Return one of Anthropic's messages as messages: each result of a tool is one of its own."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise CallError("a message's content must be a text or a list of blocks")
    results: list[Message] = []
    texts, calls = [], []
    for block in blocks:
        match block:
            case {"type": "tool_use", "id": str(number), "name": name, "input": dict(given)} if role == "assistant":
                names[number] = str(name)
                calls.append(tool_call_of(name, json.dumps(given)))
            case {"type": "tool_result", "tool_use_id": number} if role == "user":
                name = names.get(str(number))
                said: Message = {"role": "tool", "content": text_of(block.get("content"))}
                results.append(said | ({"name": name} if name else {}))
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                texts.append(block)
    if not texts and not calls:
        return results
    message: Message = {"role": role, "content": text_of(texts)}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise CallError("a tool must have a name and an input_schema")
    return tool_of(tool | {"parameters": tool["input_schema"]})
