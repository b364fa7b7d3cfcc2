"""Agent sessions made of files at hand: this package's own sources and the Python standard library.

Each session is one agent at work: a system prompt with its tool list (the same for all), a task, then turn by turn a
scripted reply and the file contents it asked for. Replies come from the script: no prompt depends on a model's answer.
"""

import functools
import importlib.util
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_plugin.demo.errors import SessionError
from engine_plugin.demo.recordings import Encoder, Message, Session

_OWN_PACKAGES = ("cachekernels", "storage_backends", "cachesvc", "engine_plugin")
_LIBRARY_PACKAGES = (
    "asyncio",
    "http",
    "json",
    "email",
    "logging",
    "concurrent",
    "importlib",
    "urllib",
    "multiprocessing",
)
_DEFINITION = re.compile(r"^\s*(?:class|def|async def) (\w+)")
_MAX_NAMES = 12
File = tuple[Path, str]  # and the name to show

_TOOLS = (
    ("read_file", "Returns lines of a text file of the repository.", {"path": "string", "first_line": "integer"}),
    ("search", "Returns the lines that match a regular expression, with file and line.", {"pattern": "string"}),
    ("run_tests", "Runs the tests of one folder and returns the failures.", {"folder": "string"}),
    ("edit_file", "Replaces one passage of a file by another; the passage must occur once.", {"path": "string"}),
)
_RULES = """You are a careful software engineer who works in a repository with the tools below.
Read before you write. Change only what the task asks for. Name the file and line that a statement rests on.
Call one tool per turn, as one JSON object on a line of its own. When the task is done, say so in one sentence.

Tools:
"""


@dataclass(frozen=True)
class SourceLine:
    """One line of a file an agent may read; `where` is path:line."""

    where: str
    text: str


def system_message() -> Message:
    """The system prompt with its tool list, equal in all sessions."""
    tools = (
        {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}
        for name, description, properties in _TOOLS
    )
    return Message("system", _RULES + "\n".join(json.dumps(tool) for tool in tools))


def build_sessions(encoder: Encoder, num_sessions: int, prompt_tokens: Sequence[int]) -> list[Session]:
    """`num_sessions` sessions whose prompt of turn t has at most, and nearly, prompt_tokens[t] tokens (ascending).

    Raises SessionError when a length is too short for system prompt and task, or when the files at hand do not suffice.
    """
    return [
        Session(
            _name(lines), tuple(encoder.encode_chat(prompt) for prompt in conversations(encoder, lines, prompt_tokens))
        )
        for lines in source_lines(num_sessions)
    ]


def least_tokens(encoder: Encoder, num_sessions: int, turns: int, most: int) -> list[int]:
    """Tokens that the prompt of each turn needs at least, in the session that needs most: one line is read per turn.

    Ends with the turn before one that needs more than `most`.
    """
    needed = []
    for lines in source_lines(num_sessions):
        messages = _opening(lines)
        tokens = []
        for turn in range(turns):
            _check_enough(lines, turn, turns)
            messages += [Message("assistant", _reply(lines[:turn], lines[turn])), _shown(lines[turn : turn + 1])]
            if (num_tokens := len(encoder.encode_chat(messages))) > most:
                break
            tokens.append(num_tokens)
        needed.append(tokens)
    return [max(of_one_turn) for of_one_turn in zip(*needed, strict=False)]


def _check_enough(lines: Sequence[SourceLine], begin: int, turns: int) -> None:
    if begin >= len(lines):
        raise SessionError(
            f"the files of session {_name(lines)} end before turn {turns}; ask for fewer sessions or turns"
        )


@functools.cache
def source_lines(num_sessions: int) -> list[list[SourceLine]]:
    """What each agent reads: own files and library files in turn, no file in two sessions. Raises SessionError."""
    own, library = sorted_files(_own_folders()), sorted_files(_library_folders())
    if num_sessions > len(own):
        raise SessionError(f"{num_sessions} sessions need as many files to read: ask for {len(own)} at most")
    return [
        [line for pair in _alternate(own[index::num_sessions], library[index::num_sessions]) for line in _lines(*pair)]
        for index in range(num_sessions)
    ]


def sorted_files(folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """(file, name to show) of every Python file with something in it, in a stable order."""
    return [
        (path, path.relative_to(folder.parent).as_posix())
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if path.stat().st_size > 200  # an almost empty __init__ is nothing to read
    ]


def _own_folders() -> Iterator[Path]:
    """Package folders of this repository, or of the installed wheel; found without importing them."""
    for name in _OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            yield Path(next(iter(spec.submodule_search_locations)))


def _library_folders() -> list[Path]:
    return [Path(sysconfig.get_paths()["stdlib"]) / name for name in _LIBRARY_PACKAGES]


def _alternate(left: Sequence[File], right: Sequence[File]) -> Iterator[File]:
    for index in range(max(len(left), len(right))):
        yield from left[index : index + 1]
        yield from right[index : index + 1]


def _lines(path: Path, shown: str) -> Iterator[SourceLine]:
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        yield SourceLine(f"{shown}:{number}", text)


def _name(lines: Sequence[SourceLine]) -> str:
    return lines[0].where.rpartition(":")[0] if lines else "nothing to read"


def conversations(
    encoder: Encoder, lines: Sequence[SourceLine], prompt_tokens: Sequence[int]
) -> Iterator[list[Message]]:
    """The conversation at each turn. Each turn shows as many further lines as fit its length."""
    messages = _opening(lines)
    begin = 0
    for limit in prompt_tokens:
        _check_enough(lines, begin, len(prompt_tokens))
        messages.append(Message("assistant", _reply(lines[:begin], lines[begin])))
        end = _fit(encoder, messages, lines, begin, limit)
        messages.append(_shown(lines[begin:end]))
        yield list(messages)
        begin = end


def _opening(lines: Sequence[SourceLine]) -> list[Message]:
    task = f"Explain what a caller of {_name(lines)} and its neighbours must know."
    return [system_message(), Message("user", task)]


def _reply(seen: Sequence[SourceLine], following: SourceLine) -> str:
    """What the agent is said to have answered: the definitions it saw last, and the call for the next lines."""
    names = [match[1] for line in seen if (match := _DEFINITION.match(line.text))][-_MAX_NAMES:]
    path, _, line = following.where.rpartition(":")
    call = json.dumps({"tool": "read_file", "path": path, "first_line": int(line)})
    noted = f"So far the callers meet {', '.join(names)}. I read on." if names else "I read the file itself."
    return f"{noted}\n{call}"


def _shown(lines: Sequence[SourceLine]) -> Message:
    path = ""
    text = []
    for line in lines:
        if (here := line.where.rpartition(":")[0]) != path:
            path = here
            text.append(f"==> {line.where} <==")
        text.append(line.text)
    return Message("tool", "\n".join(text))


def _fit(encoder: Encoder, messages: Sequence[Message], lines: Sequence[SourceLine], begin: int, limit: int) -> int:
    """The greatest end such that the conversation with lines[begin:end] has at most `limit` tokens."""

    def num_tokens(end: int) -> int:
        return len(encoder.encode_chat([*messages, _shown(lines[begin:end])]))

    if num_tokens(begin + 1) > limit:
        raise SessionError(
            f"a prompt of {limit} tokens is too short: {num_tokens(begin + 1)} are needed to read one line"
        )
    low, high = begin + 1, begin + 2
    while high < len(lines) and num_tokens(high) <= limit:
        low, high = high, begin + 2 * (high - begin)
    if high >= len(lines) and num_tokens(len(lines)) <= limit:
        raise SessionError(f"the files of session {_name(lines)} end before {limit} tokens; ask for fewer sessions")
    high = min(high, len(lines))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_tokens(middle) <= limit else (low, middle)
    return low
