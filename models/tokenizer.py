"""A checkpoint's tokenizer with its chat template.

Only templates produce control tokens (`<|im_start|>`, every other `<|...|>`, and what the tokenizer
calls special). `encode` treats their spelling as plain text, so nothing that a user or an
environment writes can open or close a turn. The tags of a tool call are text, too: Qwen's
tokenizers make one token of each, and others spell them with several.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models import hf_config, jinja
from models.files import BrokenFile, read_text, write_atomically, write_json
from models.jinja import MARK, QWEN3, QWEN25, SWITCH, ChatError, ChatTemplate, thoughtless

# Qwen2/2.5's pre-tokenizer. `transformers` uses this same expression for every model of type qwen2.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Long runs of one character, on which expressions such as (a+)+$ need exponential time.
RUNS = "\0".join(40 * chr(code) for code in range(32, 127))
LONG = 2**13  # characters from which encoding lets other threads run
COMPOSED = 4  # most characters that Unicode's composition makes one of
OLDER = ("tokenizer.model", "vocab.json", "tekken.json")  # than tokenizer.json
REQUIRED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # of ChatML
KNOWN = {"qwen2.5": QWEN25, "qwen3": QWEN3}  # chat templates that are ours, too
NAMES = {QWEN25: "Qwen2.5's", QWEN3: "Qwen3's"}
VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")  # of templates


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or that lacks tokens of the chat template."""


class Tokenizer:
    """A tokenizer, built from the JSON of a `tokenizers.Tokenizer`.

    Attributes: `stops`, the ids that end a turn, first that of the template; `vocab_size`: ids are
    below it, but a model's embedding may have more rows. `template` is the chat template, and
    `rendering` says which one. `thinking` is None for one without a thinking switch, and else a
    bool: whether the model may think before it answers. `calls` is the name of the format in which
    the model calls tools, "" = as the template writes calls. With ChatML's tokens there are
    `im_start`, `im_end` and `endoftext`.

    template: the Jinja text of the checkpoint's own template, "" = it has none. render: "auto" =
    that, or Qwen2.5's for ChatML's tokens without one; "qwen2.5" and "qwen3" = theirs. settings:
    the content of tokenizer_config.json. ends: ids that other files name as ends of turns.
    """

    def __init__(
        self,
        json_text: str,
        source: str = "tokenizer",
        template: str = "",
        *,
        render: str = "auto",
        settings: Mapping[str, Any] | None = None,
        ends: Iterable[int] = (),
    ):
        self._settings = dict(settings or {})
        added, stated = self._read(json_text, source)
        missing = [name for name in REQUIRED if name not in added]
        if missing and (render != "auto" or template in ("", QWEN25)):
            needs = "Qwen2.5's template" if render == "auto" else f"template.render={render}"
            raise TokenizerError(
                f"{source}: lacks the special tokens {', '.join(missing)} of ChatML, which {needs}"
                f" needs{'' if template else ', and has no chat template of its own'}. Rename"
                " reserved tokens of its tokenizer.json to these, or choose a checkpoint that has"
                f" {'them' if template else 'a chat_template.jinja'}"
            )
        self._check_ids(added, stated, source)
        actual = self._original.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(actual.values())
        self._longest = max(map(len, actual))  # characters of a token, which spells bytes or text
        self._header: list[int] = []  # of a turn, if it has the same ids alone
        self.kept: dict[str, list[int]] = {}  # by models/chat.py: ids of what the template writes
        self.calls: str = self._settings.get("call_format", "")
        if not missing:
            self.endoftext, self.im_start, self.im_end = (added[name] for name in REQUIRED)
        self._named = {
            key: token["content"] if isinstance(token, dict) else token
            for key in VARIABLES
            if (token := self._settings.get(key))
        }
        listed = {id: name for name, id in self._control.items()}
        self._choose(source, template, render, [listed[id] for id in ends if id in listed])

    def _read(
        self, json_text: str, source: str
    ) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
        """Make the tokenizer that decodes and the one that encodes text, in which the spelling of
        control tokens is plain text. Return {added token: id}, and (file, added token, the id that
        it states)."""
        try:
            spec = json.loads(json_text)
            listed = {token["content"]: token for token in spec["added_tokens"]}
            stated = [("tokenizer.json", name, token["id"]) for name, token in listed.items()]
            for id, token in (self._settings.get("added_tokens_decoder") or {}).items():
                stated.append(("tokenizer_config.json", token["content"], int(id)))
                held = listed.setdefault(token["content"], {"id": int(id), **token})
                held["special"] |= token["special"]
            spec["added_tokens"] = list(listed.values())
            self._original = tokenizers.Tokenizer.from_str(json.dumps(spec))
            added = {name: token["id"] for name, token in listed.items()}
            self._control = {}
            for token in spec["added_tokens"]:
                name = token["content"]
                if token["special"] or (name.startswith("<|") and name.endswith("|>")):
                    self._control[name] = token["id"]
                    token["content"] = MARK + name
            # Neither may add to what is encoded, nor cut it.
            spec |= {"truncation": None, "padding": None, "post_processor": None}
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises bare Exception on malformed files
            raise TokenizerError(
                f"{source}: tokenizer.json cannot be read with the tokens of tokenizer_config.json"
                f" ({error})"
            ) from None
        return added, stated

    def _check_ids(
        self, added: Mapping[str, int], stated: Sequence[tuple[str, str, int]], source: str
    ) -> None:
        """Raise TokenizerError if added tokens have other ids than the files state, or if text can
        spell a control token. Learn which ids of the encoder stand for other ones."""
        actual = self._original.get_vocab(with_added_tokens=True)
        for file, name, id in stated:
            if actual.get(name) != id:
                raise TokenizerError(
                    f"{source}: {file} gives {name} the id {id}, and it is read as"
                    f" {actual.get(name)}: it has a hole"
                )
        # A control token of the model's own vocabulary has another id in the encoder.
        known = self._encoder.get_added_tokens_decoder()
        ids = {id: added[token.content.removeprefix(MARK)] for id, token in known.items()}
        self._ids = {id: own for id, own in ids.items() if id != own}
        try:
            with _without_stderr():  # where Rust prints a backtrace
                self.encode(RUNS)
        except TokenizerError as error:
            raise TokenizerError(f"{source}: {error}") from None
        controls = set(self._control.values())
        if forged := [name for name in self._control if controls & set(self.encode(name))]:
            raise TokenizerError(
                f"{source}: the text {forged[0]} has the id of the control token, so that anybody"
                " could write it"
            )

    def _choose(self, source: str, template: str, render: str, ends: Sequence[str]) -> None:
        """Set the chat template. Raises TokenizerError if there is none that can be used."""
        own = template.replace(thoughtless(""), "")
        self._source = KNOWN.get(render, own or QWEN25)
        self.rendering = NAMES.get(self._source, "the checkpoint's own")
        if render in KNOWN:
            self.rendering += f", as template.render={render} says"
        elif not template:
            self.rendering += ", for want of its own"
        chatml, off = hasattr(self, "im_end"), own != template
        try:
            listed = [] if self._source in NAMES else [self._named.get("eos_token", ""), *ends]
            self.template = ChatTemplate(
                self._source,
                tokens=self._named,
                controls=list(self._control),
                ends=[end for end in listed if end in self._control],
            )
            switched: list[dict[str, Any]] = [{}, {SWITCH: True}, {SWITCH: False}]
            asked, on, without = (self.template.text([jinja.ASKED], **s) for s in switched)
            self.thinking = None if on == without else not off and asked != without
            self.switches = {SWITCH: False} if self.thinking is False else {}
            header, turn = self._encode(self.template.header), self.template.header + jinja.SAID
            if header + self.encode(jinja.SAID) == self._encode(turn):
                self._header = header
            if self._source not in NAMES:
                self.template.check(self.encode_marked)
        except ChatError as error:
            other = "template.render=qwen2.5 or qwen3 chooses a known one"
            other = other if chatml else "it lacks ChatML's tokens, which the known ones need"
            raise TokenizerError(f"{source}: {error} ({other})") from None
        stops = [self._control[end] for end in self.template.ends]
        self.stops = tuple(dict.fromkeys([*stops, *([self.endoftext] if chatml else [])]))
        if rewrites := self.template.rewrites:
            self.rendering += f", which rewrites the past ({rewrites}): what was sampled stays"

    @classmethod
    def load(cls, path: str | Path, render: str = "auto", calls: str = "auto") -> Tokenizer:
        """Load `tokenizer.json`, given its path or that of a model directory, or what
        `transformers` makes of the files that came before it, with the chat template beside it.
        calls: the format of calls, "auto" = that which was saved, if any.

        Raises TokenizerError.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            settings, ends = _settings_of(file.parent), set[int]()
            if file.is_file():
                text = read_text(file)
            else:
                text, named = _converted(Path(path))
                settings = named | settings
            template = _template_of(file.parent, settings)
        except (OSError, BrokenFile, hf_config.ModelError) as error:
            raise TokenizerError(str(error)) from None
        with contextlib.suppress(hf_config.ModelError):  # an older or a partial checkpoint
            ends = set[int]().union(*hf_config.end_tokens(file.parent).values())
        settings |= {} if calls == "auto" else {"call_format": calls}
        return cls(text, str(path), template, render=render, settings=settings, ends=sorted(ends))

    def id_of(self, variable: str) -> int:
        """Return the id of the token that its files name as "bos_token" or "pad_token"."""
        return self._control.get(self._named.get(variable), self.stops[-1])

    def with_thinking(self, thinking: bool) -> Tokenizer:
        """Return this tokenizer with the thinking switch turned on or off. Raises TokenizerError if
        there is no switch."""
        if self.thinking is None:
            raise TokenizerError(
                f"the chat template of this tokenizer is {self.rendering}, which has no thinking"
                " switch"
            )
        other = copy.copy(self)
        other.thinking, other.switches = thinking, {SWITCH: thinking}
        return other

    def encode(self, text: str) -> list[int]:
        """Return the ids of text by a user, an environment or a model. No id is that of a control
        token. Raises TokenizerError where the tokenizer's own expressions fail."""
        return self._encode(text.replace(MARK, "\ufffd"))

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of text by a template: a control token stands behind a `MARK`. A turn is
        encoded apart from its header, as when the model itself writes it. Raises TokenizerError."""
        first, *turns = text.split(self.template.header) if self._header else [text]
        ids = self._encode(first)
        for turn in turns:
            ids += self._header + self._encode(turn)
        return ids

    def _encode(self, text: str) -> list[int]:
        text = _well_formed(text)
        try:
            if len(text) < LONG:
                ids = self._encoder.encode(text, add_special_tokens=False).ids
            else:
                ids = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return [self._ids.get(id, id) for id in ids] if self._ids else ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; it is no Exception
                raise
            raise TokenizerError(
                f"tokenizer.json cannot split every text ({error}): its pre-tokenizer's expression"
                " backtracks without end"
            ) from None

    def least(self, text: str) -> int:
        """Return a number of ids that those of a text are not fewer than, from its length alone."""
        return len(text) // (self._longest if text.isascii() else self._longest * COMPOSED)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with control tokens spelled out. Bytes that are not UTF-8 become
        U+FFFD."""
        return self._original.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """Return the content of its tokenizer.json."""
        return self._original.to_str(pretty=False)

    def save(self, path: str | Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` builds the same tokenizer."""
        folder = Path(path)
        text = self.to_json()
        # Qwen2Tokenizer would split text in Qwen's way.
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self._source not in NAMES:
            config |= {k: held for k, held in self._settings.items() if k != "chat_template"}
        else:
            split = json.dumps(PRE_TOKENIZER, ensure_ascii=False) in text
            config = _TOKENIZER_CONFIG | ({} if split else config)
        if self.calls:
            config["call_format"] = self.calls
        write_atomically(folder / "tokenizer.json", text)
        write_json(folder / "tokenizer_config.json", config)
        template = thoughtless(self._source) if self.thinking is False else self._source
        write_atomically(folder / "chat_template.jinja", template)


_TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "model_max_length": 131072,
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": False,
}


def _settings_of(folder: Path) -> dict[str, Any]:
    """Return what special_tokens_map.json and tokenizer_config.json hold, as far as they are there.
    Raises ModelError."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            found |= hf_config.read(folder, name)
    return found


def _converted(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the tokenizer.json that `transformers` makes of the files that came before it, and the
    tokens that it names. Raises TokenizerError.

    A tokenizer.json is read as it is: `AutoTokenizer` changes the ids of some, such as all of
    models of type qwen2 that do not split text in Qwen's way.
    """
    older = [name for name in OLDER if (folder / name).is_file()]
    if not older:
        raise TokenizerError(f"{folder}: no tokenizer.json")
    library = hf_config.transformers()
    try:
        made = library.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return made.backend_tokenizer.to_str(), made.special_tokens_map
    except Exception as error:  # it raises a dozen types
        raise TokenizerError(
            f"{folder}: no tokenizer.json, and transformers can make none of {', '.join(older)}:"
            f" {' '.join(str(error).split())}"
        ) from None


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the chat template in a model directory, "" if it has none: a file, or an entry of its
    tokenizer's. Raises BrokenFile and OSError."""
    try:
        return read_text(folder / "chat_template.jinja")
    except FileNotFoundError:
        found = settings.get("chat_template")
    if isinstance(found, list):  # several templates by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), "")
    return found if isinstance(found, str) else ""


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _well_formed(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates, which JSON can express but UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
