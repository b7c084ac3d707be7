"""`--help=WORD`: the config keys and plug arguments that a word finds, with type, default and
meaning.

The meaning of a key is its comment in `configs/base.py`, so that there is one place to write it.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evolver.config import plugs
from evolver.config.checks import flat

BASE = Path(__file__).parents[2] / "configs" / "base.py"


def search(word: str, rules: dict[str, Any], config: Any) -> str:
    """Return a description of every key whose name, meaning or plug holds `word`, or a sentence
    that there is none.

    rules: `configs.base.keys().rules`. config: the values shown as defaults, those of the config
    file if there is one.
    """
    meanings, values, word = (
        comments(BASE.read_text(encoding="utf-8"), list(rules)),
        flat(config),
        word.lower(),
    )
    blocks = []
    for key, rule in rules.items():
        about = meanings.get(key, "")
        if rule.free:
            continue
        if word in f"config.{key} {about}".lower():
            value = values.get(key, rule.default)
            limits = f"; {expected(rule)}" if expected(rule) else ""
            blocks.append(
                f"config.{key} ({type(rule.default).__name__}{limits}) = {value!r}\n    {about}".rstrip()
            )
    for key in plugs.KINDS:
        blocks += [f"config.{line}" for line in arguments(key, word)]
    if not blocks:
        return f"no key, argument or description contains {word!r}; configs/base.py has every key"
    return "\n".join(blocks)


def expected(rule: Any) -> str:
    """Return the choices or bounds of a rule: "one of a, b" or "at least 0"."""
    return f"one of {', '.join(map(str, rule.choices))}" if rule.choices else rule.bounds()


def arguments(key: str, word: str) -> Iterator[str]:
    """Yield "KEY.name=NAME: ..." and "KEY.args.ARGUMENT ..." for what holds the word: every
    argument of a plug if its key or its name does, otherwise those whose own name or meaning
    does."""
    for name in plugs.known(key):
        try:
            target = plugs.load(key, name)
            takes = plugs.settable(target)
        except plugs.PlugError:  # its packages are not installed
            continue
        parts = (target, target.__init__) if inspect.isclass(target) else (target,)
        text = "\n\n".join(inspect.getdoc(part) or "" for part in parts)
        about, shown = " ".join(text.partition("\n\n")[0].split()), []
        for argument, parameter in takes.items():
            default = (
                "required" if parameter.default is parameter.empty else repr(parameter.default)
            )
            meaning = meaning_of(argument, text)
            line = f"{key}.args.{argument} ({kind_of(parameter.annotation)}) = {default}, of {name}"
            if word in f"config.{key} {name} {argument} {meaning}".lower():
                shown.append(f"{line}\n    {meaning}".rstrip())
        if shown or word in f"config.{key} {name} {about}".lower():
            yield from (f"{key}.name={name}: {about}", *shown)


_ENTRY = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*: "  # "limit, keep: ..." in a docstring


def meaning_of(argument: str, text: str) -> str:
    """Return what a docstring says of an argument: its entry "ARGUMENT: ...", or the sentences that
    name it."""
    sentences, entries = [], []
    for paragraph in re.split(r"\n\s*\n", text.partition("\n\n")[2]):
        words = " ".join(paragraph.split()).removeprefix("Args: ")
        for part in re.split(rf"(?:^|(?<=[.;]) )(?={_ENTRY})", words):
            if entry := re.match(_ENTRY, part):
                if argument in entry[0][:-2].split(", "):
                    return part[entry.end() :]
                entries.append(part[entry.end() :])
            else:
                sentences += re.split(r"(?<=\.) (?=[A-Z`\"])", part)
    named = re.compile(rf"(?<!\w){argument}(?!\w)")
    return " ".join(filter(named.search, sentences)) or " ".join(filter(named.search, entries))


def kind_of(annotation: Any) -> str:
    """Return a type in words: "float; >= 0" or "one of mean, sum"."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        found = [f"{sign} {getattr(bound, name):g}" for bound in inner[1:] for name, sign in signs.items()
                 if getattr(bound, name, None) is not None]  # fmt: skip
        return f"{kind_of(inner[0])}; {' and '.join(found)}" if found else kind_of(inner[0])
    if typing.get_origin(annotation) is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(kind_of(one) for one in inner)
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def comments(source: str, keys: list[str]) -> dict[str, str]:
    """Return {key: the comment at its declaration, with the comment lines that continue it}.

    A declaration is an assignment `group.name = ...` or a call `group.plug("name", ...)`; a group
    is told by its last part. The roles of `llm` share their declarations.
    """
    spoken: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            spoken[token.start[0]] = token.string.lstrip("# ")
    lines, found = source.split("\n"), {}
    for node in ast.walk(ast.parse(source)):
        name = declared(node)
        if not name:
            continue
        first, last = node.lineno, node.end_lineno
        parts = [spoken[n] for n in range(first, last + 1) if n in spoken]
        after = last + 1
        while parts and after in spoken and lines[after - 1].lstrip().startswith("#"):
            parts.append(spoken[after])
            after += 1
        found.setdefault(
            name, " ".join(parts) or spoken.get(first - 1, "")
        )  # above it, if it opens a group
    roles = {
        key: f"keys.{_tail(key, 1)}"
        for key in keys
        if key.count(".") == 2 and key.startswith("llm.")
    }
    return {
        key: found.get(roles.get(key, _tail(key, 2) if "." in key else f"root.{key}"), "")
        for key in keys
    }


def declared(node: ast.AST) -> str:
    """Return "group.name" of a declaration in `configs/base.py`, "" for other code. A plug declares
    its `name`."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        target = node.targets[0]
        return f"{_GROUPS.get(getattr(target.value, 'id', ''), getattr(target.value, 'id', ''))}.{target.attr}"
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "plug"
    ):
        return f"{call.args[0].value}.name"
    return ""


_GROUPS = {"held_out": "eval"}  # variables of configs/base.py that are not called as their group


def _tail(key: str, parts: int) -> str:
    return ".".join(key.split(".")[-parts:])
