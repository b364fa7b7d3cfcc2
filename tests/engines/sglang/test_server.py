"""SGLang's real server with its KV in our daemon: hits from its host memory, and from us after it was started anew.

One story, played once; what each test checks is a part of it. Two servers are started, the second one as an engine that
was restarted. SGLang's own `file` backend is attached and detached at runtime in the same servers, to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.engines.sglang import media
from tests.engines.sglang.plugin.sglang_on_cpu import REPORT
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.server import Answer, Server, launch_flags, prompt
from tests.engines.sglang.tiny_qwen3 import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]

PAGES = 1984
"""Tokens of a prompt's whole pages."""
OURS_IN_TRACES = ("/engine_plugin/", "/cachesvc/client/", "/storage_backends/")
OURS, FILES, FILLERS = prompt(1), prompt(2), (prompt(3), prompt(4), prompt(5))


@dataclass
class Story:
    """`log`: what both servers printed while all went well; `refused`: while the second one was asked for nonsense;
    `metrics`: of the second one, before it was asked for more than its own."""

    answers: dict[str, Answer] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    metrics: str = ""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("server")
    model = write_model(folder / "model", seed=1)
    files = media.file(folder / "files")
    story = Story()
    answers = story.answers
    with Daemon() as daemon:
        ours = launch_flags(daemon, host_gib=0.125)
        with Server(model, ours) as first:
            answers["cold"] = first.ask(OURS)
            answers["device"] = first.ask(OURS)
            for filler in FILLERS:
                first.ask(filler)
            answers["host"] = first.ask(OURS)
            first.detach()
            first.attach(files)
            answers["file: cold"] = first.ask(FILES)
            first.detach()
            story.log += first.output  # what its processes say of each other when they are killed is no report
            first.kill()
        with Server(model, [*ours, "--enable-metrics"]) as second:
            second.ask(FILLERS[0])  # what a process does once only
            answers["storage"] = second.ask(OURS)
            story.metrics = second.client.get("/metrics/").text
            second.detach()
            second.attach(files)
            answers["file: storage"] = second.ask(FILES)
            second.detach()
            second.flush()
            second.attach(media.attached(ours, module_path="tampered_storage", class_name="Scaled"))
            answers["control"] = second.ask(OURS)
            second.detach()
            calm = len(second.output)
            story.log += second.output[:calm]
            second.refuses(media.attached(ours, adress="auto"))
        story.refused = second.output[calm:]
    for name, answer in answers.items():
        print(f"{name:20} {answer.first_s * 1e3:8.0f} ms to the first token, {answer}")
    return story


@pytest.mark.parametrize("name", ["device", "host", "storage"])
def test_tokens_are_those_of_the_cold_run(name: str, story: Story) -> None:
    assert story.answers[name].tokens == story.answers["cold"].tokens


def test_files_serve_the_same_tokens(story: Story) -> None:
    assert story.answers["file: storage"].tokens == story.answers["file: cold"].tokens


def test_each_tier_had_what_was_asked_of_it(story: Story) -> None:
    had = {name: (answer.device, answer.host, answer.storage) for name, answer in story.answers.items()}
    assert had == {
        "cold": (0, 0, 0),
        "device": (PAGES, 0, 0),
        "host": (0, PAGES, 0),
        "storage": (0, 0, PAGES),
        "file: cold": (0, 0, 0),
        "file: storage": (0, 0, PAGES),
        "control": (0, 0, PAGES),
    }


def test_the_control_shows_that_wrong_kv_changes_the_answer(story: Story) -> None:
    assert story.answers["control"].tokens != story.answers["cold"].tokens


def test_outcomes_of_pages_are_among_the_engines_metrics(story: Story) -> None:
    samples = [line for line in story.metrics.splitlines() if line.startswith("sglang:cachesvc_pages_total{")]
    ok = {
        verb: sum(float(line.split()[-1]) for line in samples if f'verb="{verb}"' in line and 'outcome="ok"' in line)
        for verb in ("exists", "get", "put")
    }
    assert ok["get"] == 2 * PAGES // 64, "of two prompts"
    assert ok["exists"] >= 2 * PAGES // 64
    assert any('outcome="timeout"' in line and line.endswith(" 0.0") for line in samples), (
        "series are there from the start"
    )


def _reported(log: list[str]) -> list[str]:
    return [line for line in log if REPORT in line]


def test_nothing_was_reported_that_has_to_do_with_a_storage(story: Story) -> None:
    """Warnings and errors of ours, and SGLang's of its cache; besides, errors of anything at all. SGLang logs what a
    storage raises, and goes on without it."""
    wrong = [
        line
        for line in _reported(story.log)
        if f"{REPORT}WARNING sglang" not in line or "mem_cache" in line or "cache_controller" in line
    ]
    assert not wrong
    assert not [line for line in story.log if any(folder in line for folder in OURS_IN_TRACES)], "in no trace either"


def test_the_control_shows_that_it_would_have_been_reported(story: Story) -> None:
    assert [line for line in _reported(story.refused) if "ERROR sglang.srt.mem_cache" in line and "adress" in line]
