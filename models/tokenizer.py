"""Byte-level BPE with the special tokens of ChatML.

Only templates produce control tokens (`<|im_start|>` and every other `<|...|>`). `encode` treats
their spelling as plain text, so nothing that a user or an environment writes can open or close a
turn. The tags of a tool call are text,
too: Qwen's tokenizers make one token of each, and others spell them with several.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as bpe_models

from models.files import write_atomically
from models.template import JINJA, SWITCH, thoughtless

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
REQUIRED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or that lacks tokens of the chat template."""


class Tokenizer:
    """A tokenizer, built from the JSON of a `tokenizers.Tokenizer`.

    Attributes: the ids `endoftext`, `im_start` and `im_end`, and `vocab_size`: ids are below it,
    but a model's embedding may have more rows. `thinking` is None for Qwen2.5's chat template, and
    a bool for Qwen3's: whether the model may think before it answers.

    template: the Jinja text of the checkpoint's own template, if it is Qwen3's; "" = Qwen2.5's.
    """

    def __init__(self, json_text: str, source: str = "tokenizer", template: str = ""):
        try:
            spec = json.loads(json_text)
            self._original = tokenizers.Tokenizer.from_str(json_text)
            for token in spec["added_tokens"]:
                token["special"] |= _is_control(token["content"])
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises bare Exception on malformed files
            raise TokenizerError(f"{source}: tokenizer.json cannot be read ({error})") from None
        self._encoder.encode_special_tokens = (
            True  # encodes the spelling of a special token as plain text
        )
        added = {token["content"]: token["id"] for token in spec["added_tokens"]}
        missing = [name for name in REQUIRED if name not in added]
        if missing:
            raise TokenizerError(
                f"{source}: lacks the special tokens {', '.join(missing)} of ChatML, the only chat"
                " template here. Rename reserved tokens of its tokenizer.json to these, or choose a"
                " checkpoint that has them"
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
        try:
            with _without_stderr():  # where Rust prints a backtrace
                self.encode(RUNS)
        except TokenizerError as error:
            raise TokenizerError(f"{source}: {error}") from None
        self.endoftext, self.im_start, self.im_end = (added[name] for name in REQUIRED)
        self.vocab_size = 1 + max(actual.values())
        self._longest = max(map(len, actual))  # characters of a token, which spells bytes or text
        switched = SWITCH in template
        self._template = template if switched else JINJA
        self.thinking = None if not switched else thoughtless("") not in template

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
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
            return cls(text, source=str(path), template=_template_of(file.parent))
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: tokenizer.json is not UTF-8 text ({error})") from None

    def with_thinking(self, thinking: bool) -> Tokenizer:
        """Return this tokenizer with Qwen3's switch turned on or off. Raises TokenizerError if
        there is no switch."""
        if self.thinking is None:
            raise TokenizerError(
                "the chat template of this tokenizer is Qwen2.5's, which has no thinking switch"
            )
        other = copy.copy(self)
        other.thinking = thinking
        return other

    def encode(self, text: str) -> list[int]:
        """Return the ids of text by a user, an environment or a model. No id is that of a control
        token. Raises TokenizerError where the tokenizer's own expressions fail."""
        text = _well_formed(text)
        try:
            if len(text) < LONG:
                return self._encoder.encode(text, add_special_tokens=False).ids
            return self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
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
        if json.dumps(PRE_TOKENIZER, ensure_ascii=False) not in text:
            config["tokenizer_class"] = (
                "PreTrainedTokenizerFast"  # Qwen2Tokenizer would split text in Qwen's way
            )
        write_atomically(folder / "tokenizer.json", text)
        write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        template = self._template.replace(thoughtless(""), "")
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


def _template_of(folder: Path) -> str:
    """Return the chat template in a model directory, "" if it has none: a file, or an entry of its
    tokenizer's."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        pass
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get(
            "chat_template"
        )
    except (
        OSError,
        ValueError,
        AttributeError,
    ):  # an older or a partial checkpoint: `models.hf` reports what it needs
        return ""
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
