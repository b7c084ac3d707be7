"""The words of experience that demonstrations show, and that runs with a policy which imitated them
render likewise."""

import re
from typing import Any


def hint_text(tools: list[str], when: str) -> str:
    """Return the content of an experience, such as "When asked to add a bag to X: order, bag."."""
    return f"{when}: {', '.join(tools)}."


def render(lesson: Any) -> str:
    """Return the content of an experience that teaches `lesson`, which has a query and a path of
    tools."""
    return hint_text(lesson.path, when_text(lesson.query))


def experience_block(contents: list[str]) -> str:
    """Return the text that precedes the first user message."""
    return "<EXP>" + "\n".join(contents) + "</EXP>\n"


def when_text(query: str) -> str:
    """Return the condition for using an experience: the query with names, ids, days and numbers
    replaced by X.

    "Add a bag to order O12." becomes "When asked to add a bag to order X", and "Who travels on
    order O12?" becomes "When asked who travels on order X".
    """
    query = re.sub(
        r"(?<=\. )[A-Z]", lambda start: start[0].lower(), query
    )  # "Then" and "Reply" are no names
    first, *rest = re.findall(r"[A-Z]?[0-9]+|[A-Za-z]+|'s", query) or [""]
    words = [first.lower()] + [word if word.islower() else "X" for word in rest]
    asked = "When asked" if query.rstrip().endswith("?") else "When asked to"
    return " ".join([asked, *words]).replace(" 's", "'s")
