"""The demo command on real engines with a tiny model: three processes, files between them, the same tokens."""

import json
from pathlib import Path

import pytest

from engine_plugin.demo.command import command
from tests.helpers import traces

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_three_runs_of_a_real_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = traces.generate("claude-code", tmp_path / "traces")
    sessions = [argument for path in files for argument in ("--sessions", str(path))]
    sizes = ["--num-sessions", "4", "--turns", "3", "--max-tokens-per-turn", "1400"]
    assert command([*sessions, *sizes, "--model-path", "random:0", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert "answers are the same tokens in all 3 runs" in captured.err
    document = json.loads(captured.out)
    without, tiers, restarted = document["runs"]
    assert document["device_tokens"] < 0.5 * document["working_set_tokens"]
    assert without["tokens"]["host"] == without["tokens"]["storage"] == 0
    assert tiers["tokens"]["host"] > 0 and tiers["tokens"]["computed"] < without["tokens"]["computed"]
    first, *_ = restarted["turns"]
    assert first["cached"]["storage"] > 0 and first["cached"]["device"] == first["cached"]["host"] == 0
    assert restarted["first_turns"]["computed"] < 0.2 * tiers["first_turns"]["computed"]
    assert restarted["tokens"]["computed"] < tiers["tokens"]["computed"]
    held = tiers["held_bytes"]
    assert 0 < held["device"] < held["host"] < held["storage"]
    for run in document["runs"]:
        assert run["equal_turns"] == run["num_turns"] == 12
        assert all(len(turn["output_ids"]) == document["max_new_tokens"] for turn in run["turns"])
