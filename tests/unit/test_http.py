"""The server's answers, good and bad, over an engine whose model is an oracle."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_plugin.engine import http
from engine_plugin.engine.protocol import parse_generate
from tests.oracles.token_model import VOCAB, expected_output
from tests.unit.serving import LETTERS, PROMPT, Server, events_of, run, text_of


def test_generate_answers_in_sglangs_shape() -> None:
    async def test(server: Server) -> None:
        answer: Any = await server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 4}, rid="mine")
        assert answer["output_ids"] == expected_output(PROMPT, 4)
        assert answer["text"] == text_of(answer["output_ids"])
        meta = answer["meta_info"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 4, 0)
        assert meta["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
        assert 0 <= meta["queue_time"] <= meta["time_to_first_token"] <= meta["e2e_latency"]
        await server.assert_nothing_held()

    run(test)


def test_text_prompts_and_batches() -> None:
    async def test(server: Server) -> None:
        one: Any = await server.generate(text="hello", sampling_params={"max_new_tokens": 3})
        assert one["output_ids"] == expected_output(LETTERS.encode("hello"), 3)
        many: Any = await server.generate(
            text=["hello", "other"], sampling_params=[{"max_new_tokens": 3}, {"max_new_tokens": 1}], rid="b"
        )
        assert [len(answer["output_ids"]) for answer in many] == [3, 1]
        assert [answer["meta_info"]["id"] for answer in many] == ["b_0", "b_1"]
        single: Any = await server.generate(input_ids=[PROMPT], sampling_params={"max_new_tokens": 1})
        assert isinstance(single, list)

    run(test)


def test_a_stream_is_cumulative_and_ends_with_done() -> None:
    async def test(server: Server) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
        response = await server.post("/generate", body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events: Any = events_of(response.text)
        for event in events:
            assert event["output_ids"] == expected_output(PROMPT, 5)[: len(event["output_ids"])]
            assert event["text"] == text_of(event["output_ids"])
        assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]
        assert len(events[-1]["output_ids"]) == 5
        batch = {"input_ids": [PROMPT, PROMPT[:3]], "sampling_params": {"max_new_tokens": 2}, "stream": True}
        last = {event["index"]: event for event in events_of((await server.post("/generate", batch)).text)}  # type: ignore[index,call-overload]
        assert last[0]["output_ids"] == expected_output(PROMPT, 2)
        assert last[1]["output_ids"] == expected_output(PROMPT[:3], 2)

    run(test)


def test_a_stop_string_never_shows_in_a_stream() -> None:
    async def test(server: Server) -> None:
        stop = text_of(expected_output(PROMPT, 8))[3:6]
        params = {"max_new_tokens": 8, "stop": stop}
        response = await server.post("/generate", {"input_ids": PROMPT, "sampling_params": params, "stream": True})
        events: Any = events_of(response.text)
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        whole = text_of(expected_output(PROMPT, 8))
        assert all(event["text"] == whole[: len(event["text"])] and len(event["text"]) <= 3 for event in events)

    run(test)


def test_the_default_length_is_cut_to_what_fits() -> None:
    async def test(server: Server) -> None:
        answer: Any = await server.generate(input_ids=[1] * 97)
        assert len(answer["output_ids"]) == 3

    run(test)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    async def test(server: Server) -> None:
        await server.generate(
            input_ids=PROMPT,
            return_logprob=False,
            lora_path=None,
            sampling_params={"max_new_tokens": 1, "n": 1, "frequency_penalty": 0.0, "regex": None, "stop": None},
        )

    run(test)


def test_without_a_tokenizer_only_ids_go_in() -> None:
    async def test(server: Server) -> None:
        assert "send input_ids" in await server.refused({"text": "hello"})
        answer: Any = await server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
        assert answer["text"] == ""

    run(test, with_text=False)


def test_a_rid_under_way_cannot_be_used_again_until_it_ended() -> None:
    async def test(server: Server) -> None:
        server.model.may_run.clear()
        first = asyncio.create_task(server.generate(input_ids=PROMPT, rid="x", sampling_params={"max_new_tokens": 1}))
        await server.until(server.model.has_begun)
        assert "rid 'x' is in use" in await server.refused({"input_ids": PROMPT, "rid": "x"})
        server.model.may_run.set()
        await first
        await server.generate(input_ids=PROMPT, rid="x", sampling_params={"max_new_tokens": 1})

    run(test)


def test_more_waiting_requests_than_allowed_are_refused_with_503() -> None:
    async def test(server: Server) -> None:
        server.model.may_run.clear()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        first = asyncio.create_task(server.generate(**body))
        await server.until(server.model.has_begun)
        second = asyncio.create_task(server.generate(**body))  # waits: one runs, and one may wait
        while server.service.num_waiting == 0:
            await asyncio.sleep(0)
        assert "the queue is full: 1 requests wait" in await server.refused(body, status_code=503)
        server.model.may_run.set()
        await asyncio.gather(first, second)
        await server.generate(**body)

    run(test, max_queued=1, max_running=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_nothing_computing(stream: bool) -> None:
    async def test(server: Server) -> None:
        server.model.pause_after = 3
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 50}, "stream": stream}
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/generate",
            "raw_path": b"/generate",
            "query_string": b"",
            "headers": [],
        }
        handling = asyncio.create_task(server.app(scope, receive, send))  # type: ignore[arg-type]
        await server.until(server.model.paused)
        gone.set()
        await handling
        server.model.may_run.set()
        await server.assert_nothing_held()
        assert len(server.model.batches) < 10
        state = await asyncio.wrap_future(server.engine.ask(lambda scheduler: scheduler.counters()))
        assert state["engine_aborted_total"] == 1

    run(test)


def test_abort_request_ends_one_or_all() -> None:
    async def test(server: Server) -> None:
        server.model.may_run.clear()
        tasks = [
            asyncio.create_task(server.generate(input_ids=PROMPT, rid=rid, sampling_params={"max_new_tokens": 9}))
            for rid in ("a", "b", "c")
        ]
        await server.until(server.model.has_begun)
        assert (await server.post("/abort_request", {"rid": "a"})).status_code == 200
        server.model.may_run.set()
        answers: list[Any] = await asyncio.gather(*tasks)
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "length", "length"]
        assert (await server.post("/abort_request", {"abort_all": True})).status_code == 200
        assert (await server.post("/abort_request", {"rid": "unknown"})).status_code == 200
        assert "either rid" in await server.refused({}, "/abort_request")
        await server.assert_nothing_held()

    run(test)


def test_flush_waits_until_idle_and_otherwise_says_what_is_pending() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.get("/flush_cache")).status_code == 200
        server.model.may_run.clear()
        running = asyncio.create_task(server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3}))
        await server.until(server.model.has_begun)
        refused = asyncio.create_task(server.client.post("/flush_cache"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(server.client.get("/flush_cache", params={"timeout": "60"}))
        await asyncio.sleep(0)
        server.model.may_run.set()
        answer = await refused
        assert (answer.status_code, answer.text) == (400, "Cache not flushed: still pending: 1 running.\n")
        await running
        assert (await waiting).status_code == 200
        for bad in ("x", "-1", "nan", "601"):
            assert (await server.client.get("/flush_cache", params={"timeout": bad})).status_code == 400

    run(test)


def test_metrics_are_there_before_the_first_request_and_count_after_it() -> None:
    async def test(server: Server) -> None:
        before = samples((await server.client.get("/metrics")).text)
        assert before[("sglang:cached_tokens_total", "storage")] == 0
        assert before[("cachesvc_device_pages", "")] == 64
        await server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})
        after = samples((await server.client.get("/metrics")).text)
        assert set(before) == set(after)
        assert after[("sglang:prompt_tokens_total", "")] == 6
        assert after[("sglang:generation_tokens_total", "")] == 3
        assert after[("sglang:num_requests_total", "length")] == 1
        assert after[("sglang:time_to_first_token_seconds_count", "")] == 1
        assert after[("sglang:inter_token_latency_seconds_count", "")] == 2

    run(test)


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(value for key, value in sample.labels.items() if key != "le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_metrics_need_their_flag() -> None:
    async def test(server: Server) -> None:
        response = await server.client.get("/metrics")
        assert (response.status_code, "--enable-metrics" in response.text) == (404, True)

    run(test, has_metrics=False)


def test_information_and_health() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/health_generate")).status_code == 200
        model = (await server.client.get("/get_model_info")).json()
        assert (model["model_path"], model["is_generation"], model["vocab_size"]) == ("/models/tiny.gguf", True, VOCAB)
        info = (await server.client.get("/server_info")).json()
        assert (info["page_size"], info["internal_states"][0]["engine_finished_total"]) == (4, 1)
        assert (await server.client.get("/nowhere")).json()["error"]["code"] == 404
        assert (await server.client.get("/generate")).status_code == 405

    run(test)


def test_health_fails_while_a_step_hangs() -> None:
    class Clock:
        now_s = 0.0

        def __call__(self) -> float:
            return self.now_s

    clock = Clock()

    async def test(server: Server) -> None:
        server.model.may_run.clear()
        running = asyncio.create_task(server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}))
        await server.until(server.model.has_begun)
        clock.now_s = http.STALLED_S + 1
        response = await server.client.get("/health")
        assert (response.status_code, "in one step for 301 s" in response.text) == (503, True)
        assert (await server.client.get("/metrics")).status_code == 200
        server.model.may_run.set()
        await running
        assert (await server.client.get("/health")).status_code == 200

    run(test, clock=clock)


def test_an_error_in_a_step_ends_its_requests_with_500_and_the_server_lives() -> None:
    async def test(server: Server) -> None:
        server.model.fail_with = MemoryError("no memory")
        assert "internal error" in await server.refused({"input_ids": PROMPT}, status_code=500)
        answer: Any = await server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
        assert answer["output_ids"] == expected_output(PROMPT, 2)
        assert server.engine.num_step_errors == 1
        await server.assert_nothing_held()

    run(test)


def test_after_the_engine_stopped_requests_get_503() -> None:
    async def test(server: Server) -> None:
        server.model.may_run.clear()
        running = asyncio.create_task(server.post("/generate", {"input_ids": PROMPT}))
        await server.until(server.model.has_begun)
        stopping = asyncio.create_task(asyncio.to_thread(server.engine.stop, 1.0))
        server.model.may_run.set()
        response = await running
        assert (response.status_code, "shutting down" in response.text) == (503, True)
        assert await stopping == 0
        assert "stopped" in await server.refused({"input_ids": PROMPT}, status_code=503)
        assert (await server.client.get("/health")).status_code == 503
        server.fatal.set()

    run(test)


def test_abandoning_after_the_engine_stopped_is_harmless() -> None:
    async def test(server: Server) -> None:
        server.model.may_run.clear()
        tasks = parse_generate({"input_ids": PROMPT}).tasks
        generations = await server.service.start(tasks)
        await server.until(server.model.has_begun)
        server.model.may_run.set()
        server.engine.stop(1.0)  # on the event loop, so that nothing is dispatched meanwhile
        http.abandon_all(generations)
        await generations[0].complete()
        server.fatal.set()

    run(test)
