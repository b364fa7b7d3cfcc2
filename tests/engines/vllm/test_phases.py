"""A request that is given up, in each phase of its life: nobody else notices, nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from engine_plugin.memory.transfer import RegionPartTransfer
from tests.engines.vllm.answers import FP32_TOLERANCE, Answer, assert_same
from tests.engines.vllm.conftest import on
from tests.engines.vllm.prompts import random_tokens
from tests.engines.vllm.settings import BLOCK_SIZE, MIB
from tests.engines.vllm.stepped import SteppedEngine
from tests.engines.vllm.watch import Watch
from tests.helpers.caches import HANG_S, Gate
from tests.helpers.daemon import DaemonProcess, Home

PREFIX_BLOCKS = 6
KV_BYTES = 3 * MIB
"""Room for about sixty blocks: requests that grow push each other out."""


@pytest.fixture(scope="module")
def engine(home: Home, daemon: DaemonProcess, watch: Watch) -> Iterator[SteppedEngine]:
    os.environ.update(watch.environment("tiny"))
    with SteppedEngine(on(home), kv_cache_memory_bytes=KV_BYTES, max_model_len=1024) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: SteppedEngine, watch: Watch) -> Iterator[None]:
    yield
    engine.settle()
    assert not engine.scheduler.requests
    engine.check()
    engine.forget_device()
    watch.check()


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Gate]:
    """`gated("load")`: copies of that kind stand still, on the copying thread, until the gate is opened."""

    def hold(name: str) -> Gate:
        gate, copy = Gate(), getattr(RegionPartTransfer, name)

        def held(*arguments: object) -> object:
            gate.pass_through()
            return copy(*arguments)

        monkeypatch.setattr(RegionPartTransfer, name, held)
        return gate

    return hold


def remembered(engine: SteppedEngine, seed: int) -> tuple[list[int], Answer]:
    """A prompt that host memory has and the device has not, and its answer."""
    prompt = random_tokens(seed, PREFIX_BLOCKS * BLOCK_SIZE + 5)
    answer = engine.ask(prompt)
    engine.forget_device()
    return prompt, answer


def loading(engine: SteppedEngine, prompt: list[int], gated: Callable[[str], Gate]) -> tuple[Gate, str]:
    """A request of a remembered prompt whose load stands still, and the gate that lets it go on."""
    gate = gated("load")
    request = engine.add(prompt)
    engine.step_until(gate.arrived.is_set)
    return gate, request


def expect(engine: SteppedEngine, prompt: list[int], answer: Answer) -> None:
    again = engine.ask(prompt)
    assert again.cached_tokens == PREFIX_BLOCKS * BLOCK_SIZE
    assert_same(again, answer, FP32_TOLERANCE)


def keep_in_storage_only(engine: SteppedEngine) -> None:
    """When all that host memory has is in storage too, it leaves it."""
    deadline_s = time.monotonic() + HANG_S
    while engine.has_node_work():
        assert time.monotonic() < deadline_s
        engine.ask([1, 2, 3], 1)
    core = engine.connector._half._core
    core._frames.release(core._tree.evict_host(core._tree.stats().host_frames).frames)


def test_before_its_first_step(engine: SteppedEngine) -> None:
    prompt, answer = remembered(engine, 1)
    engine.abort(engine.add(prompt))
    expect(engine, prompt, answer)


def test_while_its_prefix_is_being_loaded(engine: SteppedEngine, gated: Callable[[str], Gate]) -> None:
    """Its blocks are the copying thread's until that is done; then they are free."""
    prompt, answer = remembered(engine, 2)
    gate, request = loading(engine, prompt, gated)
    assert engine.status(request) == "WAITING_FOR_REMOTE_KVS"
    engine.abort(request)
    engine.step()
    assert engine.held_blocks() >= PREFIX_BLOCKS, "blocks that are being written are not free"
    gate.opened.set()
    engine.settle()
    expect(engine, prompt, answer)


def one_of_two_goes(engine: SteppedEngine, gated: Callable[[str], Gate], seed: int, which: int) -> None:
    """One request loads and another one waits for that; `which` of them (0, 1) goes, and the other has its answer."""
    prompt, answer = remembered(engine, seed)
    gate, first = loading(engine, prompt, gated)
    both = [first, engine.add(prompt)]
    engine.step()
    engine.abort(both.pop(which))
    gate.opened.set()
    [got] = engine.finish(*both)
    assert_same(got, answer, FP32_TOLERANCE)


def test_another_one_waits_for_the_load_of_the_one_that_goes(
    engine: SteppedEngine, gated: Callable[[str], Gate]
) -> None:
    one_of_two_goes(engine, gated, 3, which=0)


def test_the_one_that_waits_goes(engine: SteppedEngine, gated: Callable[[str], Gate]) -> None:
    one_of_two_goes(engine, gated, 8, which=1)


def test_after_its_load_has_ended_and_before_it_runs(engine: SteppedEngine, gated: Callable[[str], Gate]) -> None:
    prompt, answer = remembered(engine, 9)
    gate, request = loading(engine, prompt, gated)
    gate.opened.set()
    scheduler = engine.scheduler
    engine.step_until(lambda: bool(scheduler.finished_recving_kv_req_ids))
    assert engine.status(request) == "WAITING_FOR_REMOTE_KVS"
    engine.abort(request)
    expect(engine, prompt, answer)


def test_while_storage_is_asked_for_it(engine: SteppedEngine) -> None:
    """What is being read is for nobody."""
    prompt, answer = remembered(engine, 10)
    keep_in_storage_only(engine)
    request = engine.add(prompt)
    assert engine.has_node_work(), "nothing is read for it"
    engine.abort(request)
    expect(engine, prompt, answer)


def test_while_it_is_preempted(engine: SteppedEngine) -> None:
    prompts = [random_tokens(80 + index, 4 * BLOCK_SIZE + index) for index in range(12)]
    before = engine.num_preemptions()
    requests = [engine.add(prompt, 100) for prompt in prompts]
    engine.step_until(lambda: engine.num_preemptions() > before)
    gone = [one for one in requests if engine.status(one) == "PREEMPTED"]
    assert gone
    engine.abort(*gone)
    engine.finish(*[one for one in requests if one not in gone])


def test_others_compute_while_one_loads(engine: SteppedEngine, gated: Callable[[str], Gate]) -> None:
    prompt, answer = remembered(engine, 4)
    gate, request = loading(engine, prompt, gated)
    other = engine.ask(random_tokens(40, 50), 8)
    assert len(other.token_ids) == 8
    assert engine.status(request) == "WAITING_FOR_REMOTE_KVS"
    gate.opened.set()
    [got] = engine.finish(request)
    assert_same(got, answer, FP32_TOLERANCE)


def test_in_prefill_and_in_decode(engine: SteppedEngine) -> None:
    prompt, answer = remembered(engine, 5)
    request = engine.add([*prompt, *random_tokens(50, 100)], 200)
    engine.step_until(lambda: engine.status(request) == "RUNNING")
    engine.abort(request)
    request = engine.add([*prompt, *random_tokens(51, 10)], 200)
    engine.step_until(lambda: engine.num_output_tokens(request) >= 40)
    engine.abort(request)
    engine.settle()
    engine.forget_device()
    expect(engine, prompt, answer)


def test_a_reset_of_everything_while_one_loads_is_refused(engine: SteppedEngine, gated: Callable[[str], Gate]) -> None:
    """By vLLM itself, after it has made the running requests begin anew."""
    prompt, answer = remembered(engine, 11)
    other_prompt = random_tokens(52, 40)  # which nobody has seen, so that it waits for no load itself
    gate, request = loading(engine, prompt, gated)
    running = engine.add(other_prompt, 20)
    engine.step_until(lambda: engine.num_output_tokens(running) > 2)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.reset_with_running_requests()
    gate.opened.set()
    loaded, interrupted = engine.finish(request, running)
    assert_same(loaded, answer, FP32_TOLERANCE)
    engine.forget_device()
    expect(engine, prompt, answer)
    assert_same(interrupted, engine.ask(other_prompt, 20), FP32_TOLERANCE)


def test_while_its_blocks_are_being_stored(engine: SteppedEngine, gated: Callable[[str], Gate]) -> None:
    """The request ends, its blocks are used by others, and only then the copy goes on: what it read is not kept."""
    gate = gated("copy_out")
    prompt = random_tokens(6, PREFIX_BLOCKS * BLOCK_SIZE + 5)
    answer = engine.ask(prompt)
    assert gate.arrived.is_set()
    fill = [engine.add(random_tokens(60 + index, 8 * BLOCK_SIZE)) for index in range(8)]
    engine.finish(*fill)
    gate.opened.set()
    engine.settle()
    engine.forget_device()
    assert_same(engine.ask(prompt), answer, FP32_TOLERANCE)


def test_a_full_device_preempts_and_everyone_gets_their_answer(engine: SteppedEngine) -> None:
    prompts = [random_tokens(70 + index, 4 * BLOCK_SIZE + index) for index in range(12)]
    alone = [engine.ask(prompt, 100) for prompt in prompts]
    engine.forget_device()
    before = engine.num_preemptions()
    together = engine.finish(*[engine.add(prompt, 100) for prompt in prompts])
    assert engine.num_preemptions() > before, "the pool is too large for this test"
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other, FP32_TOLERANCE)
