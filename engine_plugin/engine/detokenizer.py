"""Output tokens to text, token by token, with stop strings.

DESIGN. A token need not be a whole character, and a decoder may look at its neighbours. So a window of tokens is
decoded twice, without and with the new ones, and the difference is the new text; it waits while it ends in the
replacement character, which is what half a character decodes to. Text that could still become a stop string is held
back, so that a stream never shows a piece of one. Windows are bounded, so the work per token is too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_plugin.engine.request import OutputText

CONTEXT_TOKENS = 5
"""Tokens before the new ones that the decoder may look at (leading spaces of word pieces)."""

MAX_UNREAD_TOKENS = 8
"""A character has at most 4 bytes: what is still no character after so many tokens is taken as it decodes."""

Decode = Callable[[Sequence[int]], str]


class NoText(OutputText):
    """For an engine without a tokenizer: ids only."""

    def push(self, token_id: int) -> str | None:
        """Nothing to find."""
        return None

    def take(self, *, final: bool) -> str:
        """Nothing to say."""
        return ""


class TextStream(OutputText):
    """The text of one request's output. `decode` turns ids into text, special tokens dropped or kept as asked."""

    def __init__(self, decode: Decode, prompt_tail: Sequence[int], stop: Sequence[str]) -> None:
        self._decode = decode
        self._ids = list(prompt_tail[-CONTEXT_TOKENS:])
        self._window_start = 0
        self._window_read = len(self._ids)  # the text of ids [.., _window_read) is in _text, or is the prompt's
        self._stop = tuple(stop)
        self._longest_stop = max((len(word) for word in self._stop), default=0)
        self._text = ""
        self._num_taken = 0

    def push(self, token_id: int) -> str | None:
        """Take one token; the stop string that is complete now, if any: the text ends before it."""
        self._ids.append(token_id)
        new_text = self._unread_text()
        num_unread = len(self._ids) - self._window_read
        if new_text.endswith("\ufffd") and num_unread < MAX_UNREAD_TOKENS:
            return None
        if new_text:
            self._window_start = max(self._window_read, len(self._ids) - MAX_UNREAD_TOKENS)
        else:  # tokens without text: keep the context, but not for ever
            self._window_start = max(self._window_start, len(self._ids) - CONTEXT_TOKENS)
        self._window_read = len(self._ids)
        return self._append(new_text)

    def take(self, *, final: bool) -> str:
        """Text that became certain since the last call; with `final` also a held-back or incomplete end."""
        if final:
            self._text += self._unread_text()
            self._window_read = len(self._ids)
        end = len(self._text) if final else len(self._text) - self._num_held_back()
        taken, self._num_taken = self._text[self._num_taken : end], max(end, self._num_taken)
        return taken

    def _unread_text(self) -> str:
        before = self._decode(self._ids[self._window_start : self._window_read])
        after = self._decode(self._ids[self._window_start :])
        return after[len(before) :]

    def _append(self, text: str) -> str | None:
        search_from = max(0, len(self._text) - self._longest_stop + 1)
        self._text += text
        found = [(at, word) for word in self._stop if (at := self._text.find(word, search_from)) >= 0]
        if not found:
            return None
        at, word = min(found)
        self._text = self._text[:at]
        return word

    def _num_held_back(self) -> int:
        """Characters at the end of the text that begin a stop string."""
        longest = min(self._longest_stop - 1, len(self._text) - self._num_taken)
        for length in range(longest, 0, -1):
            if any(word.startswith(self._text[-length:]) for word in self._stop):
                return length
        return 0
