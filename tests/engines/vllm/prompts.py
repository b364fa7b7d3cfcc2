"""Prompts as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.engines.vllm import settings


def random_tokens(seed: int, count: int, vocab: int = settings.TINY_VOCAB) -> list[int]:
    """The same for every call."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def text_tokens(count: int) -> list[int]:
    """The beginning of a real text, in SmolLM2's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(settings.MODELS / settings.SMOLLM2 / "tokenizer.json"))
    folder = Path(json.__file__).parent
    text = "\n".join((folder / name).read_text() for name in ("decoder.py", "encoder.py", "scanner.py"))
    ids: list[int] = tokenizer.encode(text).ids
    assert len(ids) >= count, f"the text has {len(ids)} tokens"
    return ids[:count]
