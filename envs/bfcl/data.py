"""BFCL's conversations, ground truths and function docs, read from its package, and the splits of
the tasks.

Nothing is written, and a ground-truth call is parsed but never run.
"""

import ast
import functools
import importlib.util
import itertools
import json
import pathlib
import random
import types
from dataclasses import dataclass, field

from envs.packages import how_to_install
from envs.toolcalls import Call
from envs.values import Json
from envs.world import Message, Tool

CATEGORIES = (
    "multi_turn_base",
    "multi_turn_miss_func",
    "multi_turn_miss_param",
    "multi_turn_long_context",
)
# Of tasks 0-49, 50-99, 100-149 and 150-199 of each category.
DOMAINS = ("files", "vehicle", "trading", "travel")
ENTRIES = 200
# Name -> number of training tasks per category.
SCHEMES = {"reference": 100, "100/100": 100, "50/150": 50}
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True)
class Entry:
    """One conversation of the benchmark. `withheld` maps a turn to the tools that become available
    in it."""

    id: str
    category: str
    question: list[list[Message]]
    truth: list[list[Call]]
    config: Json
    classes: list[str]
    docs: list[Json]
    withheld: dict[int, list[str]] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return int(self.id.rsplit("_", 1)[1])

    @property
    def calls(self) -> int:
        """The number of calls of the solution."""
        return sum(map(len, self.truth))

    @property
    def domain(self) -> str:
        return DOMAINS[self.index * len(DOMAINS) // ENTRIES]


def package_dir() -> pathlib.Path:
    """Return the folder of the package. Raises ModuleNotFoundError with the command that installs
    it."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"BFCL needs the package bfcl-eval: {how_to_install('bfcl', '--no-deps')}",
            name="bfcl_eval",
        )
    return pathlib.Path(spec.submodule_search_locations[0])


def _lines(path: pathlib.Path) -> list[Json]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


@functools.cache
def package() -> types.SimpleNamespace:
    """Import the parts of the package that the adapter uses; none of them writes files or needs a
    vendor's SDK."""
    from bfcl_eval.constants import default_prompts as prompts
    from bfcl_eval.constants import executable_backend_config as backend
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

    return types.SimpleNamespace(
        doc_files=backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING,
        modules=backend.CLASS_FILE_PATH_MAPPING,
        stateless=backend.STATELESS_CLASSES,
        step_limit=prompts.MAXIMUM_STEP_LIMIT,
        new_tools=prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC,
        state_checker=checker.state_checker,
        response_checker=checker.response_checker,
    )


@functools.cache
def docs_of(class_name: str) -> list[Json]:
    """Return the function docs of an API class in the package's format."""
    return _lines(package_dir() / "data" / "multi_turn_func_doc" / package().doc_files[class_name])


@functools.cache
def entries(category: str) -> dict[str, Entry]:
    """Return the 200 entries of a category by id."""
    if category not in CATEGORIES:
        raise ValueError(f"BFCL has no category '{category}'; it has {', '.join(CATEGORIES)}")
    data = package_dir() / "data"
    name = f"BFCL_v4_{category}.json"
    truths = {row["id"]: row["ground_truth"] for row in _lines(data / "possible_answer" / name)}
    by_id = {}
    for row in _lines(data / name):
        docs = list(itertools.chain(*map(docs_of, row["involved_classes"])))
        parameters = {doc["name"]: list(doc["parameters"]["properties"]) for doc in docs}
        by_id[row["id"]] = Entry(
            id=row["id"],
            category=category,
            question=row["question"],
            truth=[[read_call(call, parameters) for call in turn] for turn in truths[row["id"]]],
            config=row["initial_config"],
            classes=row["involved_classes"],
            docs=docs,
            withheld={int(turn): names for turn, names in row.get("missed_function", {}).items()},
        )
    if len(by_id) != ENTRIES:
        raise ValueError(
            f"{name} has {len(by_id)} entries instead of {ENTRIES}; is bfcl-eval another version?"
        )
    return by_id


def read_call(text: str, parameters: dict[str, list[str]]) -> Call:
    """Parse a ground-truth call such as `sort('a.txt')` without running it.

    `parameters` maps each tool to its parameter names in order, for positional arguments. Raises
    ValueError for anything but a plain call of a known tool with literal arguments.
    """
    node = ast.parse(text.strip(), mode="eval").body
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in parameters:
        raise ValueError(f"not a call of a known tool: {text}")
    names = parameters[name]
    if len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"arguments cannot be matched to parameters: {text}")
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args)}
    for keyword in node.keywords:
        arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
    return Call(name, arguments)


def split_indices(split: str, scheme: str = "reference", seed: int = 0) -> list[int]:
    """Return those of the 200 indices that belong to `split`: "train", "val" (= "dev" = "test") or
    "all".

    The scheme "reference" is that of the reference implementation: 0-99 train and 100-199 val, so
    that no domain is in both. The other schemes draw with `seed`, equally from each domain (give or
    take one). All categories share the
    indices: entry 7 of `miss_func` is entry 7 of `base` with a tool withheld.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"BFCL has no splits '{scheme}'; it has {', '.join(SCHEMES)}")
    size, every = SCHEMES[scheme], range(ENTRIES)
    train = set(range(size))
    if scheme != "reference":
        train.clear()
        rng = random.Random(f"bfcl {scheme} {seed}")
        width = ENTRIES // len(DOMAINS)
        share, rest = divmod(size, len(DOMAINS))
        for d in range(len(DOMAINS)):
            train.update(rng.sample(every[d * width : (d + 1) * width], share + (d < rest)))
    held_out = set(every) - train
    members = {"train": train, **dict.fromkeys(("val", "dev", "test"), held_out), "all": every}
    if split not in members:
        raise ValueError(f"BFCL has no split '{split}'; it has train, val (= dev = test) and all")
    return sorted(members[split])


def tool_schema(doc: Json, brief: bool = False) -> Tool:
    """Convert a function doc of the package into an OpenAI tool, without the description of the
    return value. `brief` also omits all other descriptions and the defaults."""

    def convert(node: Json) -> Json:
        kept = ("type", "properties", "items") if brief else node
        node = {key: node[key] for key in kept if key in node}
        if "type" in node:
            node["type"] = SCHEMA_TYPES.get(node["type"], node["type"])
        if "properties" in node:
            node["properties"] = {
                name: convert(child) for name, child in node["properties"].items()
            }
        if "items" in node:
            node["items"] = convert(node["items"])
        return node

    described = {} if brief else {"description": doc["description"]}
    function = {"name": doc["name"], **described, "parameters": convert(doc["parameters"])}
    return {"type": "function", "function": function}
