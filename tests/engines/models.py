"""Where an engine's environment has the models that `checkpoint.py` made, and a text in SmolLM2's tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

MODELS = Path(sys.prefix).parent / "models"
SMOLLM2 = "smollm2-135m"


def text_tokens(count: int, first: int = 0) -> list[int]:
    """A piece of a real text, in SmolLM2's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / SMOLLM2 / "tokenizer.json"))
    folder = Path(json.__file__).parent
    text = "\n".join((folder / name).read_text() for name in ("decoder.py", "encoder.py", "scanner.py"))
    ids: list[int] = tokenizer.encode(text).ids
    assert len(ids) >= first + count, f"the text has {len(ids)} tokens"
    return ids[first : first + count]
