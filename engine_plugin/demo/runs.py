"""The three runs: how each engine is started, and what is asked of it before it stops."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine_plugin.demo.client import EngineClient
from engine_plugin.demo.engines import EngineProcess
from engine_plugin.demo.errors import EngineError
from engine_plugin.demo.model import ServedModel
from engine_plugin.demo.play import RunResult, TierBytes, measure_speed, play
from engine_plugin.demo.report import RUN_STYLES
from engine_plugin.demo.screen import Screen
from engine_plugin.demo.sizing import Plan
from engine_plugin.demo.speed import MeasuredPace, NoHurry, Pace, Speed
from engine_plugin.demo.storage import Storage

ENGINE_COMMAND = (sys.executable, "-m", "engine_plugin.launch_server")
DRAIN_TIMEOUT_S = 60
RUN_NAMES = ("without tiers", "with tiers", "after restart")
_CALIBRATION_POOL_TOKENS = 4096


@dataclass(frozen=True)
class Engines:
    """How to start engines. `command` is the program; `extra` goes last, so that it wins over what the demo chose."""

    command: tuple[str, ...]
    extra: tuple[str, ...]
    page_size: int
    work_dir: Path
    storage: Storage

    def process(self, name: str, pool_tokens: int, *tier_flags: str) -> EngineProcess:
        """An engine on a free loopback port with a device pool of pool_tokens."""
        place = ("--host", "127.0.0.1", "--port", "0")
        pool = ("--page-size", str(self.page_size), "--max-total-tokens", str(pool_tokens))
        flags = (*place, *pool, "--drain-timeout", str(DRAIN_TIMEOUT_S), *tier_flags, *self.extra)
        log_path = self.work_dir / f"engine-{name.replace(' ', '-')}.log"
        return EngineProcess((*self.command, *flags), log_path, stop_timeout_s=1.5 * DRAIN_TIMEOUT_S)

    def tier_flags(self) -> tuple[str, ...]:
        """Host memory of the default size (twice the device pool) and storage below it."""
        return ("--enable-hierarchical-cache", *self.storage.flags())


def measure(engines: Engines, model: ServedModel) -> Speed:
    """The speed of this machine, from an engine that lives only for it. Raises EngineError."""
    engine = engines.process("speed", _CALIBRATION_POOL_TOKENS)
    with _explained(engine), engine:
        return measure_speed(engine.client(), model.encoder.vocab_size, model.context_tokens)


def play_all(engines: Engines, plan: Plan, screen: Screen) -> tuple[Plan, tuple[RunResult, ...]]:
    """The three runs, one engine after the other. Raises EngineError with the engine's last words.

    The first run may end after fewer turns, when the machine has become slower; the others then play those. Returns
    what was played.
    """
    tiers = engines.tier_flags()
    pace = NoHurry() if plan.speed is None else MeasuredPace(plan.speed, plan.lengths, plan.max_new_tokens)
    first = _play_one(engines, plan, screen, 0, (), pace)
    played = plan.until(max(result.turn for result in first.turns) + 1)
    if played.num_turns < plan.num_turns:
        screen.note(played.notes[-1])
    return played, (first, *(_play_one(engines, played, screen, index, tiers, NoHurry()) for index in (1, 2)))


def _play_one(engines: Engines, plan: Plan, screen: Screen, index: int, flags: Sequence[str], pace: Pace) -> RunResult:
    name = RUN_NAMES[index]
    engine = engines.process(name, plan.device_tokens, *flags)
    with screen.playing(name, plan.num_requests, RUN_STYLES[index]) as on_turn, _explained(engine), engine:
        begin = time.perf_counter()
        turns = play(engine.client(), plan.sessions, plan.max_new_tokens, pace, on_turn)
        played_s = time.perf_counter() - begin
        held = held_bytes(engine.client())
    storage = engines.storage.used_bytes() if flags else None
    return RunResult(name, turns, engine.start_s, played_s, engine.stop_s, replace(held, storage=storage))


def held_bytes(client: EngineClient) -> TierBytes:
    """KV bytes in the device pool and in host memory, by the engine's own counters. Raises EngineError."""
    info = client.get_json("/server_info")
    page_bytes, (counters,) = info["page_bytes"], info["internal_states"]
    host = page_bytes * (counters["host_frames"] - counters["host_frames_free"]) if "host_frames" in counters else None
    return TierBytes(page_bytes * counters["device_pages_cached"], host, None)


@contextmanager
def _explained(engine: EngineProcess) -> Iterator[None]:
    """Around the engine's life: an EngineError gets the engine's last words, which usually say why."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{error}\n{engine.last_words()}") from error
