"""The rules a machine can check: who imports whom, what no file may contain, what the documents
promise."""

import ast
import functools
import re
import subprocess
import sys
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
        names = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        found = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        found = [
            p
            for p in ROOT.rglob("*")
            if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
        ]
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


def imports(path: Path, *, at_import_time: bool = False) -> list[tuple[int, str]]:
    """(line, top-level package) of each import; with `at_import_time`, without those inside
    functions."""
    found = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((child.lineno, alias.name.split(".")[0]) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.append(
                    (
                        child.lineno,
                        (child.module or "").split(".")[0] if not child.level else floor_of(path),
                    )
                )
            elif at_import_time and isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            ):
                continue
            visit(child)

    visit(tree_of(path))
    return found


def called(node: ast.Call) -> str:
    """`f` of f(), `m.f` of m.f(), else nothing."""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return f"{node.func.value.id}.{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()[:8192]


def failures(lines) -> str:
    return "\n  ".join(["", *lines])


@pytest.mark.parametrize("floor", sorted(ARROWS))
def test_imports_follow_the_arrows(floor):
    wrong = [
        f"{name_of(path)}:{line} imports {package}"
        for path in python_files(floor)
        for line, package in imports(path)
        if package in OURS - ARROWS[floor]
    ]
    assert not wrong, failures(
        [f"{floor} may import of ours only {', '.join(sorted(ARROWS[floor]))}:", *wrong]
    )


@pytest.mark.parametrize("floor", DOCUMENTED)
def test_plugs_that_are_named_by_a_text_follow_the_arrows(floor):
    wrong = [
        f"{name_of(path)}:{node.lineno} names {node.value}"
        for path in python_files(floor)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"[\w.]+:\w+", node.value)
        and node.value.split(".")[0] in OURS - ARROWS[floor]
    ]
    assert not wrong, failures(
        [f"{floor} may name of ours only {', '.join(sorted(ARROWS[floor]))}:", *wrong]
    )


def modules_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module of ours) of each import, also inside functions; `from evolver import x`
    counts as both."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [
                (node.lineno, node.module),
                *((node.lineno, f"{node.module}.{a.name}") for a in node.names),
            ]
    return [(line, name) for line, name in found if name.split(".")[0] in OURS]


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


def test_the_arrows_inside_evolver_run_from_the_loop_down():
    rank = {name: place for place, names in enumerate(RANKS) for name in names}
    wrong = []
    for path in python_files("evolver"):
        room = path.relative_to(ROOT).parts[1].removesuffix(".py")
        for line, module in modules_of(path):
            parts = module.split(".")
            target = parts[1] if parts[0] == "evolver" and len(parts) > 1 else ""
            typed_only = (room, target) in {("parts", "llm"), ("parts", "questioning")}
            if room in rank and target in rank and target != room and rank[target] <= rank[room]:
                if typed_only:
                    continue
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert not wrong, failures(wrong)


def test_only_the_plan_mode_and_what_is_said_before_a_run_import_the_planner():
    allowed = {
        ("run.py", "evolver.plan"),
        ("evolver/build.py", "evolver.plan.preflight"),
        ("evolver/build.py", "evolver.plan.calls"),  # what paid models will take, said at the start
    }
    wrong = []
    for path in python_files("evolver", "rl", "models", "envs", "run"):
        for line, module in modules_of(path):
            if module.startswith("evolver.plan") and "evolver/plan/" not in name_of(path):
                file = name_of(path)
                if not any(file == a and module.startswith(prefix) for a, prefix in allowed):
                    wrong.append(f"{file}:{line} imports {module}")
    assert not wrong, failures(wrong)


def test_no_room_but_the_worlds_knows_a_world_by_name():
    worlds = {p.parent.name for p in (ROOT / "envs").glob("*/world.py")} | {
        "scienceworld",
        "textworld",
    }
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in python_files("evolver", "rl", "models")
        for line, module in modules_of(path)
        if module.startswith("envs.") and module.split(".")[1] in worlds
    ]
    assert not wrong, failures(wrong)


def test_files_are_replaced_in_one_place():
    wrong = []
    for path in python_files("evolver", "rl", "models", "experiments"):
        calls = {called(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
        if calls & {"os.replace", "os.rename"} and name_of(path) != "models/files.py":
            wrong.append(name_of(path))
    assert not wrong, failures(["use models/files.py:", *wrong])


@pytest.mark.parametrize("floor", sorted(STANDARD_LIBRARY_ONLY))
def test_floors_that_run_under_any_interpreter_import_the_standard_library(floor):
    wrong = []
    for path in python_files(floor):
        bridged = [
            packages for place, packages in BRIDGES.items() if name_of(path).startswith(place)
        ]
        allowed = sys.stdlib_module_names.union(STANDARD_LIBRARY_ONLY[floor], OURS, *bridged)
        wrong += [
            f"{name_of(path)}:{line} imports {package}"
            for line, package in imports(path)
            if package not in allowed
        ]
    assert not wrong, failures(wrong)


def test_optional_packages_are_imported_only_where_they_are_used():
    wrong = [
        f"{name_of(path)}:{line} imports {package} at the top of the module"
        for path in python_files("configs", "envs", "models", "rl", "evolver", "run")
        for line, package in imports(path, at_import_time=True)
        if package in OPTIONAL and not name_of(path).startswith(FOREIGN)
    ]
    assert not wrong, failures(wrong)


def test_only_the_entry_and_the_loop_know_config_objects():
    wrong = [
        f"{name_of(path)}:{line}"
        for path in python_files("envs", "models", "rl")
        for line, package in imports(path)
        if package == "ml_collections"
    ]
    assert not wrong, failures(["modules take explicit arguments:", *wrong])


def test_no_file_is_too_long_to_read():
    lengths = {name_of(p): p.read_text(encoding="utf-8").count("\n") for p in python_files()}
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}


def test_nothing_evaluates_text():
    """What a model writes never becomes code or a shell line, because nothing here can do
    either."""
    wrong = []
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            if called(node) in BANNED_CALLS:
                wrong.append(f"{name_of(path)}:{node.lineno} calls {called(node)}")
            if any(
                k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value)
                for k in node.keywords
            ):
                wrong.append(f"{name_of(path)}:{node.lineno} runs a shell")
    assert not wrong, failures(wrong)


def test_what_is_public_is_documented():
    wrong = []
    for path in python_files(*DOCUMENTED):
        if path.read_text(encoding="utf-8").strip() and ast.get_docstring(tree_of(path)) is None:
            wrong.append(f"{name_of(path)}:1 the module")
        for node in tree_of(path).body:
            is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_definition and not node.name.startswith("_") and ast.get_docstring(node) is None:
                wrong.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not wrong, failures(["without a docstring:", *wrong])


def test_a_docstring_opens_with_a_verb_or_a_noun_phrase():
    openers = ("what ", "whether ", "how ", "where ", "why ", "which ")
    wrong = []
    for path in python_files("configs", "envs", "evolver", "experiments", "models", "rl", "run"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if text.lower().startswith(openers):
                    wrong.append(
                        f"{name_of(path)}:{getattr(node, 'lineno', 1)} {text.splitlines()[0][:80]}"
                    )
    assert not wrong, failures(wrong)


def test_no_file_names_a_machine_or_a_package_index():
    machine = re.compile(r"(?<![\w.\-])/(?:root|home|work)\b")
    index = re.compile(r"(?:py" + r"pi\.org|python" + r"hosted|download\.py" + r"torch)")
    wrong = []
    for path in files():
        if not is_text(path):
            continue
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").split("\n"), 1
        ):
            if machine.search(line) or index.search(line):
                wrong.append(f"{name_of(path)}:{number} {line.strip()[:100]}")
    assert not wrong, failures(wrong)


def test_requirements_say_who_needs_them():
    for path in [ROOT / "requirements.txt", *sorted((ROOT / "requirements").glob("*.txt"))]:
        assert path.read_text().startswith("# "), name_of(path)
    core = (ROOT / "requirements.txt").read_text()
    assert not re.search(
        r"^(torch|vllm|wandb|accelerate)\b|^transformers\[", core, flags=re.MULTILINE
    )
