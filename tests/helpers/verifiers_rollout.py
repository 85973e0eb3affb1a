"""The rollout of verifiers itself, with a model that says what it is told to: prints what that model has read.

python verifiers_rollout.py ENVIRONMENT TASK_DATA MESSAGES     the last two as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from aiohttp import web


async def main(name: str, data: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """Run one episode."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        message = {"role": "assistant", **answers[len(bodies) - 1]}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "x", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    config = {"taskset": {"id": name}, "agent": {"runtime": {"type": "subprocess"}}}
    environment = vf.load_environment(vf.env_config_type(name).model_validate(config))
    task_type = type(environment.taskset).task_type()
    async with environment.serving():
        episode = await environment.run_episode(
            task_type(task_type.data_type().model_validate(data), environment.config.taskset.task),
            vf.ModelContext(model="x", client=client),
        )
    await runner.cleanup()
    (trace,) = episode.traces
    read = [{"messages": body["messages"], "tools": body.get("tools", [])} for body in bodies]
    print(json.dumps({"read": read, "reward": trace.reward, "metrics": trace.metrics}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])))
