"""An MCP server for tests: notes that it keeps in memory, and tools that fail, wait or die."""

import os
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add_note(text: str, tags: list[str] | None = None) -> str:
    """Keep a note."""
    notes.append(text)
    return f"note {len(notes)}"


@server.tool()
def list_notes() -> str:
    """All notes, one per line."""
    return "\n".join(notes)


@server.tool()
def fail() -> str:
    """Always goes wrong."""
    raise ToolError("out of paper")


@server.tool()
def wait(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
