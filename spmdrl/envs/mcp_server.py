"""The tools of a server of the Model Context Protocol that speaks on its standard streams."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from typing import Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp_types import CONNECTION_CLOSED

from spmdrl.data.image_forms import Content
from spmdrl.envs.toolbox import Tool, ToolError, ToolGone, tool_schema
from spmdrl.faults.text import one_line

_MAX_LINE = 10_000  # characters of a line of standard error
_START_S = 60.0  # for a server to answer for the first time


class McpServer:
    """A server, with one session that all episodes of the process share. `start` makes it."""

    tools: list[Tool]

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._starting = asyncio.Lock()
        self._session: _McpSession | None = None

    @classmethod
    async def start(cls, command: Sequence[str]) -> McpServer:
        """Start a server and ask for its tools. Raises ValueError when that fails or takes more than a minute."""
        server = cls(command)
        try:
            client = await server._client()
            server.tools = [server._tool(described) for described in await _listed(client)]
        except Exception as error:
            await server.close()
            words = server._session.errors.last_line() if server._session is not None else ""
            said = f"; it said last: {one_line(words)}" if words else ""
            raise ValueError(f"the MCP server {' '.join(command)} cannot be used: {_reason(error)}{said}") from error
        return server

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _client(self) -> Client:
        """The client of the server, which is started where it does not run."""
        async with self._starting:
            if self._session is None or self._session.has_ended:
                self._session = _McpSession(self._command)
            return await asyncio.wait_for(asyncio.shield(self._session.client), _START_S)

    def _tool(self, described: dict[str, Any]) -> Tool:
        name: str = described["name"]

        async def call(arguments: dict[str, Any]) -> Content:
            client = await self._client()
            try:
                result = await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code != CONNECTION_CLOSED:
                    raise
                await self.close()  # the next call starts it again
                raise ToolGone(f"the MCP server of the tool {name} has ended") from error
            return _content(result.model_dump(mode="json", by_alias=True))

        return Tool(schema=tool_schema(name, described.get("description") or "", described["inputSchema"]), call=call)


class _Errors:
    """The standard error of a server, of which the last line is cached: nothing of it runs into the console."""

    def __init__(self) -> None:
        reads, writes = os.pipe()
        self._reads, self.stream = os.fdopen(reads, errors="replace"), os.fdopen(writes, "w")
        self._last = ""
        self._thread = threading.Thread(target=self._follow, name="errors of a server", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with self._reads:
            while line := self._reads.readline(_MAX_LINE):
                self._last = line.strip() or self._last

    def last_line(self) -> str:
        """Return the last line, once the server has ended."""
        self._thread.join(1.0)  # others that the server has started may have its stream
        return self._last


class _McpSession:
    """A running server and its client, in a task: who enters the client's context must leave it too."""

    def __init__(self, command: Sequence[str]) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._end, self.errors = asyncio.Event(), _Errors()
        self._task = asyncio.create_task(self._run(command))

    @property
    def has_ended(self) -> bool:
        return self._end.is_set() or self._task.done()

    async def close(self) -> None:
        self._end.set()
        if not self.client.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, command: Sequence[str]) -> None:
        program, *arguments = command
        described = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        try:
            async with Client(stdio_client(described, errlog=self.errors.stream)) as client:
                self.client.set_result(client)
                await self._end.wait()
        except Exception as error:
            if not self.client.done():
                self.client.set_exception(error)
        finally:
            self.errors.stream.close()


async def _listed(client: Client) -> list[dict[str, Any]]:
    """All tools of a server, as it describes them."""
    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = (await client.list_tools(cursor=cursor)).model_dump(mode="json", by_alias=True)
        tools += page["tools"]
        if not (cursor := page.get("nextCursor")):
            return tools


def _content(result: dict[str, Any]) -> Content:
    """The text of a result, or its texts and images. Raises ToolError when the call failed, or gave something else."""
    content = result["content"]
    if others := sorted({block["type"] for block in content} - {"text", "image"}):
        raise ToolError(f"error: the tool returned {' and '.join(others)}, and only text and images can be read")
    text = "\n".join(block["text"] for block in content if block["type"] == "text")
    if result.get("isError"):
        raise ToolError(f"error: {text}")
    if any(block["type"] == "image" for block in content):
        return [_part(block) for block in content]
    structured = result.get("structuredContent")
    return text if content or structured is None else json.dumps(structured, ensure_ascii=False)


def _part(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {"type": "image", "image": f"data:{block['mimeType']};base64,{block['data']}"}


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # of the tasks behind the client
        error = error.exceptions[0]
    return f"it did not answer within {_START_S:g} s" if isinstance(error, TimeoutError) else str(error)
