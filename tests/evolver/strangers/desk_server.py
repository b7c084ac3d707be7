"""A support desk as an MCP server, with one start and two rules that no description mentions: an
address changes on hold only, and an order is packed before it is shipped.

    evolver evolve --mcp "python tests/evolver/strangers/desk_server.py"
"""

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel, Field

server = MCPServer("desk")


class Order(BaseModel):
    order_id: str
    customer: str
    items: list[str]
    status: str
    address: str


_ROWS = [
    ("A-1001", "Nora Quist", ["lamp"], "packed", "12 Elm St"),
    ("A-1002", "Ravi Patel", ["desk", "chair"], "paid", "4 Oak Ave"),
    ("A-1003", "Iris Kahn", ["shelf"], "shipped", "77 Pine Rd"),
    ("A-1004", "Otto Lind", ["rug", "lamp"], "paid", "9 Birch Ln"),
]
ORDERS = {row[0]: Order(**dict(zip(Order.model_fields, row))) for row in _ROWS}
HOLD: set[str] = set()


@server.tool()
def list_orders(status: str | None = None) -> list[Order]:
    """List orders, optionally only those with a status (paid, packed or shipped)."""
    return [order for order in ORDERS.values() if status in (None, order.status)]


@server.tool()
def get_order(order_id: str = Field(description="Id such as A-1001")) -> Order:
    """Get one order."""
    return ORDERS[order_id]


@server.tool()
def change_address(order_id: str, address: str) -> str:
    """Change the delivery address of an order."""
    if ORDERS[order_id].status == "shipped":
        raise ValueError("too late")
    if order_id not in HOLD:
        raise ValueError("the order cannot be changed now")
    ORDERS[order_id].address = address
    return "address changed"


@server.tool()
def hold(order_id: str) -> str:
    """Put an order on hold."""
    HOLD.add(ORDERS[order_id].order_id)
    return f"{order_id} is on hold"


@server.tool()
def list_holds() -> list[str]:
    """List the orders on hold."""
    return sorted(HOLD)


@server.tool()
def pack(order_id: str) -> dict:
    """Pack a paid order."""
    return _moved(order_id, "paid", "packed")


@server.tool()
def ship(order_id: str) -> dict:
    """Ship a packed order."""
    return _moved(order_id, "packed", "shipped")


def _moved(order_id: str, old: str, new: str) -> dict:
    if ORDERS[order_id].status != old:
        return {"success": False, "reason": f"not {old}"}
    ORDERS[order_id].status = new
    return {"success": True}


server.run()
