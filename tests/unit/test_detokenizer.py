"""Tokens to text as they come: whole characters, stop strings, bounded work."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine_plugin.engine.detokenizer import CONTEXT_TOKENS, MAX_UNREAD_TOKENS, TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte is a token; ids from 256 up are special tokens without text."""
    return bytes(one for one in ids if one < 256).decode("utf-8", errors="replace")


def stream(text: bytes, stop: Sequence[str] = (), tail: Sequence[int] = ()) -> tuple[list[str], str | None]:
    """The pieces in which a reader gets the text, and the stop string if one ended it."""
    output = TextStream(decode_bytes, tail, stop)
    pieces, matched = [], None
    for byte in text:
        matched = output.push(byte)
        if matched is not None:
            break
        pieces.append(output.take(final=False))
    return [*pieces, output.take(final=True)], matched


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "a😀b😀", "", "é"])
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces, matched = stream(text.encode())
    assert "".join(pieces) == text
    assert matched is None
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_end_is_shown_at_the_end() -> None:
    assert "".join(stream("ab😀".encode()[:-1])[0]) == "ab\ufffd"


def test_bytes_that_never_become_a_character_do_not_hold_the_text_back() -> None:
    pieces, _ = stream(b"\xff" * (MAX_UNREAD_TOKENS + 1) + b"after")
    assert "".join(pieces).endswith("after")
    assert "\ufffd" in "".join(pieces[: MAX_UNREAD_TOKENS + 1])


def test_a_stop_string_ends_the_text_before_it() -> None:
    pieces, matched = stream(b"one STOP two", ["STOP"])
    assert ("".join(pieces), matched) == ("one ", "STOP")


def test_the_earliest_stop_string_wins() -> None:
    assert stream(b"abcdef", ["cd", "bcd"])[1] == "bcd"


def test_no_piece_of_a_stop_string_is_ever_shown() -> None:
    pieces, matched = stream(b"x<en <end>", ["<end>"])
    assert matched == "<end>"
    assert "".join(pieces) == "x<en "
    shown = ""
    for piece in pieces:
        shown += piece
        assert "x<en ".startswith(shown)


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    pieces, matched = stream(b"x<en", ["<end>"])
    assert (pieces[:-1], pieces[-1], matched) == (["x", "", "", ""], "<en", None)


def test_the_prompts_end_is_context_but_not_output() -> None:
    pieces, matched = stream(b"b", ["ab"], tail=list(b"xxxxxa"))
    assert ("".join(pieces), matched) == ("b", None)


def test_tokens_without_text_keep_the_window_small() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    output = TextStream(decode, [], ())
    for token in [300] * 200 + [255] * 200 + list(b"text" * 50):
        output.push(token)
    assert longest <= 2 * MAX_UNREAD_TOKENS + CONTEXT_TOKENS


@pytest.mark.parametrize("seed", range(20))
def test_random_text_and_stops_against_a_search_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("abé😀") for _ in range(60))
    stop = ["".join(rng.choice("abé😀") for _ in range(rng.randrange(2, 6))) for _ in range(2)]
    pieces, matched = stream(text.encode(), stop)
    ends = [(text.find(word) + len(word), word) for word in stop if word in text]
    if not ends:
        assert ("".join(pieces), matched) == (text, None)
        return
    first_end = min(ends)[0]
    expected = min((text.find(word), word) for end, word in ends if end == first_end)
    assert ("".join(pieces), matched) == (text[: expected[0]], expected[1])
