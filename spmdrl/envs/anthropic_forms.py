"""A call of the policy in Anthropic's form: the bodies of `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from spmdrl.conversation import Message
from spmdrl.envs.openai_forms import MODEL, Call, CallError, Reply, make_call, text_of, tool_call_of, tool_of


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
