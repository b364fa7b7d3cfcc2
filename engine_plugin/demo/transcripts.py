"""Readers of recorded agent sessions. The format is told from the content, never from the file's name.

mini-swe     *.jsonl: an object a line, one per model call: input (the whole flattened prompt), output, session_id
SWE-agent    *.traj: one object with history: [{role, content}], append-only
Mooncake     conversation_trace.jsonl: an object a line: input_length, hash_ids (blocks of 512 tokens, chained)
Claude Code  trace_*.json: one object with block_size and requests: [{in, hash_ids}], sub-agents nested
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine_plugin.demo.block_traces import BlockPrompt, BlockRecording
from engine_plugin.demo.errors import TranscriptError
from engine_plugin.demo.recordings import Message, Recording, TextRecording

ACCEPTED_FORMATS = (
    "mini-swe *.jsonl (lines with session_id, input, output), SWE-agent *.traj (history), Mooncake "
    "conversation_trace.jsonl (lines with input_length, hash_ids), Claude Code trace_*.json (block_size, requests)"
)
MOONCAKE_BLOCK_TOKENS = 512
_MOST_TOKENS = 2**24
Row = dict[str, Any]  # a JSON object of somebody else's file
Reader = Callable[[Path, Sequence[Row]], list[Recording]]


def read_recordings(path: Path) -> list[Recording]:
    """Every session of the file, those with most turns first. Raises TranscriptError."""
    rows = _objects(path)
    for keys, reader in _READERS:
        if all(key in rows[0] for key in keys):
            recordings = _read(reader, path, rows)
            break
    else:
        raise TranscriptError(f"{path}: not a transcript this demo reads. Accepted: {ACCEPTED_FORMATS}")
    recordings = [recording for recording in recordings if recording.num_turns]
    if not recordings:
        raise TranscriptError(f"{path}: no model call in it")
    return sorted(recordings, key=lambda recording: -recording.num_turns)


def _read(reader: Reader, path: Path, rows: Sequence[Row]) -> list[Recording]:
    try:
        return reader(path, rows)
    except TranscriptError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TranscriptError(f"{path}: a field holds another kind of value than its format says ({error})") from error


def _objects(path: Path) -> list[Row]:
    """The JSON objects of the file: one for a JSON document, one a line for JSON lines."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise TranscriptError(f"{path}: the file is empty. Accepted: {ACCEPTED_FORMATS}")
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        is_document = not _is_json(lines[0][1])
        rows = [json.loads(text)] if is_document else [_parse_line(path, number, line) for number, line in lines]
    except OSError as error:
        raise TranscriptError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number with too many digits
        raise TranscriptError(f"{path}: not JSON ({error}). Accepted: {ACCEPTED_FORMATS}") from error
    except RecursionError as error:
        raise TranscriptError(f"{path}: JSON that is nested too deep") from error
    if not all(isinstance(row, dict) for row in rows):
        raise TranscriptError(f"{path}: JSON, but not of objects. Accepted: {ACCEPTED_FORMATS}")
    return rows


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse_line(path: Path, number: int, line: str) -> Row:
    try:
        row: Row = json.loads(line)
    except ValueError as error:
        raise TranscriptError(f"{path}: line {number} is not JSON ({error})") from error
    return row


def _field(path: Path, where: str, row: Row, name: str) -> Any:
    if name not in row:
        raise TranscriptError(f"{path}: {where} has no {name!r} (it has: {', '.join(sorted(row)) or 'nothing'})")
    return row[name]


def _read_mini_swe(path: Path, rows: Sequence[Row]) -> list[Recording]:
    prompts: dict[str, list[tuple[Message, ...]]] = {}
    for number, row in enumerate(rows, 1):
        session = str(_field(path, f"call {number}", row, "session_id"))
        text = _unicode(str(_field(path, f"call {number}", row, "input")))
        prompts.setdefault(session, []).append((Message("user", text),))
    many = len(prompts) > 1
    return [TextRecording(path.stem[:12] + many * f"/{name[:8]}", calls) for name, calls in prompts.items()]


def _read_swe_agent(path: Path, rows: Sequence[Row]) -> list[Recording]:
    messages: list[Message] = []
    prompts: list[tuple[Message, ...]] = []
    for number, entry in enumerate(rows[0]["history"], 1):
        role = str(_field(path, f"history entry {number}", entry, "role"))
        if role == "assistant" and messages:
            prompts.append(tuple(messages))
        messages.append(Message(role, _text(_field(path, f"history entry {number}", entry, "content"))))
    return [TextRecording(path.name.removesuffix(".traj"), prompts)]


def _text(content: Any) -> str:
    """A message's content: a string, or (newer recordings) a list of parts of which the text ones count."""
    if isinstance(content, list):
        return _unicode("".join(str(part.get("text", "")) for part in content))
    return _unicode(str(content or ""))


def _unicode(text: str) -> str:
    """JSON can hold halves of characters, tokenizers cannot: they become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_mooncake(path: Path, rows: Sequence[Row]) -> list[Recording]:
    """Groups the requests into conversations: a request continues the one whose last full block it contains.

    Ids are chained: one shared id means that everything up to it is shared. The first block alone is a system prompt
    that all share.
    """
    conversations: list[list[BlockPrompt]] = []
    conversation_of: dict[int, int] = {}  # last full block of a conversation -> its index
    for number, row in enumerate(rows, 1):
        prompt = _block_prompt(path, f"request {number}", row, "input_length")
        ids = prompt.hash_ids.tolist()
        index = next(
            (conversation_of[block] for block in reversed(ids) if block in conversation_of), len(conversations)
        )
        if index == len(conversations):
            conversations.append([])
        conversations[index].append(prompt)
        num_full = prompt.num_tokens // MOONCAKE_BLOCK_TOKENS
        if num_full > 1:
            conversation_of[ids[num_full - 1]] = index
    return [
        BlockRecording(f"{path.stem[:12]}/{index}", prompts, MOONCAKE_BLOCK_TOKENS, path.name)
        for index, prompts in enumerate(conversations)
    ]


def _read_claude_code(path: Path, rows: Sequence[Row]) -> list[Recording]:
    """One recording for the main agent and one for each sub-agent, however deep they nest."""
    trace = rows[0]
    block_tokens = _count(path, "block_size", trace["block_size"])
    recordings: list[Recording] = []
    agents = [(str(trace.get("id", path.stem)), trace["requests"])]
    while agents:
        name, requests = agents.pop(0)
        prompts = []
        for number, request in enumerate(requests, 1):
            if request.get("type") == "subagent":
                agents.append((f"{name}/{request.get('agent_id', number)}", request.get("requests", [])))
            else:
                prompts.append(_block_prompt(path, f"request {number} of {name}", request, "in"))
        recordings.append(BlockRecording(name, prompts, block_tokens, path.name))
    return recordings


def _block_prompt(path: Path, where: str, row: Row, length_field: str) -> BlockPrompt:
    hash_ids = np.asarray(_field(path, where, row, "hash_ids"), np.int64)
    if hash_ids.ndim != 1:
        raise TranscriptError(f"{path}: hash_ids of {where} is not a list of numbers")
    return BlockPrompt(hash_ids, _count(path, f"{length_field} of {where}", _field(path, where, row, length_field)))


def _count(path: Path, what: str, value: Any) -> int:
    """A number of tokens: at least 1, and not so many that nobody can have sent them."""
    count = int(value)
    if not 1 <= count <= _MOST_TOKENS:
        raise TranscriptError(f"{path}: {what} is {count}, expected 1 to {_MOST_TOKENS:,}")
    return count


_READERS: Sequence[tuple[Sequence[str], Reader]] = (
    (("input", "output"), _read_mini_swe),
    (("history",), _read_swe_agent),
    (("input_length", "hash_ids"), _read_mooncake),
    (("block_size", "requests"), _read_claude_code),
)
