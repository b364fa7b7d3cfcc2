"""Texts that a tokenizer may stumble over, and messages of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

TEXTS = [
    "Hello, world! It's 12345 o'clock;  two spaces,\n\n\tand a tab.",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # don't\r\n",
    "naïve café — 東京タワー 🗼👩‍👩‍👧‍👦 Ελλάδα مرحبا",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    " leading and trailing ",
    "",
    "\x00\x01 controls \x7f",
]


@dataclass
class Message:
    """What the tokenizer asks of one (`ChatMessage`)."""

    role: str
    content: str
