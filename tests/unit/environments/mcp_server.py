"""An MCP server of tests: `mcp_server.py [http PORT]`. A note is kept by its process alone."""

import os
import sys

from mcp.server import MCPServer
from mcp.types import ImageContent

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add(name: str, function: int) -> str:
    """Keep a note."""
    notes.append(f"{name}={function}")
    return " ".join(notes)


@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("no luck")


@server.tool()
def draw() -> ImageContent:
    """Return an image."""
    return ImageContent(type="image", data="AA==", mime_type="image/png")


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
