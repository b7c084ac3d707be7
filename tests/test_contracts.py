"""The rules a machine can check: who imports whom, what no file may contain, what the documents
promise."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"command", "configs", "envs", "evolver", "experiments", "models", "rl", "run", "tests"}

# The arrows run one way: from a floor to what it may import of ours.
ARROWS = {
    "configs": {"configs", "rl"},  # rl.bounds: types of numbers with bounds
    "envs": {"envs"},
    "models": {"models"},
    "rl": {"rl", "models", "envs"},
    "evolver": {"evolver", "rl", "models", "envs"},
    "experiments": OURS - {"tests"},
    "run": OURS - {"tests", "experiments", "command"},
    "command": OURS - {"tests"},
}
# Floors that import nothing else but the standard library, and what bridges to other packages
# there: files, folders.
STANDARD_LIBRARY_ONLY = {
    "configs": {"ml_collections", "pydantic", "annotated_types"},
    "envs": set(),
}
BRIDGES = {
    "envs/appworld/": {"appworld"},
    "envs/bfcl/": {"bfcl_eval"},
    "envs/gym.py": {"gymnasium", "numpy"},
    "envs/ray_pool.py": {"ray"},
    "envs/service.py": {"starlette", "uvicorn"},
}
# Installed by some users only, or heavy: never while a module of these floors is being imported.
OPTIONAL = {"torch", "transformers", "vllm", "wandb", "tensorboardX", "ray", "openai"}
FOREIGN = (
    "rl/engines/vllm/vllm_plugin/",
)  # runs under vLLM's interpreter, and is imported by nothing here
DOCUMENTED = ("envs", "evolver", "models", "rl")
BANNED_CALLS = {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput"}
MAX_LINES = 900


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file of the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        found = [ROOT / name for name in names.split("\n") if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        found = [p for p in ROOT.rglob("*") if "/." not in f"/{name_of(p)}"]
    return tuple(sorted(p for p in found if p.is_file()))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


def python_files(*floors: str) -> list[Path]:
    return [p for p in files() if p.suffix == ".py" and (not floors or floor_of(p) in floors)]


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def nodes(parent: ast.AST, *, at_import_time: bool = False) -> Iterator[ast.AST]:
    """Yield all nodes below one; with `at_import_time`, without those inside functions."""
    for child in ast.iter_child_nodes(parent):
        if not (at_import_time and isinstance(child, FUNCTIONS)):
            yield child
            yield from nodes(child, at_import_time=at_import_time)


def imports(*floors: str, at_import_time: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield (file, dotted name, a text that tells both and the line) of what is imported; `from
    evolver import x` counts as both evolver and evolver.x."""
    for path in python_files(*floors):
        file = name_of(path)
        for node in nodes(tree_of(path), at_import_time=at_import_time):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = floor_of(path) if node.level else node.module
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            yield from ((file, name, f"{file}:{node.lineno} imports {name}") for name in names)


def package_of(name: str) -> str:
    return name.partition(".")[0]


def room_of(name: str) -> str:
    """Return the module or folder of evolver/ that a file or a module is or is in, "" for those
    elsewhere."""
    floor, *rest = re.split("[./]", name)
    return rest[0] if floor == "evolver" and rest else ""


def calls(path: Path) -> list[tuple[ast.Call, str]]:
    """(call, its name) of all calls in a file: `f` of f(), `m.f` of m.f(), else nothing."""
    found = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    return [(call, called(call.func)) for call in found]


def called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()[:8192]


def failures(lines: Iterable[str]) -> str:
    return "\n  ".join(["", *lines])


def refuse(wrong: Iterable[str], *rule: str) -> None:
    """Fail with a rule and all that breaks it, if anything does."""
    found = list(wrong)
    assert not found, failures([*rule, *found])


@pytest.mark.parametrize("floor", sorted(ARROWS))
def test_imports_follow_the_arrows(floor):
    barred = OURS - ARROWS[floor]
    refuse(
        (told for _, name, told in imports(floor) if package_of(name) in barred),
        f"{floor} may import of ours only {', '.join(sorted(ARROWS[floor]))}:",
    )


@pytest.mark.parametrize("floor", DOCUMENTED)
def test_plugs_that_are_named_by_a_text_follow_the_arrows(floor):
    wrong, barred = [], OURS - ARROWS[floor]
    for path in python_files(floor):
        for node in ast.walk(tree_of(path)):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"[\w.]+:\w+", text):
                if package_of(text) in barred:
                    wrong.append(f"{name_of(path)}:{node.lineno} names {text}")
    refuse(wrong, f"{floor} may name of ours only {', '.join(sorted(ARROWS[floor]))}:")


# Inside evolver/ the arrows run from the loop to its phases, the builder, the planner (of which the
# builder uses the memory check), the mechanisms and the language models, and down to what all of
# them need. A name is a module or a room.
RANKS = (
    ("loop",),
    ("phases",),
    ("build",),
    ("plan",),
    ("grading", "learner", "pipeline"),
    ("questioning", "navigating", "attributing", "engine"),
    ("llm",),
    ("parts", "replaying"),
    ("transcripts",),
)
RANK = {name: place for place, names in enumerate(RANKS) for name in names}
TYPED_ONLY = {("parts", "llm"), ("parts", "questioning")}


def test_the_arrows_inside_evolver_run_from_the_loop_down():
    wrong = []
    for file, name, told in imports("evolver"):
        pair = room, target = room_of(file), room_of(name)
        if RANK.keys() >= {*pair} and room != target and pair not in TYPED_ONLY:
            wrong += [told] if RANK[target] <= RANK[room] else []
    refuse(wrong)


def test_only_the_plan_mode_and_what_is_said_before_a_run_import_the_planner():
    allowed = (
        ("run.py", "evolver.plan"),
        ("evolver/build.py", "evolver.plan.preflight"),
        ("evolver/build.py", "evolver.plan.calls"),  # what paid models will take, said at the start
        ("evolver/plan/", "evolver.plan"),
    )
    wrong = []
    for file, name, told in imports("evolver", "rl", "models", "envs", "run"):
        known = any(file.startswith(place) and name.startswith(part) for place, part in allowed)
        if name.startswith("evolver.plan") and not known:
            wrong.append(told)
    refuse(wrong)


def test_no_room_but_the_worlds_knows_a_world_by_name():
    worlds = {path.parent.name for path in (ROOT / "envs").glob("*/world.py")}
    barred = {f"envs.{name}" for name in (*worlds, "scienceworld", "textworld")}
    found = imports("evolver", "rl", "models")
    refuse(told for _, name, told in found if ".".join(name.split(".")[:2]) in barred)


def test_files_are_replaced_in_one_place():
    wrong = []
    for path in python_files("evolver", "rl", "models", "experiments"):
        names = {name for _, name in calls(path)}
        if names & {"os.replace", "os.rename"} and name_of(path) != "models/files.py":
            wrong.append(name_of(path))
    refuse(wrong, "use models/files.py:")


@pytest.mark.parametrize("floor", sorted(STANDARD_LIBRARY_ONLY))
def test_floors_that_run_under_any_interpreter_import_the_standard_library(floor):
    common, wrong = sys.stdlib_module_names.union(STANDARD_LIBRARY_ONLY[floor], OURS), []
    for file, name, told in imports(floor):
        bridged = [packages for place, packages in BRIDGES.items() if file.startswith(place)]
        if package_of(name) not in common.union(*bridged):
            wrong.append(told)
    refuse(wrong)


def test_optional_packages_are_imported_only_where_they_are_used():
    found = imports("configs", "envs", "models", "rl", "evolver", "run", at_import_time=True)
    refuse(
        f"{told} at the top of the module"
        for file, name, told in found
        if package_of(name) in OPTIONAL and not file.startswith(FOREIGN)
    )


def test_only_the_entry_and_the_loop_know_config_objects():
    found = imports("envs", "models", "rl")
    wrong = (told for _, name, told in found if package_of(name) == "ml_collections")
    refuse(wrong, "modules take explicit arguments:")


def test_no_file_is_too_long_to_read():
    lengths = {name_of(p): p.read_text(encoding="utf-8").count("\n") for p in python_files()}
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}


def test_nothing_evaluates_text():
    """What a model writes never becomes code or a shell line, because nothing here can do
    either."""
    wrong = []
    for path in python_files():
        for call, name in calls(path):
            if name in BANNED_CALLS:
                wrong.append(f"{name_of(path)}:{call.lineno} calls {name}")
            for given in call.keywords:
                off = isinstance(given.value, ast.Constant) and not given.value.value
                if given.arg == "shell" and not off:
                    wrong.append(f"{name_of(path)}:{call.lineno} runs a shell")
    refuse(wrong)


DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def place_of(path: Path, node: ast.AST) -> str:
    return f"{name_of(path)}:{getattr(node, 'lineno', 1)}"


def test_what_is_public_is_documented():
    wrong = []
    for path in python_files(*DOCUMENTED):
        module = tree_of(path)
        parts = [module] if path.read_text(encoding="utf-8").strip() else []
        for node in (*parts, *module.body):
            if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is None:
                name = getattr(node, "name", "the module")
                wrong += [] if name.startswith("_") else [f"{place_of(path, node)} {name}"]
    refuse(wrong, "without a docstring:")


def test_a_docstring_opens_with_a_verb_or_a_noun_phrase():
    openers = ("what ", "whether ", "how ", "where ", "why ", "which ")
    wrong = []
    for path in python_files("configs", "envs", "evolver", "experiments", "models", "rl", "run"):
        for node in ast.walk(tree_of(path)):
            text = (isinstance(node, DEFINITIONS) and ast.get_docstring(node)) or ""
            if text.lower().startswith(openers):
                wrong.append(f"{place_of(path, node)} {text.splitlines()[0][:80]}")
    refuse(wrong)


def test_no_file_names_a_machine_or_a_package_index():
    machine = re.compile(r"(?<![\w.\-])/(?:root|home|work)\b")
    index = re.compile(r"(?:py" + r"pi\.org|python" + r"hosted|download\.py" + r"torch)")
    wrong = []
    for path in filter(is_text, files()):
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            if machine.search(line) or index.search(line):
                wrong.append(f"{name_of(path)}:{number} {line.strip()[:100]}")
    refuse(wrong)


def test_requirements_say_who_needs_them():
    for path in [ROOT / "requirements.txt", *sorted((ROOT / "requirements").glob("*.txt"))]:
        assert path.read_text().startswith("# "), name_of(path)
    core = (ROOT / "requirements.txt").read_text()
    assert not re.search(r"(?m)^(torch|vllm|wandb|accelerate)\b|^transformers\[", core)
