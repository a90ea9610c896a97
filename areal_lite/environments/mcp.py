"""Tools of MCP servers (modelcontextprotocol.io), for the policy to call.

    rollout.workflow=areal_lite.environments.mcp:McpTools
    rollout.workflow_args={servers: [python my_server.py, "http://127.0.0.1:8000/mcp"]}

A server is a command, which talks over its standard input and output, or a URL. Each episode
connects to each server anew, so a command is a process of each episode's own: what a policy leaves
there, no other episode finds.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.extensions import require
from areal_lite.rollout.episode import Episode
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.tools import Function, Tools, ToolsLost

_SERVERS = "rollout.workflow_args.servers"


class McpTools(Tools):
    """A conversation between the policy and the tools of MCP servers.

    Args:
        servers: commands and URLs.
        tools: further tools, as of `Tools`, whose other arguments are `settings`.
    """

    def __init__(self, servers: Sequence[str], tools: Sequence[str] = (), **settings: Any):
        super().__init__(tools, **settings)
        if not servers:
            raise ValueError(f"{_SERVERS} is empty: name a command or a URL")
        self._servers = list(servers)
        self._places: dict[str, str] = {}  # the server of each tool

    async def start(self, config: TrainConfig) -> None:
        """List the tools of all servers. Raises ValueError for a server that does not answer."""
        require("mcp.client.client", "'mcp>=2'")
        if self._functions:
            await super().start(config)
        for server in self._servers:
            try:
                async with _client(server) as client:
                    listed = await _tools(client)
            except Exception as error:
                reason = f"{server} does not answer: {_reason(error)}"
                raise ValueError(f"{_SERVERS}: {reason}") from error
            for tool in listed:
                if tool.name in self._functions or tool.name in self._places:
                    other = self._places.get(tool.name, "rollout.workflow_args.tools")
                    raise ValueError(f"{_SERVERS}: {server} and {other} both have {tool.name}")
                self._places[tool.name] = server
                about = {"name": tool.name, "description": tool.description or ""}
                schema = about | {"parameters": tool.input_schema}
                self._schemas.append({"type": "function", "function": schema})

    async def __call__(self, episode: Episode) -> Trajectory:
        async with AsyncExitStack() as stack:
            try:
                return await self.play(episode, self._functions | await self._connect(stack))
            except Exception as error:  # which the tasks of a connection would wrap in a group
                failure = error
        raise failure

    async def _connect(self, stack: AsyncExitStack) -> dict[str, Function]:
        """Connect to all servers until `stack` is left, and return what calls their tools."""
        clients = {}
        for server in self._servers:
            try:
                clients[server] = await stack.enter_async_context(_client(server))
            except Exception as error:
                raise ToolsLost(f"{server} does not answer: {_reason(error)}") from error
        return {name: partial(_call, clients[at], name) for name, at in self._places.items()}


def _client(server: str) -> Any:
    """Return a connection to be entered. A command gets an environment without secrets."""
    import mcp

    if server.startswith(("http://", "https://")):
        return mcp.Client(server)
    command, *arguments = shlex.split(server)
    return mcp.Client(mcp.StdioServerParameters(command=command, args=arguments))


async def _tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    found = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    return found


async def _call(client: Any, name: str, /, **arguments: Any) -> str:
    """Return the text of a tool's result. Raises ToolsLost if the server does not answer."""
    from mcp import MCPError, types

    try:
        result = await client.call_tool(name, arguments)
    except Exception as error:
        lost = types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT
        if isinstance(error, MCPError) and error.code not in lost:
            return f"error: {error}"  # a wrong call
        raise ToolsLost(f"tool {name} does not answer: {_reason(error)}") from error
    texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content)]
    return "error: " * bool(result.is_error) + "\n".join(texts)


def _reason(error: BaseException) -> str:
    """Return the message of an error, or of the first one in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
