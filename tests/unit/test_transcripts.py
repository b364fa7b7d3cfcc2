"""The transcript readers, on the real recordings where they are and on generated files of the same shape otherwise."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine_plugin.demo.block_traces import BlockRecording, synthetic_blocks
from engine_plugin.demo.errors import TranscriptError
from engine_plugin.demo.recordings import Message, Recording, TextRecording
from engine_plugin.demo.transcripts import MOONCAKE_BLOCK_TOKENS, read_recordings
from tests.helpers import traces
from tests.helpers.encoder import ByteEncoder

ENCODER = ByteEncoder(vocab_size=49_152)


def files_of(name: str, folder: Path) -> list[Path]:
    """The files of one format that this run found or made, and one made in any case: the readers see both."""
    files = traces.trace_files()
    found = {
        "mini-swe": files.mini_swe,
        "swe-agent": files.swe_agent,
        "mooncake": files.mooncake,
        "claude-code": files.claude_code,
    }[name]
    return [*found, *traces.generate(name, folder)]


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def read_text(path: Path) -> list[TextRecording]:
    recordings = read_recordings(path)
    assert all(isinstance(recording, TextRecording) for recording in recordings)
    return [recording for recording in recordings if isinstance(recording, TextRecording)]


def read_blocks(path: Path) -> list[BlockRecording]:
    recordings = read_recordings(path)
    assert all(isinstance(recording, BlockRecording) for recording in recordings)
    return [recording for recording in recordings if isinstance(recording, BlockRecording)]


def test_mini_swe_prompts_are_the_lines_inputs(tmp_path: Path) -> None:
    for path in files_of("mini-swe", tmp_path):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        (recording,) = read_text(path)
        assert [prompt[0].content for prompt in recording.prompts] == [row["input"] for row in rows]
        assert {message.role for prompt in recording.prompts for message in prompt} == {"user"}


def test_swe_agent_prompts_are_the_history_before_each_reply(tmp_path: Path) -> None:
    for path in files_of("swe-agent", tmp_path):
        history = json.loads(path.read_text(encoding="utf-8"))["history"]
        (recording,) = read_text(path)
        assert recording.num_turns == sum(entry["role"] == "assistant" for entry in history)
        for prompt in recording.prompts:
            assert [message.content for message in prompt] == [entry["content"] for entry in history[: len(prompt)]]
            assert history[len(prompt)]["role"] == "assistant"


def test_content_parts_of_newer_swe_agent_files_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "parts.traj"
    parts = [{"type": "text", "text": "one "}, {"type": "image_url"}, {"type": "text", "text": "two"}]
    opening = {"role": "assistant", "content": "nobody has asked yet"}
    history = [opening, {"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    path.write_text(json.dumps({"history": history}))
    (recording,) = read_text(path)
    assert recording.prompts == ((Message("assistant", opening["content"]), Message("user", "one two")),)


@pytest.mark.parametrize("name", ["mooncake", "claude-code"])
def test_synthetic_tokens_share_exactly_what_hash_ids_share(name: str, tmp_path: Path) -> None:
    for path in files_of(name, tmp_path)[-2:]:
        for recording in read_blocks(path)[:6]:
            prompts = [recording.tokens(turn, ENCODER) for turn in range(recording.num_turns)]
            for turn in range(1, recording.num_turns):
                before, now = recording.prompts[turn - 1], recording.prompts[turn]
                shared_blocks = shared_prefix(before.hash_ids, now.hash_ids)
                shared_tokens = shared_prefix(prompts[turn - 1], prompts[turn])
                limit = min(before.num_tokens, now.num_tokens)
                # a partial last block with the same id is shared as far as the shorter one goes
                assert shared_tokens == min(shared_blocks * recording.block_tokens, limit)
                assert len(prompts[turn]) == now.num_tokens
                assert prompts[turn].dtype == np.uint32 and int(prompts[turn].max()) < ENCODER.vocab_size


def test_equal_hash_ids_give_equal_tokens_and_salts_tell_traces_apart() -> None:
    ids = np.asarray([7, 8, 7], np.int64)
    blocks = synthetic_blocks(ids, 64, salt=1, vocab_size=1000)
    assert np.array_equal(blocks[0], blocks[2]) and not np.array_equal(blocks[0], blocks[1])
    assert np.array_equal(blocks, synthetic_blocks(ids, 64, salt=1, vocab_size=1000))
    assert np.array_equal(blocks[:, :10], synthetic_blocks(ids, 10, salt=1, vocab_size=1000))
    assert not np.array_equal(blocks, synthetic_blocks(ids, 64, salt=2, vocab_size=1000))
    assert int(synthetic_blocks(ids, 4096, salt=1, vocab_size=20).max()) == 19


def test_shrunk_prompts_keep_the_prefix_structure(tmp_path: Path) -> None:
    (path,) = traces.generate("mooncake", tmp_path)
    recording = read_blocks(path)[0]
    for turn in range(1, recording.num_turns):
        before, now = recording.tokens(turn - 1, ENCODER, 8), recording.tokens(turn, ENCODER, 8)
        blocks = shared_prefix(recording.prompts[turn - 1].hash_ids, recording.prompts[turn].hash_ids)
        assert shared_prefix(before, now) == blocks * (MOONCAKE_BLOCK_TOKENS // 8)
        assert len(now) == recording.prompts[turn].num_tokens // 8
    with pytest.raises(ValueError, match=r"shrink must be in \[1, 512\]"):
        recording.tokens(0, ENCODER, 513)


def test_mooncake_requests_are_grouped_into_conversations(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [[0, 1, 2], [0, 3, 4], [0, 1, 5, 6], [0, 9], [0, 1, 5, 7, 8], [0, 3, 10], [0, 11]]
    path.write_text(
        "".join(json.dumps({"input_length": len(ids) * 512 - 9, "hash_ids": ids}) + "\n" for ids in requests)
    )
    conversations = [[prompt.hash_ids.tolist() for prompt in recording.prompts] for recording in read_blocks(path)]
    assert conversations == [
        [requests[0], requests[2], requests[4]],
        [requests[1], requests[5]],
        [requests[3]],
        [requests[6]],
    ]


def test_claude_code_sub_agents_are_sessions_of_their_own(tmp_path: Path) -> None:
    inner = {"type": "subagent", "agent_id": "b", "requests": [{"in": 70, "hash_ids": [1]}]}
    outer = {"type": "subagent", "agent_id": "a", "requests": [{"in": 140, "hash_ids": [1, 2]}, inner]}
    path = tmp_path / "trace.json"
    requests = [{"in": 200, "hash_ids": [1, 2, 3]}, outer, {"in": 210, "hash_ids": [1, 2, 3]}]
    path.write_text(json.dumps({"id": "t", "block_size": 64, "requests": requests}))
    recordings = {recording.name: recording for recording in read_blocks(path)}
    assert {name: recording.num_turns for name, recording in recordings.items()} == {"t": 2, "t/a": 1, "t/a/b": 1}
    # hash ids are of one file: parent and sub-agent share their first blocks; tokens past the last block, nobody's
    parent = [recordings["t"].tokens(turn, ENCODER) for turn in range(2)]
    assert shared_prefix(parent[0], recordings["t/a"].tokens(0, ENCODER)) == 128
    assert shared_prefix(parent[0], parent[1]) == 192


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ("just words", "not JSON"),
        ("\xff", "not JSON"),
        ("[1, 2]", "not of objects"),
        ('{"rows": []}', "not a transcript this demo reads"),
        ('{"question": "?"}\n{"question": "!"}', "not a transcript this demo reads"),
    ],
)
def test_an_unknown_file_names_the_accepted_formats(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(TranscriptError, match=message) as error:
        read_recordings(path)
    for name in ("mini-swe", "SWE-agent", "Mooncake", "Claude Code", str(path)):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"session_id": "a", "input": "x", "output": "y"}\n{"session_id": "a", "inp', "line 2 is not JSON"),
        ('{"session_id": "a", "input": "x", "output": "y"}\n{"session_id": "a"}', "call 2 has no 'input'"),
        ('{"history": [{"role": "user"}]}', "history entry 1 has no 'content'"),
        ('{"history": ["a"]}', "history entry 1|another kind of value"),
        ('{"history": [{"role": "user", "content": "no reply"}]}', "no model call"),
        ('{"input_length": {}, "hash_ids": [1]}', "another kind of value"),
        ('{"input_length": 5, "hash_ids": "abc"}', "another kind of value"),
        ('{"input_length": 5, "hash_ids": [[1]]}', "hash_ids of request 1 is not a list of numbers"),
        ('{"input_length": 0, "hash_ids": []}', "input_length of request 1 is 0, expected 1 to"),
        ('{"input_length": 1000000000000, "hash_ids": [1]}', "input_length of request 1 is 1000000000000, expected 1"),
        ('{"block_size": 0, "requests": []}', "block_size is 0, expected 1 to"),
        ('{"block_size": 64, "requests": [{"in": 5, "hash_ids": [' + "9" * 5000 + "]}]}", "not JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"block_size": "x", "requests": []}', "another kind of value"),
        ('{"block_size": 64, "requests": [{"in": 5}]}', "request 1 of file has no 'hash_ids'"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(TranscriptError, match=message):
        read_recordings(path)


def test_halves_of_characters_become_question_marks(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"session_id": "a", "input": "x\\ud800y", "output": ""}\n')
    assert read_text(path)[0].prompts[0][0].content == "x?y"


def test_line_separators_inside_a_string_do_not_cut_the_line(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    row = {"session_id": "a", "input": "one\u2028two\x85three", "output": ""}
    path.write_text(2 * (json.dumps(row, ensure_ascii=False) + "\n"), encoding="utf-8")
    assert [prompt[0].content for prompt in read_text(path)[0].prompts] == 2 * [row["input"]]


def test_the_real_recordings_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traces.generate("swe-agent", tmp_path / "swe-agent")
    monkeypatch.setenv("CACHESVC_TRACES", str(tmp_path))
    files = traces.trace_files.__wrapped__()
    assert files.real == {"swe-agent"}
    assert all(path.parent == tmp_path / "swe-agent" for path in files.swe_agent)
    assert files.mini_swe and files.mooncake and files.claude_code
    monkeypatch.setenv("CACHESVC_TRACES", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="CACHESVC_TRACES"):
        traces.trace_root()


def test_helper_sessions_have_growing_prompts() -> None:
    texts = traces.text_sessions(3)
    tokens = traces.token_sessions(1000, num_sessions=3, max_tokens=4096)
    assert len(texts) == len(tokens) == 3 and all(len(session) > 1 for session in texts)
    assert all(0 < len(prompt) <= 4096 for session in tokens for prompt in session)
    recordings: list[Recording] = read_recordings(traces.trace_files().mini_swe[0])
    assert recordings[0].max_shrink == 1
    with pytest.raises(ValueError, match="cannot be shrunk"):
        recordings[0].tokens(0, ENCODER, 2)
