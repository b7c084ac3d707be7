"""Byte-level BPE tokenizers as Qwen's: trained, for policies that begin from nothing, or built from
merges that another format holds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as bpe_models

from models.tokenizer import PRE_TOKENIZER, Tokenizer, TokenizerError

# Qwen2.5's added tokens in the order of their ids.
ADDED = """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>
    <|image_pad|> <|video_pad|>
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
    <|repo_name|> <|file_sep|>
"""
# The flag is True for those that Qwen marks as special: the first fourteen.
QWEN_TOKENS = tuple((name, number < 14) for number, name in enumerate(ADDED.split()))


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
    model = byte_level(bpe_models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=budget, initial_alphabet=alphabet, show_progress=False)
    # Added tokens split the text before BPE sees it, so merges across them would never be used.
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    splitter = re.compile("|".join(map(re.escape, longest_first)))
    pieces = itertools.chain.from_iterable(map(splitter.split, texts))
    model.train_from_iterator(filter(None, pieces), trainer)
    model.add_tokens(added)
    return Tokenizer(model.to_str())


def byte_level(bpe: bpe_models.BPE) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text in Qwen's way."""
    model = tokenizers.Tokenizer(bpe)
    model.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated", invert=False)
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    model.decoder = decoders.ByteLevel()
    return model
