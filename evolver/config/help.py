"""`--help=WORD`: the config keys and plug arguments that a word finds, with type, default and
meaning."""

import inspect
import re
from collections.abc import Iterator

from ml_collections import ConfigDict
from pydantic import BaseModel

from evolver.config import plugs
from evolver.config.keys import flat, keys_of
from evolver.config.values import described


def search(word: str, schema: type[BaseModel], config: ConfigDict | None) -> str:
    """Return a description of every key whose name, meaning or plug holds `word`, or a sentence
    that there is none. config: the values shown as defaults, those of the schema if it is None."""
    word = word.lower()
    values = flat(config) if config else {}
    blocks = []
    for name, key in keys_of(schema).items():
        if word in f"config.{name} {key.meaning}".lower() and not name.endswith(".args"):
            value = values.get(name, key.default)
            kind = described(key.annotation)
            blocks.append(f"config.{name} ({kind}) = {value!r}\n    {key.meaning}")
    for name in plugs.KINDS:
        blocks += [f"config.{line}" for line in arguments(name, word)]
    nothing = f"no key, argument or description contains {word!r}; configs/base.py has every key"
    return "\n".join(blocks) or nothing


def arguments(key: str, word: str) -> Iterator[str]:
    """Yield "KEY.name=NAME: ..." and "KEY.args.ARGUMENT ..." for what holds the word: every
    argument of a plug if its key or its name does, otherwise those whose own name or meaning
    does."""
    for name in plugs.known(key):
        try:
            target = plugs.load(key, name)
        except plugs.PlugError:  # its packages are not installed
            continue
        parts = (target, target.__init__) if inspect.isclass(target) else (target,)
        text = "\n\n".join(inspect.getdoc(part) or "" for part in parts)
        about = " ".join(text.partition("\n\n")[0].split())
        shown = []
        for argument, p in plugs.settable(target).items():
            default = "required" if p.default is p.empty else repr(p.default)
            meaning = meaning_of(argument, text)
            line = f"{key}.args.{argument} ({described(p.annotation)}) = {default}, of {name}"
            if word in f"config.{key} {name} {argument} {meaning}".lower():
                shown.append(f"{line}\n    {meaning}".rstrip())
        if shown or word in f"config.{key} {name} {about}".lower():
            yield from (f"{key}.name={name}: {about}", *shown)


_ENTRY = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*: "  # "limit, keep: ..." in a docstring


def meaning_of(argument: str, text: str) -> str:
    """Return what a docstring says of an argument: its entry "ARGUMENT: ...", or the sentences that
    name it."""
    sentences = []
    entries = []
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
