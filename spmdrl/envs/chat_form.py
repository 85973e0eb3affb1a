"""OpenAI's chat completions: the bodies of `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from typing import Any

from spmdrl.conversation import Message
from spmdrl.envs.agent_calls import (
    MODEL,
    ROLES,
    Call,
    CallError,
    Reply,
    make_call,
    refuse_settings,
    text_of,
    tool_call_of,
    tool_of,
)

# Settings that would change what the response is, and that training could not account for.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
}


class ChatForm:
    """Reads and writes chat completions."""

    def read(self, body: dict[str, Any]) -> Call:
        """Read the body of a request. Raises CallError."""
        refuse_settings(body, _ALLOWED)
        stop = body.get("stop") or []
        match body.get("messages"), body.get("tools") or [], [stop] if isinstance(stop, str) else stop:
            case list(messages), list(tools), list(stops):
                limit = body.get("max_completion_tokens") or body.get("max_tokens")
                return make_call(_messages(messages), [_tool(tool) for tool in tools], limit, stops=stops)
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
            common | {"choices": [{"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}]}
            for part, reason in ((delta, None), ({}, choice["finish_reason"]))
        ]
        match body.get("stream_options"):
            case {"include_usage": True}:
                events.append(common | {"choices": [], "usage": response["usage"]})
        return [(None, event) for event in events]


def _messages(given: list[Any]) -> list[Message]:
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


def _tool(tool: Any) -> dict[str, Any]:
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
