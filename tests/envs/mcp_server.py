"""An MCP server for tests: notes that it keeps in memory, and tools that fail, wait or die."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, ResourceLink, TextResourceContents, ToolAnnotations

server = MCPServer("notes", instructions="Keep notes short.")
notes: list[str] = []
offers = sys.argv[1:]  # "reset", "broken reset", "snapshot", "prints", "files" and a folder
print("the notes are served", file=sys.stderr)
if "prints" in offers:
    print("warming up\n{}\nready", flush=True)


@server.tool()
def add_note(text: str, tags: list[str] | None = None) -> str:
    """Keep a note."""
    notes.append(text)
    return f"note {len(notes)}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_notes() -> str:
    """All notes, one per line."""
    return "\n".join(notes)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def pid() -> str:
    """The number of the process."""
    return str(os.getpid())


@server.tool(structured_output=False)
def attach() -> list:
    """Notes as resources."""
    text = TextResourceContents(uri="notes://1", mime_type="text/plain", text="buy milk")
    link = ResourceLink(name="all notes", uri="notes://all", description="every note")
    return [EmbeddedResource(resource=text), link]


if "reset" in offers or "broken reset" in offers:

    @server.tool()
    def reset() -> str:
        """Forget all notes."""
        if "broken reset" in offers:
            raise ToolError("not now")
        notes.clear()
        return "forgotten"


if "files" in offers:

    @server.tool()
    def place() -> str:
        """Where the server works."""
        return offers[1]

    @server.tool()
    def variable() -> str:
        """An environment variable."""
        return os.environ["AT"]

    @server.tool()
    def list_files() -> str:
        """All files."""
        found = [path for path in Path.cwd().rglob("*") if path.is_file()]
        return "\n".join(sorted(str(path.relative_to(Path.cwd())) for path in found))

    @server.tool()
    def keep_file(name: str) -> str:
        """Write an empty file."""
        try:
            Path(name).write_text("")
        except OSError as error:
            raise ToolError(str(error)) from None
        return f"written to {name}"


if "snapshot" in offers:

    @server.tool()
    def snapshot() -> str:
        """The notes as a text."""
        return "|".join(notes)

    @server.tool()
    def restore(state: str) -> str:
        """Take notes back from a text."""
        notes[:] = [note for note in state.split("|") if note]
        return "restored"


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
