"""The mini data set: people, the content of their accounts, and tasks about them. All of it is
invented; none is AppWorld's data.

    tables.json  {"app.Model": rows} of the base databases, in the order of their creation. The id
                 of a row is its position, counted from 1, and rows refer to each other by id. Paths
                 of files start with ~/.
    tasks.json   tasks "<scenario>_<variant>". Variant n of a scenario is about person n. `changes`
                 and `touched` are what evaluation.py tests; a solution logs in to apps, then runs
                 the blocks `find` and `act`.

Answers and changes were computed from the tables, whereas a solution uses the apps' APIs, so each
checks the other when the engine evaluates the solution.
"""

import datetime as dt
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.values import Json

Row = Json

HERE = Path(__file__).resolve().parent
NOW = dt.datetime(2024, 3, 14, 9, 30)  # a Thursday; every task's clock is frozen at this time
APPS = ("spotify", "venmo", "phone", "simple_note", "todoist", "file_system")
SPLITS = ("train", "dev", "test_normal")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
THOUGHTS = ("I log in first.", "Next I look up what I need.", "Now I do it and complete the task.")

SETUP = '''\
passwords = {account["account_name"]: account["password"] for account in \
apis.supervisor.show_account_passwords()}
profile = apis.supervisor.show_profile()

def every(api, **arguments):
    """All pages of a list."""
    found, page = [], 0
    while batch := api(page_index=page, page_limit=20, **arguments):
        found += batch
        page += 1
    return found
'''


@dataclass
class MiniTask:
    """A task of tasks.json."""

    id: str
    split: str
    person: int
    instruction: str
    answer: Any
    changes: dict[str, dict[str, list[Row]]]
    touched: list[str]
    log_in: list[str]
    find: list[str]
    act: list[str]

    @property
    def solution(self) -> list[str]:
        """The code blocks of the solution."""
        return [_setup(self.log_in), "\n".join(self.find), "\n".join(self.act)]

    @property
    def apps(self) -> list[str]:
        code = "\n".join(self.solution)
        return [app for app in APPS if f"apis.{app}." in code]

    @property
    def turns(self) -> list[str]:
        """The solution as assistant turns."""
        pairs = zip(THOUGHTS, self.solution, strict=True)
        return [f"{thought}\n```python\n{code}\n```" for thought, code in pairs]


@functools.cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of each table, with times as datetimes."""
    tables = json.loads((HERE / "tables.json").read_text(encoding="utf-8"))
    return {name: [_with_times(row) for row in rows] for name, rows in tables.items()}


@functools.cache
def tasks() -> tuple[MiniTask, ...]:
    """Return all tasks in the order of their splits and scenarios."""
    records = json.loads((HERE / "tasks.json").read_text(encoding="utf-8"))
    return tuple(MiniTask(**record) for record in records)


def person(number: int) -> tuple[Row, Row]:
    """Return the name, addresses and birthday of a person, and {app: password}."""
    passwords = {
        row["account_name"]: row["password"]
        for row in tables()["admin.AccountPassword"]
        if row["main_user_id"] == number
    }
    return tables()["admin.MainUser"][number - 1], passwords


def _with_times(row: Row) -> Row:
    return {
        key: dt.datetime.fromisoformat(value) if _TIME.fullmatch(str(value)) else value
        for key, value in row.items()
    }


def _setup(apps: list[str]) -> str:
    lines = [SETUP]
    for app in apps:
        user = "phone_number" if app == "phone" else "email"
        login = f'apis.{app}.login(username=profile["{user}"], password=passwords["{app}"])'
        lines.append(f'{app} = {login}["access_token"]')
    lines.append(f"print({', '.join(apps)})")
    return "\n".join(lines)
