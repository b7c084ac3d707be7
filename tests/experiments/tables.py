"""What tests of measurements share: the rows of a table in Markdown."""


def rows_of(text: str) -> dict[str, list[str]]:
    """Return {first cell: the others} of the rows, the header among them."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {name: cells for name, *cells in rows}
