"""Pages in folders, which are listed by their names and read by their paths."""

PAGES = {"/box/plans/oslo.md": "pack warm\nbuy maps", "/box/tales/fox.md": "once\nthere\nwas"}


def root() -> str:
    """Show the folder that holds everything."""
    return "all is in /box"


def look(path: str) -> str:
    """Show what is in a folder.

    :param path: a path
    """
    inside = [page.removeprefix(f"{path}/") for page in PAGES if page.startswith(f"{path}/")]
    if not inside:
        raise ValueError("no such folder")
    return "\n".join(dict.fromkeys(name.split("/")[0] for name in inside))


def read(path: str) -> str:
    """Read a page.

    :param path: a path
    """
    if path not in PAGES:
        raise ValueError("no such page")
    return PAGES[path]
