"""The tools of a server of the Model Context Protocol that speaks on its standard streams."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

from mcp import ClientSession, StdioServerParameters, stdio_client

from spmdrl.envs.schema import tool_schema
from spmdrl.envs.toolbox import Tool, ToolError

_START_S = 60.0  # for a server to name its tools


class McpServer:
    """A server, with one session that all episodes of the process share. `start` makes it."""

    tools: list[Tool]

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._session: ClientSession | None = None
        self._end = asyncio.Event()
        self._started: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())

    @classmethod
    async def start(cls, command: Sequence[str]) -> McpServer:
        """Start a server and ask for its tools. Raises ValueError when that fails or takes more than a minute."""
        server = cls(command)
        try:
            server.tools = await asyncio.wait_for(asyncio.shield(server._started), _START_S)
        except Exception as error:
            server._task.cancel()
            await asyncio.wait([server._task])
            reason = f"it did not answer within {_START_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise ValueError(f"the MCP server {' '.join(command)} cannot be used: {reason}") from error
        return server

    async def close(self) -> None:
        """End the server."""
        self._end.set()
        await asyncio.wait([self._task])

    async def _serve(self) -> None:
        """Hold the session: its contexts must be left by the task that entered them."""
        program, *arguments = self._command
        described = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        try:
            async with stdio_client(described) as streams, ClientSession(*streams) as session:
                await session.initialize()
                self._session = session
                self._started.set_result(await self._list(session))
                await self._end.wait()
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._session = None

    async def _list(self, session: ClientSession) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            page = (await session.list_tools(cursor=cursor)).model_dump(mode="json", by_alias=True)
            tools += [self._tool(described) for described in page["tools"]]
            if not (cursor := page.get("nextCursor")):
                return tools

    def _tool(self, described: dict[str, Any]) -> Tool:
        name: str = described["name"]

        async def call(arguments: dict[str, Any]) -> str:
            if self._session is None:
                raise ConnectionError("the MCP server has ended")
            result = await self._session.call_tool(name, arguments)
            return _text(result.model_dump(mode="json", by_alias=True))

        return Tool(schema=tool_schema(name, described.get("description") or "", described["inputSchema"]), call=call)


def _text(result: dict[str, Any]) -> str:
    """The text of a result. Raises ToolError when the call failed, or gave what is no text."""
    content = result["content"]
    if others := sorted({block["type"] for block in content} - {"text"}):
        raise ToolError(f"error: the tool returned {' and '.join(others)}, and only text can be read")
    text = "\n".join(block["text"] for block in content)
    if result.get("isError"):
        raise ToolError(f"error: {text}")
    structured = result.get("structuredContent")
    return text if content or structured is None else json.dumps(structured, ensure_ascii=False)
