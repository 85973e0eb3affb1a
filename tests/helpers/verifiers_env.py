"""An environment of verifiers for tests: sums to be answered, capitals to be looked up with a tool, and failures.

It is read by the interpreter of .venv-verifiers, from a working directory that it has been copied to.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf

CAPITALS = {"Peru": "Lima"}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a capital up.",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
    },
}


class Data(vf.TaskData):
    answer: str
    has_tool: bool = False
    waits: bool = False


class Question(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def is_right(self, trace: vf.Trace) -> float:
        if self.data.answer == "unknown":
            raise ValueError("no one knows the answer")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class QuestionsConfig(vf.TasksetConfig):
    sums: int = 1


class Questions(vf.Taskset[Question, QuestionsConfig]):
    def load(self) -> list[Question]:
        sums = [Data(prompt=f"How much is {n} + {n}?", answer=str(2 * n)) for n in range(1, self.config.sums + 1)]
        others = [
            Data(prompt="The capital of Peru?", system_prompt="Be brief.", answer="Lima", has_tool=True),
            Data(prompt="Why?", answer="unknown"),
            Data(prompt="Wait.", answer="", waits=True),
        ]
        return [Question(data, self.config.task) for data in sums + others]


class ChatConfig(vf.HarnessConfig):
    pass


class Chat(vf.Harness[ChatConfig]):
    """A conversation that is held in the process itself, and goes on as long as the tool is called."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        if data.waits:
            sleeper = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
            Path(os.environ["WAITING"]).write_text(f"{os.getpid()} {sleeper.pid}", encoding="utf-8")
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as client:
            while messages[-1]["role"] != "assistant":
                body = {"model": ctx.model, "messages": messages} | ({"tools": [LOOKUP]} if data.has_tool else {})
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
                for call in messages[-1].get("tool_calls") or []:
                    country = json.loads(call["function"]["arguments"])["country"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": CAPITALS[country]})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Chat", "Questions"]
