"""vLLM's engine in this process, scheduler and worker in one thread, one step at a time.

What takes three processes elsewhere can be stopped here between any two steps: while a load runs, before a store has
ended. The same connector, both halves, loaded by the same flags; the messages between the halves are pickled as there.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tests.engines.vllm import settings

os.environ.update(settings.ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")

from vllm import CompletionOutput, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from tests.engines.models import MODELS
from tests.engines.vllm.answers import Answer

__all__ = ["LoRARequest", "SteppedEngine"]

HANG_S = 120.0
KV_BYTES = 16 * settings.MIB
CONTEXT_TOKENS = 4096


class SteppedEngine:
    """One engine with a tiny model. A context; leaving it shuts the engine down.

    options: of the connector, made vLLM's configuration by `configure`; None: vLLM without one. `named` are vLLM's own
    engine arguments.
    """

    def __init__(
        self,
        options: dict[str, object] | None,
        model: str = settings.TINY,
        *,
        configure: Callable[[dict[str, object]], dict[str, Any]] = settings.spied,
        **named: Any,
    ) -> None:
        transfer = None if options is None else KVTransferConfig(**configure(options))
        arguments = {
            "served_model_name": "model",
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": settings.BLOCK_SIZE,
            "max_model_len": CONTEXT_TOKENS,
            "kv_cache_memory_bytes": KV_BYTES,
            "enable_prefix_caching": True,
            "kv_transfer_config": transfer,
            **named,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=str(MODELS / model), **arguments))
        self._core: Any = self._engine.engine_core
        self._answers: dict[str, list[Answer]] = {}
        self._next_id = 0
        self._num_preemptions = 0
        self._count_preemptions()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As when the process is told to end."""
        self._core.shutdown()
        del self._engine, self._core
        gc.collect()

    # ---- requests

    def add(
        self,
        tokens: list[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        lora: Any = None,
        priority: int = 0,
        **sampling: Any,
    ) -> str:
        """A request begins to wait; its id. `sampling`: vLLM's parameters, in place of greedy ones."""
        self._next_id += 1
        request_id = f"r{self._next_id}"
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        greedy = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 1, "detokenize": False}
        params = SamplingParams(**{**greedy, "output_kind": RequestOutputKind.FINAL_ONLY, **sampling})
        self._engine.add_request(request_id, prompt, params, lora_request=lora, priority=priority)
        return request_id

    def step(self) -> None:
        """One turn of the engine."""
        for output in self._engine.step():
            if output.finished:
                self._answers[output.request_id] = [_answer(output, done) for done in output.outputs]

    def finish(self, *request_ids: str) -> list[Answer]:
        """Steps until these have their answers: the first one of each."""
        return [answers[0] for answers in self.finish_all(*request_ids)]

    def finish_all(self, *request_ids: str) -> list[list[Answer]]:
        """Steps until these have all their answers."""
        self.step_until(lambda: all(one in self._answers for one in request_ids))
        return [self._answers.pop(one) for one in request_ids]

    def ask(self, tokens: list[int], max_tokens: int = 4, *, salt: str | None = None, lora: Any = None) -> Answer:
        """One request from its arrival to its answer."""
        return self.finish(self.add(tokens, max_tokens, salt=salt, lora=lora))[0]

    def step_until(self, is_reached: Any) -> None:
        """Steps until `is_reached()`."""
        deadline_s = time.monotonic() + HANG_S
        while not is_reached():
            assert time.monotonic() < deadline_s, "the engine does not get there"
            self.step()
            os.sched_yield()

    def abort(self, *request_ids: str) -> None:
        """As when a client goes away."""
        self._engine.abort_request(list(request_ids), internal=False)

    def settle(self) -> None:
        """Until the engine has nothing left to do, copies included."""
        self.step_until(lambda: not self.has_work())

    def has_work(self) -> bool:
        """Requests, or blocks that wait for the connector."""
        return bool(self._engine.has_unfinished_requests() or self.scheduler.has_requests() or self.held_blocks())

    # ---- looking behind the interface

    @property
    def scheduler(self) -> Any:
        """vLLM's."""
        return self._core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's half."""
        return self.scheduler.connector

    def held_blocks(self) -> int:
        """Device blocks that somebody has a reference to."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is vLLM's own, for padding

    def status(self, request_id: str) -> str:
        """What the scheduler thinks of a request; `gone` after its end."""
        request = self._request(request_id)
        return "gone" if request is None else str(request.status.name)

    def num_output_tokens(self, request_id: str) -> int:
        """What a request has decoded so far."""
        request = self._request(request_id)
        return 0 if request is None else int(request.num_output_tokens)

    def num_preemptions(self) -> int:
        """So far."""
        return self._num_preemptions

    def _count_preemptions(self) -> None:
        scheduler, preempt = self.scheduler, self.scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*arguments, **named)

        scheduler._preempt_request = counted

    def _request(self, request_id: str) -> Any:
        """vLLM adds random letters to an id."""
        found = self.scheduler.requests.values()
        return next((one for one in found if one.request_id.startswith(f"{request_id}-")), None)

    def check(self) -> None:
        """The connector's frames: each in exactly one state, none locked by a request that is gone."""
        core = self.connector._half._core
        assert core is not None, "the cache is off"
        core.check()

    def forget_device(self) -> None:
        """The prefixes on the device; those below stay. Fails while anything holds a block."""
        self.settle()
        assert self._engine.reset_prefix_cache(), f"{self.held_blocks()} blocks are still held"

    def has_node_work(self) -> bool:
        """Something is being read from storage or written to it; `check` looks for forgotten locks when nothing is."""
        core = self.connector._half._core
        assert core is not None, "the cache is off"
        return bool(core._reads.num_pending or core._backup.num_storing)

    def reset(self, *, is_deep: bool) -> None:
        """The prefixes on the device, and `is_deep`: those below. Requests that run begin anew, which vLLM cannot make
        those do that wait for a load: then it is done as far as their blocks allow."""
        is_loading = any(one.status.name == "WAITING_FOR_REMOTE_KVS" for one in self.scheduler.requests.values())
        self._engine.reset_prefix_cache(reset_running_requests=not is_loading, reset_connector=is_deep)

    def reset_with_running_requests(self) -> None:
        """As somebody does who does not look at what the requests wait for."""
        self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def forget_all(self) -> bool:
        """The prefixes below the device too; whether it was done."""
        self.settle()
        return bool(self._engine.reset_prefix_cache(reset_connector=True))


def _answer(output: RequestOutput, done: CompletionOutput) -> Answer:
    logprobs = (row[token].logprob for token, row in zip(done.token_ids, done.logprobs, strict=True))
    return Answer(tuple(done.token_ids), tuple(logprobs), output.num_cached_tokens or 0, str(done.finish_reason))
