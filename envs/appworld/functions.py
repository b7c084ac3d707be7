"""AppWorld's APIs as function schemas, from their public docs, and the code that calls one and
prints the result."""

import ast
import json
import re

from envs.values import Json
from envs.world import Tool, tool_of

# Not listed: the docs, which the schemas repeat, and the instruction of the task in whose world a
# synthetic task plays.
HIDDEN_APP, HIDDEN = "api_docs", "supervisor.show_active_task"


def schemas(docs: dict[str, dict[str, Json]], apps: list[str]) -> dict[str, Tool]:
    """Return the schemas of the APIs of `apps` by "app.api", from the docs {app: {api: doc}} of
    all."""
    named: dict[str, Json] = {}
    for app in apps:
        if app != HIDDEN_APP:
            named |= {f"{app}.{api}": doc for api, doc in docs.get(app, {}).items()}
    return {name: _tool(name, doc) for name, doc in named.items() if name != HIDDEN}


def code(known: dict[str, Tool], name: str, arguments: Json) -> str:
    """Return the code of a call. Raises ValueError for an unknown function or parameter, or a value
    JSON lacks."""
    if name not in known:
        raise ValueError(f"this episode has no function {name!r}; functions() lists them")
    parameters = known[name]["function"]["parameters"]["properties"]
    if unknown := sorted(set(arguments) - set(parameters)):
        raise ValueError(
            f"{name} has no parameter {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(parameters)}"
        )
    try:
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # a lone surrogate would break AppWorld's sockets
    except (TypeError, ValueError) as error:
        raise ValueError(f"the arguments of {name} must be JSON values: {error}") from None
    values = json.loads(encoded)
    text = f"print(apis.{name}({', '.join(f'{key}={value!r}' for key, value in values.items())}))"
    # A fence inside a string would end the block of code. Backticks occur in strings only, where
    # they may be escaped.
    return text.replace("```", r"\x60" * 3)


def _tool(name: str, doc: Json) -> Tool:
    properties = {parameter["name"]: _schema(parameter) for parameter in doc["parameters"]}
    required = [parameter["name"] for parameter in doc["parameters"] if parameter["required"]]
    return tool_of(name, doc["description"], properties, required)


def _schema(parameter: Json) -> Json:
    """Return the JSON schema of one parameter. A constraint that is not understood stays in the
    description only."""
    schema = {"description": parameter["description"], **_type(parameter["type"])}
    if parameter["default"] is not None:
        schema["default"] = parameter["default"]
    for constraint in parameter["constraints"]:
        schema |= _constraint(constraint, schema.get("type"))
    return schema


def _type(name: str) -> Json:
    """Return the schema of a type in the docs' notation: "string", "list[string]", "number |
    string"."""
    if " | " in name:
        return {"anyOf": [_type(part) for part in name.split(" | ")]}
    if item := re.fullmatch(r"list\[(.*)\]", name):
        return {"type": "array", "items": _type(item[1])}
    return {"type": name}


def _constraint(text: str, kind: str | None) -> Json:
    """Return the keywords of a constraint: "value >= 1.0, <= 20.0", "length >= 1", "value in ['a',
    'b']"."""
    if text == "value is email address":
        return {"format": "email"}
    if text.startswith("value in "):
        return {"enum": ast.literal_eval(text.removeprefix("value in "))}
    what, _, bounds = text.partition(" ")
    keywords: Json = {}
    for symbol, number in re.findall(r"([<>]=?) ([-+.e\d]+)", bounds):
        end = "min" if symbol[0] == ">" else "max"
        if what == "length":
            keywords[end + ("Items" if kind == "array" else "Length")] = int(number)
        else:
            keyword = f"{end}imum" if symbol[1:] else f"exclusive{end.capitalize()}imum"
            keywords[keyword] = int(float(number)) if kind == "integer" else float(number)
    return keywords
