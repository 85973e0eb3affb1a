"""Agents for tests: programs that need nothing but Python, and the client that runs them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from spmdrl.config import EnvironmentConfig
from spmdrl.conversation import EpisodeStart
from spmdrl.envs.agent import AgentClient

PRELUDE = '''
import json, os, sys, time, urllib.error, urllib.request


def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    """Send a request; returns its status and its answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(messages, **settings):
    """Let the policy go on with a conversation; returns its message."""
    status, answer = post("/chat/completions", {"model": "any", "messages": messages, **settings})
    assert status == 200, answer
    return answer["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


episode = json.load(open(os.environ["SPMDRL_EPISODE"]))
'''
START = EpisodeStart(prompt="How much is 2 + 2?", answer="4", task="sums", metadata={"level": 1}, seed=7)


def script(folder: Path, body: str, *, prelude: str = PRELUDE) -> list[str]:
    """The command that runs a program of this body."""
    path = folder / "agent.py"
    path.write_text(prelude + textwrap.dedent(body), encoding="utf-8")
    return [sys.executable, *(["-I", "-S"] if prelude else []), str(path)]


def agent_config(command: list[str], *, source: dict[str, Any] | None = None, **settings: Any) -> EnvironmentConfig:
    """The table of an environment that runs a command."""
    return EnvironmentConfig.model_validate(
        {
            "source": {"kind": "agent", "command": command} | (source or {}),
            "sandbox": {"mode": "off"},
            "step_timeout_s": 60.0,
        }
        | settings
    )


def agents(command: list[str], **settings: Any) -> AgentClient:
    """The client of a command."""
    return AgentClient(agent_config(command, **settings))
