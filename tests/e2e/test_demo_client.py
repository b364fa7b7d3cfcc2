"""The demo's client and play loop against a fake engine in this process."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine_plugin.demo.client import EngineClient
from engine_plugin.demo.errors import EngineError
from engine_plugin.demo.play import TurnResult, in_turn, measure_speed, play
from engine_plugin.demo.recordings import Session
from engine_plugin.demo.speed import NoHurry, Pace
from tests.helpers.fake_engine import FakeCache, FakeEngine


def session(name: str, *lengths: int, first: int = 0) -> Session:
    return Session(name, tuple(np.arange(first, first + length, dtype=np.uint32) for length in lengths))


SESSIONS = (session("alpha", 200, 300, 400), session("beta", 200, 330, first=1000))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(FakeCache(device_tokens=2048, storage=None)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client_of(engine: FakeEngine) -> EngineClient:
    return EngineClient("127.0.0.1", engine.server_address[1], timeout_s=10)


def test_play_sends_the_prompts_and_reads_what_the_engine_says(engine: FakeEngine) -> None:
    seen: list[TurnResult] = []
    results = play(client_of(engine), SESSIONS, 4, NoHurry(), seen.append)
    assert list(results) == seen
    assert [body["input_ids"] for body in engine.requests] == [
        SESSIONS[index].prompts[turn].tolist() for index, turn in in_turn(SESSIONS)
    ]
    assert all(body["sampling_params"]["temperature"] == 0 and body["stream"] for body in engine.requests)
    assert [result.prompt_tokens for result in results] == [200, 200, 300, 330, 400]
    assert [result.cached.device for result in results] == [0, 0, 192, 192, 256]
    assert results[2].computed_tokens == 108 and len(results[0].output_ids) == 4
    assert all(0 < result.ttft_s <= result.total_s for result in results)


class Until(Pace):
    """Allows turns below a limit, and remembers what it was asked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.asked: list[int] = []

    def allows(self, turn: int) -> bool:
        self.asked.append(turn)
        return turn < self.limit


def test_play_asks_before_each_turn_and_ends_at_the_first_refused(engine: FakeEngine) -> None:
    pace = Until(1)
    results = play(client_of(engine), SESSIONS, 4, pace, lambda result: None)
    assert [(result.session, result.turn) for result in results] == [(0, 0), (1, 0)]
    assert pace.asked == [0, 1]


def test_time_to_first_token_is_taken_at_the_first_token(engine: FakeEngine) -> None:
    now = iter(range(100))
    client = EngineClient("127.0.0.1", engine.server_address[1], clock=lambda: float(next(now)))
    generation = client.generate(SESSIONS[0].prompts[0], 4)
    assert (generation.ttft_s, generation.total_s) == (1.0, 2.0)  # the clock is read at the start, first token, end


def test_speed_measurement_uses_prompts_that_share_nothing(engine: FakeEngine) -> None:
    speed = measure_speed(client_of(engine), vocab_size=1000, context_tokens=8192)
    assert speed.linear_s >= 0 and speed.decode_s > 0
    assert [len(body["input_ids"]) for body in engine.requests] == [64, 512, 2048]
    assert len({body["input_ids"][0] for body in engine.requests}) == 3


def test_speed_measurement_fits_a_small_context(engine: FakeEngine) -> None:
    measure_speed(client_of(engine), vocab_size=1000, context_tokens=1024)
    assert [len(body["input_ids"]) for body in engine.requests] == [64, 254, 1016]


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([], "before \\[DONE\\]"),
        (["[DONE]"], "without a token"),
        (['{"error": {"message": "aborted"}}'], "broke off: .*aborted"),
        (['{"output_ids": [1], "meta_info": {"prompt_tokens": 9}}', "[DONE]"], "lacks what /generate promises"),
        (["{no json"], "failed: JSONDecodeError"),
        (
            [
                '{"output_ids": [1], "meta_info": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 0,'
                ' "cached_tokens_details": {"device": 0, "host": 0, "storage": 0}}}',
                "[DONE]",
            ],
            "contradicts itself",
        ),
        (
            [
                '{"output_ids": [1], "meta_info": {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 5,'
                ' "cached_tokens_details": {"device": 0, "host": 0, "storage": 0}}}',
                "[DONE]",
            ],
            "contradicts itself",
        ),
    ],
)
def test_an_answer_of_another_shape_is_an_error(engine: FakeEngine, replies: list[str], message: str) -> None:
    engine.replies = replies
    with pytest.raises(EngineError, match=message):
        client_of(engine).generate(SESSIONS[0].prompts[0], 4)


def test_a_refusal_shows_what_the_engine_said(engine: FakeEngine) -> None:
    engine.fail_status = 503
    with pytest.raises(EngineError, match=r"POST /generate: 503 asked to fail"):
        client_of(engine).generate(SESSIONS[0].prompts[0], 4)


def test_an_engine_that_is_gone_is_an_error() -> None:
    server = FakeEngine(FakeCache(512, None))
    port = server.server_address[1]
    server.server_close()
    with pytest.raises(EngineError, match="ConnectionRefusedError"):
        EngineClient("127.0.0.1", port).generate(SESSIONS[0].prompts[0], 4)
