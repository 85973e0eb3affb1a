"""Episodes in a checkpoint: their form in JSON's types."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from spmdrl.conversation import Action, Observation, ToolCall
from spmdrl.types import ImageSpan, Response, Span, Turn


def response_as_json(response: Response) -> dict[str, Any]:
    """Convert a response to JSON's types."""
    return {
        "token_ids": list(response.token_ids),
        "logprobs": list(response.logprobs),
        "finish_reason": response.finish_reason,
        "spans": [[span.version, span.num_tokens] for span in response.spans],
    }


def response_from_json(saved: Mapping[str, Any]) -> Response:
    """Restore a response."""
    return Response(
        token_ids=tuple(saved["token_ids"]),
        logprobs=tuple(saved["logprobs"]),
        finish_reason=saved["finish_reason"],
        spans=tuple(Span(*span) for span in saved["spans"]),
    )


def turn_as_json(turn: Turn) -> dict[str, Any]:
    """Convert a turn to JSON's types."""
    return {
        "context_ids": list(turn.context_ids),
        "response": response_as_json(turn.response),
        "action": action_as_json(turn.action),
        "observation": observation_as_json(turn.observation),
        "images": images_as_json(turn.images),
    }


def turn_from_json(saved: Mapping[str, Any]) -> Turn:
    """Restore a turn."""
    return Turn(
        context_ids=tuple(saved["context_ids"]),
        response=response_from_json(saved["response"]),
        action=action_from_json(saved["action"]),
        observation=observation_from_json(saved["observation"]),
        images=images_from_json(saved["images"]),
    )


def images_as_json(images: Iterable[ImageSpan]) -> list[dict[str, Any]]:
    """Convert images to JSON's types."""
    return [dataclasses.asdict(image) for image in images]


def images_from_json(saved: Iterable[Mapping[str, Any]]) -> tuple[ImageSpan, ...]:
    """Restore images."""
    return tuple(ImageSpan(**{**image, "grid": tuple(image["grid"])}) for image in saved)


def action_as_json(action: Action | None) -> dict[str, Any] | None:
    """Convert an action to JSON's types."""
    return None if action is None else dataclasses.asdict(action)


def action_from_json(saved: Mapping[str, Any] | None) -> Action | None:
    """Restore an action."""
    if saved is None:
        return None
    return Action(**{**saved, "tool_calls": tuple(ToolCall(**call) for call in saved["tool_calls"])})


def observation_as_json(observation: Observation | None) -> dict[str, Any] | None:
    """Convert an observation to JSON's types."""
    if observation is None:
        return None
    return {
        **{field.name: getattr(observation, field.name) for field in dataclasses.fields(observation)},
        "messages": [dict(message) for message in observation.messages],
        "images": [base64.b64encode(image).decode() for image in observation.images],
        "metrics": dict(observation.metrics),
    }


def observation_from_json(saved: Mapping[str, Any] | None) -> Observation | None:
    """Restore an observation."""
    if saved is None:
        return None
    lists = {name: tuple(saved[name]) for name in ("messages", "branch", "tools") if saved[name] is not None}
    images = tuple(map(base64.b64decode, saved.get("images", ())))  # which earlier versions did not have
    return Observation(**{**saved, **lists, "images": images})
