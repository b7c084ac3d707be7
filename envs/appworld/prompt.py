"""The agent's prompts, and the extraction of code from its turns."""

import re

from envs import toolcalls
from envs.values import Json
from envs.world import tool_of

TOOL = tool_of(
    "appworld",
    "Run Python code in the session and see what it prints.",
    {"code": {"type": "string", "description": "The code to run."}},
    ["code"],
)

_ROLE = """\
You are an assistant who gets things done for a supervisor by writing Python code. Nobody answers \
questions.

Your supervisor is {name} (email {email}, phone number {phone}). You act with this person's \
accounts in these apps:

{apps}

{how} The session lasts for the whole task: variables, functions and imports stay. The object \
`apis` reaches every
app, as apis.<app>.<api>(<name>=<value>, ...). Nothing but what you print is shown to you.

Before you use an API, read about it:

    print(apis.api_docs.show_app_descriptions())                              # the apps
    print(apis.api_docs.show_api_descriptions(app_name="<app>"))              # the APIs of an app
    print(apis.api_docs.show_api_doc(app_name="<app>", api_name="<api>"))     # one API: \
parameters and what it returns
"""

_HOW = {
    "code": "In each turn, think in a sentence or two, then write one block of Python, from "
    "```python to ```. It is run"
    " and its output is sent to you. Only the first block of a turn is run.",
    "tool": "In each turn, think in a sentence or two, then call the tool `appworld` with Python "
    "code. It is run and"
    " its output is sent to you.",
}

_RULES = """\
Rules:

1. Take one small step per turn and look at its output before the next. An error message tells \
you what to correct.
2. Do not guess. Passwords come from apis.supervisor.show_account_passwords(), your supervisor's \
name, email and phone
   number from apis.supervisor.show_profile(), other people from the phone's contacts, and the \
date and time from the
   session's clock (datetime.datetime.now()).
3. Most APIs of an account need the access_token that the login of that app returns. The phone's \
user name is the phone
   number; that of the other apps is the email address.
4. Lists come in pages. Go on with page_index until a page is empty, or you will miss entries.
5. Do what was asked and nothing more: do not change, add, delete or send anything else. "My" \
songs, files, notes and
   so on are those of your supervisor.
6. When it is done, call apis.supervisor.complete_task(). If the task asks for something, pass it \
as answer=..., as
   short as possible: a number, a name, a title. If you cannot do the task, pass status="fail". \
This ends the task.
"""

_EXAMPLE = """\
Here is how such a task may go. The task of the example: "How many of the alarms on my phone are \
switched on?"

--- you
I look for the right API first.
{open0}print(apis.api_docs.show_api_descriptions(app_name="phone")){close}
--- output
(a list of APIs, with login and show_alarms among them)
--- you
I read what show_alarms needs.
{open0}print(apis.api_docs.show_api_doc(app_name="phone", api_name="show_alarms")){close}
--- output
(it needs an access_token, returns pages, and each alarm says whether it is enabled)
--- you
I log in with the phone number and count over all pages.
{open0}passwords = {{a["account_name"]: a["password"] for a in \
apis.supervisor.show_account_passwords()}}
number = apis.supervisor.show_profile()["phone_number"]
token = apis.phone.login(username=number, password=passwords["phone"])["access_token"]
on, page = 0, 0
while alarms := apis.phone.show_alarms(access_token=token, page_index=page):
    on += sum(alarm["enabled"] for alarm in alarms)
    page += 1
print(on){close}
--- output
3
--- you
Three of them are on.
{open0}apis.supervisor.complete_task(answer=3){close}
--- end of the example

Your own task follows.
"""

NO_CODE = {
    "code": "There is no code in your reply, so nothing was run. Write one block of Python, from "
    "```python to ```.",
    "tool": 'There is no call of `appworld` with {"code": "..."} in your reply, so nothing was '
    "run.",
}

_BLOCK = re.compile(r"```python[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)


def system(opened: Json, action: str, example: bool) -> str:
    """Return the system message. `opened` is the result of Engine.open; `action` is "code" or
    "tool"."""
    person = opened["supervisor"]
    text = _ROLE.format(
        name=f"{person['first_name']} {person['last_name']}",
        email=person["email"],
        phone=person["phone_number"],
        apps="\n".join(f"- {app}: {description}" for app, description in opened["apps"].items()),
        how=_HOW[action],
    )
    parts = [text, _RULES]
    if example:
        opening, close = (
            ("```python\n", "\n```") if action == "code" else ("(code for appworld)\n", "")
        )
        parts.append(_EXAMPLE.format(open0=opening, close=close))
    return "\n".join(parts).strip()


def code_of(text: str) -> tuple[str | None, str]:
    """Return the code in an assistant turn, None if there is none, and the role of its answer.
    Never raises.

    The code is the first ```python block, closed or not, or the argument of the first call of
    `appworld`, whichever comes first.
    """
    text = toolcalls.spoken(text)
    block = _BLOCK.search(text)
    call_at = text.find(toolcalls.OPEN)
    if call_at >= 0 and (block is None or call_at < block.start()):
        for call in toolcalls.parse(text).calls:
            code = call.arguments.get("code")
            alone = len(call.arguments) == 1
            if call.name == "appworld" and alone and isinstance(code, str):
                return code.strip(), "tool"
        return None, "tool"
    return (block.group(1).strip(), "user") if block else (None, "user")
