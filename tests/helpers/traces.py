"""Agent sessions for tests: the real recordings where they are, files of the same shape where not. Tests never skip.

The recordings are looked for in $CACHESVC_TRACES, then in ../shared/traces beside the repository.
"""

import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_plugin.demo.recordings import Message, TextRecording
from engine_plugin.demo.transcripts import MOONCAKE_BLOCK_TOKENS, read_recordings

U32 = NDArray[np.uint32]
_FOLDERS = {
    "mini-swe": "*.jsonl",
    "swe-agent": "*.traj",
    "mooncake": "conversation_trace.jsonl",
    "claude-code": "trace_*.json",
}


@dataclass(frozen=True)
class TraceFiles:
    """Files of each format, at least one each; `real` holds the folder names that were found rather than generated."""

    mini_swe: tuple[Path, ...]
    swe_agent: tuple[Path, ...]
    mooncake: tuple[Path, ...]
    claude_code: tuple[Path, ...]
    real: frozenset[str]


def trace_root() -> Path | None:
    """Folder of the real recordings, None where there is none. A $CACHESVC_TRACES that is no folder is an error."""
    named = os.environ.get("CACHESVC_TRACES")
    root = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "traces"
    if named and not root.is_dir():
        raise FileNotFoundError(f"CACHESVC_TRACES={named} is not a folder")
    return root if root.is_dir() else None


@functools.cache
def trace_files() -> TraceFiles:
    """The files of every format; generated ones live in a temporary folder until the process ends."""
    root = trace_root()
    found = {name: tuple(sorted((root / name).glob(glob))) if root else () for name, glob in _FOLDERS.items()}
    real = frozenset(name for name, files in found.items() if files)
    files = {name: files or _generate(name) for name, files in found.items()}
    return TraceFiles(files["mini-swe"], files["swe-agent"], files["mooncake"], files["claude-code"], real)


def text_sessions(num_sessions: int | None = None) -> list[list[str]]:
    """Sessions of coding agents as text (mini-swe, then SWE-agent): per session its prompts, each the whole prompt."""
    return [
        ["\n\n".join(message.content for message in prompt) for prompt in session]
        for session in message_sessions(num_sessions)
    ]


def message_sessions(num_sessions: int | None = None) -> list[list[tuple[Message, ...]]]:
    """The same sessions as messages with roles, for a chat template."""
    files = trace_files()
    sessions: list[list[tuple[Message, ...]]] = []
    for path in (*files.mini_swe, *files.swe_agent):
        sessions += [
            list(recording.prompts) for recording in read_recordings(path) if isinstance(recording, TextRecording)
        ]
    return sessions[:num_sessions]


def token_sessions(vocab_size: int, *, num_sessions: int = 8, max_tokens: int = 1 << 62) -> list[list[U32]]:
    """Claude Code, then Mooncake sessions as synthetic tokens: per session its prompts, uint32 [n <= max_tokens]."""
    files = trace_files()
    recordings = [recording for path in (*files.claude_code, *files.mooncake) for recording in read_recordings(path)]
    encoder = _Vocabulary(vocab_size)
    return [
        [recording.tokens(turn, encoder)[:max_tokens] for turn in range(recording.num_turns)]
        for recording in recordings[:num_sessions]
    ]


@dataclass(frozen=True)
class _Vocabulary:
    """The Encoder of recordings that have no text."""

    vocab_size: int

    def encode_chat(self, messages: Sequence[Message]) -> U32:
        raise AssertionError(f"a trace of hashes has no text to encode: {messages}")


_VOCABULARY = (
    "the",
    "file",
    "test",
    "error",
    "line",
    "return",
    "value",
    "import",
    "class",
    "def",
    "path",
    "None",
    "fix",
)
_KEEP_ALIVE: list[tempfile.TemporaryDirectory[str]] = []


def _generate(name: str) -> tuple[Path, ...]:
    _KEEP_ALIVE.append(tempfile.TemporaryDirectory(prefix=f"cachesvc-{name}-"))
    return generate(name, Path(_KEEP_ALIVE[-1].name))


def generate(name: str, folder: Path) -> tuple[Path, ...]:
    """Writes files of one format (a key of the real folder names) into `folder`; the same content every time."""
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(_GENERATORS[name](folder, random.Random(f"traces/{name}")))


def _words(rng: random.Random, num_words: int) -> str:
    endings = ("", "", "()", ":", ".py", "\n    ")
    return " ".join(rng.choice(_VOCABULARY) + rng.choice(endings) for _ in range(num_words))


def _generate_mini_swe(folder: Path, rng: random.Random) -> Iterator[Path]:
    for _ in range(4):
        session = f"{rng.getrandbits(128):032x}"
        prompt = f"<pr_description>\n{_words(rng, 900)}\n</pr_description>\n"
        rows = []
        for turn in range(12):
            output = f"THOUGHT: {_words(rng, 40)}\n```bash\ngrep -rn {turn} .\n```"
            rows.append(
                {"timestamp": 1_760_428_436_442_742 + turn, "input": prompt, "output": output, "session_id": session}
            )
            prompt += f"{output}\n<output>\n{_words(rng, rng.randint(60, 400))}\n</output>\n"
        yield _write(folder / f"{session}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _generate_swe_agent(folder: Path, rng: random.Random) -> Iterator[Path]:
    for number in range(2):
        history = [{"role": "system", "content": _words(rng, 500), "agent": "main"}]
        for _ in range(8):
            history.append({"role": "user", "content": _words(rng, rng.randint(50, 300)), "agent": "main"})
            history.append({"role": "assistant", "content": _words(rng, 40), "agent": "main"})
        trajectory = {"environment": "main", "trajectory": [], "history": history, "info": {}}
        yield _write(folder / f"test-repo-i{number}.traj", json.dumps(trajectory, indent=2))


def _generate_mooncake(folder: Path, rng: random.Random) -> Iterator[Path]:
    """Conversations that interleave and grow; block 0 is the system prompt of all."""
    next_id = 1
    conversations: list[list[int]] = [[0] for _ in range(40)]
    rows = []
    for request in range(200):
        blocks = rng.choice(conversations)
        for _ in range(rng.randint(1, 6)):
            blocks.append(next_id)
            next_id += 1
        partial = next_id
        next_id += 1
        length = len(blocks) * MOONCAKE_BLOCK_TOKENS + rng.randint(1, MOONCAKE_BLOCK_TOKENS - 1)
        rows.append(
            {"timestamp": request * 300, "input_length": length, "output_length": 200, "hash_ids": [*blocks, partial]}
        )
    yield _write(folder / "conversation_trace.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _generate_claude_code(folder: Path, rng: random.Random) -> Iterator[Path]:
    for number in range(2):
        ids = iter(range(1, 1_000_000))
        shared = [next(ids) for _ in range(150)]
        requests: list[dict[str, object]] = list(_claude_requests(shared, 10, ids, rng))
        requests.insert(
            2,
            {
                "t": 30.0, "type": "subagent", "agent_id": "agent_001", "duration_ms": 20_000,
                "requests": list(_claude_requests(shared[:90], 6, ids, rng)),
            },
        )  # fmt: skip
        trace = {"id": f"trace_{number:04}", "block_size": 64, "hash_id_scope": "local", "requests": requests}
        yield _write(folder / f"trace_{number:04}.json", json.dumps(trace))


def _claude_requests(
    shared: list[int], turns: int, ids: Iterator[int], rng: random.Random
) -> Iterator[dict[str, object]]:
    blocks = list(shared)
    for turn in range(turns):
        length = len(blocks) * 64 + rng.randint(0, 63)
        yield {"t": turn * 9.0, "type": "n", "in": length, "out": 300, "hash_ids": list(blocks)}
        blocks += [next(ids) for _ in range(rng.randint(5, 120))]


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


_GENERATORS: dict[str, Callable[[Path, random.Random], Iterator[Path]]] = {
    "mini-swe": _generate_mini_swe,
    "swe-agent": _generate_swe_agent,
    "mooncake": _generate_mooncake,
    "claude-code": _generate_claude_code,
}
