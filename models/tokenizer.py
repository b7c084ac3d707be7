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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as bpe_models

from models import chat, hf_config
from models.files import write_atomically
from models.jinja import ASKED, MARK, TOOL, ChatTemplate
from models.template import JINJA, SWITCH, ChatError, thoughtless

# Qwen2/2.5's pre-tokenizer. `transformers` uses this same expression for every model of type qwen2.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen2.5's added tokens in the order of their ids; the flag is True for those that Qwen marks as
# special.
QWEN_TOKENS = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
)
# Long runs of one character, on which expressions such as (a+)+$ need exponential time.
RUNS = "\0".join(40 * chr(code) for code in range(32, 127))
LONG = 2**13  # characters from which encoding lets other threads run
COMPOSED = 4  # most characters that Unicode's composition makes one of
REQUIRED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # of ChatML
RENDERS = ("auto", "qwen2.5", "qwen3")
VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")  # of templates


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or that lacks tokens of the chat template."""


class Tokenizer:
    """A tokenizer, built from the JSON of a `tokenizers.Tokenizer`.

    Attributes: `stops`, the ids that end a turn, first that of the template; `vocab_size`: ids are
    below it, but a model's embedding may have more rows. `rendering` says which chat template it
    is. `thinking` is None for one without a thinking switch, and else a bool: whether the model may
    think before it answers. `template` is None for Qwen2.5's and Qwen3's, which models/chat.py
    writes itself; with ChatML's tokens there are `im_start`, `im_end` and `endoftext`.

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
        try:
            spec = json.loads(json_text)
            self._original = tokenizers.Tokenizer.from_str(json_text)
            added = {token["content"]: token["id"] for token in spec["added_tokens"]}
            self._control = {}
            for token in spec["added_tokens"]:
                if token["special"] or _is_control(token["content"]):
                    self._control[token["content"]] = token["id"]
                    token["content"] = MARK + token["content"]
            # Neither may add to what is encoded, nor cut it.
            spec |= {"truncation": None, "padding": None, "post_processor": None}
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises bare Exception on malformed files
            raise TokenizerError(f"{source}: tokenizer.json cannot be read ({error})") from None
        missing = [name for name in REQUIRED if name not in added]
        if missing and (render != "auto" or template in ("", JINJA)):
            needs = "Qwen2.5's template needs"
            needs = f"template.render={render} needs" if render != "auto" else needs
            raise TokenizerError(
                f"{source}: lacks the special tokens {', '.join(missing)} of ChatML, which {needs}"
                f"{'' if template else ', and has no chat template of its own'}. Rename reserved"
                " tokens of its tokenizer.json to these, or choose a checkpoint that has"
                f" {'them' if template else 'a chat_template.jinja'}"
            )
        actual = self._original.get_vocab(with_added_tokens=True)
        if moved := [
            (name, id, actual.get(name)) for name, id in added.items() if actual.get(name) != id
        ]:
            name, stated, id = moved[0]
            raise TokenizerError(
                f"{source}: tokenizer.json gives {name} the id {stated}, and it is read as {id}: it"
                " has a hole"
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
        self.vocab_size = 1 + max(actual.values())
        self._longest = max(map(len, actual))  # characters of a token, which spells bytes or text
        self._settings = dict(settings or {})
        if not missing:
            self.endoftext, self.im_start, self.im_end = (added[name] for name in REQUIRED)
        self._choose(source, template, render, [id for id in ends if id in controls])

    def _choose(self, source: str, template: str, render: str, ends: Sequence[int]) -> None:
        """Set the chat template. Raises TokenizerError if there is none that can be used."""
        self.template: ChatTemplate | None = None
        self._source, self.switches = template or JINJA, dict[str, bool]()
        chatml, switched = hasattr(self, "im_end"), SWITCH in template
        off = thoughtless("") in template
        if chatml:
            self.stops: tuple[int, ...] = (self.im_end, self.endoftext)
        if template in ("", JINJA) or render != "auto":
            self.thinking = None if render != "qwen3" else not off
            self.rendering = "Qwen3's" if render == "qwen3" else "Qwen2.5's"
            self.rendering += ", as template.render says" if render != "auto" else ""
            self._source = template if switched and render == "qwen3" else JINJA
            self.rendering += ", for want of its own" if not template else ""
            return
        try:
            own = self._own(template.replace(thoughtless(""), ""), ends)
            known = [("Qwen3's", not off)] * switched + [("Qwen2.5's", None)]
            for self.rendering, self.thinking in known if chatml else ():
                if self._writes_as(own):
                    return
            own.check(self.encode_marked)
            self.template, self.thinking = own, None
            if switched:
                asked = own.text([ASKED])
                self.thinking = not off and asked != own.text([ASKED], enable_thinking=False)
                self.switches = {SWITCH: False} if off else {}
        except ChatError as error:
            other = "template.render=qwen2.5 or qwen3 chooses a known one"
            other = other if chatml else "it lacks ChatML's tokens, which the known ones need"
            raise TokenizerError(f"{source}: {error} ({other})") from None
        stops = [self._control[end] for end in own.ends] + ([self.endoftext] if chatml else [])
        self.stops = tuple(dict.fromkeys(stops))
        self.rendering = "the checkpoint's own"
        if own.rewrites:
            self.rendering += f", which rewrites the past ({own.rewrites}): what was sampled stays"

    def _own(self, template: str, ends: Iterable[int]) -> ChatTemplate:
        names = {id: name for name, id in self._control.items()}
        named = {key: self._settings.get(key) for key in VARIABLES}
        tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if v}
        eos = [tokens["eos_token"]] if tokens.get("eos_token") in self._control else []
        return ChatTemplate(
            template,
            tokens=tokens,
            controls=list(self._control),
            ends=[*eos, *(names[id] for id in ends)],
        )

    def _writes_as(self, own: ChatTemplate) -> bool:
        """Return True if models/chat.py writes the same ids on all probes as a template, with
        thoughts on and off if there is a switch."""
        for thinking in (None,) if self.thinking is None else (True, False):
            one = self if thinking is None else self.with_thinking(thinking)
            switches = {} if thinking is None else {SWITCH: thinking}
            for messages in chat.PROBES:
                for tools in ([], [TOOL], [TOOL, TOOL]):
                    try:
                        ids = self.encode_marked(own.text(messages, tools, **switches))
                    except ChatError:
                        return False
                    if ids != chat.opening(one, messages, tools):
                        return False
        return True

    @classmethod
    def load(cls, path: str | Path, render: str = "auto") -> Tokenizer:
        """Load `tokenizer.json`, given its path or that of a model directory, with the chat
        template beside it.

        Raises TokenizerError.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise TokenizerError(f"{path}: no tokenizer.json")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: tokenizer.json is not UTF-8 text ({error})") from None
        settings, ends = _settings_of(file.parent), set[int]()
        with contextlib.suppress(hf_config.ModelError):  # an older or a partial checkpoint
            ends = set[int]().union(*hf_config.end_tokens(file.parent).values())
        template = _template_of(file.parent, settings)
        return cls(text, str(path), template, render=render, settings=settings, ends=sorted(ends))

    @property
    def bos(self) -> int:
        """The id of the token that begins a text."""
        return self._named("bos_token")

    @property
    def pad(self) -> int:
        """The id of the token that fills up."""
        return self._named("pad_token")

    def _named(self, key: str) -> int:
        name = self._settings.get(key) if self.template else None
        name = name["content"] if isinstance(name, dict) else name
        return self._control.get(name, self.stops[-1])

    def with_thinking(self, thinking: bool) -> Tokenizer:
        """Return this tokenizer with the thinking switch turned on or off. Raises TokenizerError if
        there is no switch."""
        if self.thinking is None:
            raise TokenizerError(
                f"the chat template of this tokenizer is {self.rendering}, which has no thinking"
                " switch"
            )
        other = copy.copy(self)
        other.thinking = thinking
        other.switches = {SWITCH: thinking} if self.template else {}
        return other

    def encode(self, text: str) -> list[int]:
        """Return the ids of text by a user, an environment or a model. No id is that of a control
        token. Raises TokenizerError where the tokenizer's own expressions fail."""
        return self.encode_marked(text.replace(MARK, "\ufffd"))

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of text by a template: a control token stands behind a `MARK`. Raises
        TokenizerError."""
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
        config = dict(_TOKENIZER_CONFIG)
        if self.template:
            config = self._settings
            config.pop("chat_template", None)
        elif json.dumps(PRE_TOKENIZER, ensure_ascii=False) not in text:
            config["tokenizer_class"] = (
                "PreTrainedTokenizerFast"  # Qwen2Tokenizer would split text in Qwen's way
            )
        write_atomically(folder / "tokenizer.json", text)
        write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        template = self._source.replace(thoughtless(""), "")
        write_atomically(
            folder / "chat_template.jinja",
            thoughtless(template) if self.thinking is False else template,
        )


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


def train_bpe(texts: Iterable[str], vocab_size: int, extra_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE with Qwen's pre-tokenizer and special tokens.

    vocab_size: the largest size of the whole vocabulary, which holds the bytes, the merges, Qwen's
    added tokens and `extra_tokens`; it is smaller if the texts have nothing left to merge.
    extra_tokens: strings that always become one id, such as the punctuation of a tool call. The
    same texts in the same order give the same tokenizer.
    """
    added = [AddedToken(name, special=special, normalized=False) for name, special in QWEN_TOKENS]
    added += [AddedToken(text, special=False, normalized=False) for text in extra_tokens]
    budget = vocab_size - len(added)
    if budget < 256:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: bytes and added tokens need {256 + len(added)}"
        )
    model = tokenizers.Tokenizer(bpe_models.BPE())
    model.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=budget, initial_alphabet=alphabet, show_progress=False)
    # Added tokens split the text before BPE sees it, so merges across them would never be used.
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    splitter = re.compile("|".join(map(re.escape, longest_first)))
    model.train_from_iterator(
        (piece for text in texts for piece in splitter.split(text) if piece), trainer
    )
    model.add_tokens(added)
    return Tokenizer(model.to_str())


def _settings_of(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, {} if it cannot be read."""
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # an older or a partial checkpoint: models.hf reports its needs
        return {}
    return found if isinstance(found, dict) else {}


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the chat template in a model directory, "" if it has none: a file, or an entry of its
    tokenizer's."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
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


def _is_control(token: str) -> bool:
    return token.startswith("<|") and token.endswith("|>")


def _well_formed(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates, which JSON can express but UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
