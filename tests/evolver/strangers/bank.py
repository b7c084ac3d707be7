"""A bank that answers in numbers, true and false. A frozen account transfers nothing; no description
says so."""

import random

NAMES = ["Ann Lee", "Bo Diaz", "Cy Young", "Di Ross", "Ed Kay", "Flo Berg"]

accounts: dict = {}


def reset(seed: int) -> None:
    rng = random.Random(seed)
    for name in rng.sample(NAMES, 4):
        accounts[f"AC-{rng.randrange(1000, 9999)}"] = {
            "owner": name,
            "balance": rng.randrange(1, 9) * 100,
            "frozen": rng.random() < 0.4,
        }


def list_accounts() -> str:
    """List all accounts with their owners."""
    return "\n".join(f"{id}: {account['owner']}" for id, account in accounts.items())


def show_balance(account: str) -> float:
    """Show the balance of an account."""
    return float(_get(account)["balance"])


def is_frozen(account: str) -> bool:
    """Tell whether an account is frozen."""
    return _get(account)["frozen"]


def unfreeze(account: str) -> None:
    """Unfreeze an account."""
    _get(account)["frozen"] = False


def deposit(account: str, amount: float) -> str:
    """Deposit money into an account."""
    if amount <= 0:
        raise ValueError("the amount must be positive")
    _get(account)["balance"] += amount
    return "deposited"


def transfer(source: str, target: str, amount: float) -> str:
    """Transfer money.

    Args:
        source: the account that pays
        target: the account that is paid
    """
    if amount <= 0:
        raise ValueError("the amount must be positive")
    giver, taker = _get(source), _get(target)
    if giver["frozen"]:
        raise PermissionError("transfer declined")
    if giver["balance"] < amount:
        raise ValueError("insufficient funds")
    giver["balance"] -= amount
    taker["balance"] += amount
    return "transferred"


def _get(account):
    if account not in accounts:
        raise KeyError(f"unknown account {account}")
    return accounts[account]
