"""sglang.server_*: what a client of SGLang's real server waits for the first token, by what had the prompt's KV:
nobody, the device, host memory, or the storage below after the engine was killed and started again.

    make bench-engines ENGINE=sglang ONLY='sglang.server_*' [JSON=out.json] [ROUNDS=n]

Two backends take turns, each below servers of its own that are started alike: cachesvc, whose daemon outlives the
engine, and SGLang's `file`, whose files lie in the page cache. Each prompt is computed once; then, `RESTARTS` times, an
engine is started anew and asked for all prompts, each right after it again, when the device has it, and at last each
once more, when the device has had others since. So the cost of restoring is a difference within one engine, prompt by
prompt. Every answer is greedy and must be that of the cold run, and every tier must have had just what is said; in the
end pages are changed on their way, and that must change the answer.

float32 throughout, so that a hit computes exactly what a cold run does; one thread for the model unless OMP_NUM_THREADS
says otherwise, so that a core is left for what loads.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from bench.harness import Measurement, Run, figure
from tests.engines.models import MODELS, SMOLLM2, text_tokens
from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.server import Answer, Server, launch_flags, prompt
from tests.engines.sglang.tiny_qwen3 import TINY, WIDE, Shape, write_model

PAGE_TOKENS = 64
LEFT_TOKENS = 16
"""Beyond the whole pages, and computed even for a hit: as few as there can be with matrix products whose rows are,
bit for bit, those of a long prompt."""
CACHED_TOKENS = 31 * PAGE_TOKENS
TOKENS = CACHED_TOKENS + LEFT_TOKENS
DEVICE_TOKENS = CACHED_TOKENS + 8 * PAGE_TOKENS
"""Place for one prompt and what SGLang keeps free beside it, not for two."""
NEW_TOKENS = 8
PROMPTS, RESTARTS = 4, 3
MANAGED, LENT_GIB = "1 GiB", 0.75
WARM_UP = prompt(999, 2 * PAGE_TOKENS)
THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Case:
    """A model and the prompts that it is asked. token_bytes: of KV."""

    name: str
    token_bytes: int
    model: Callable[[Path], Path]
    prompt: Callable[[int, int], list[int]]


def _qwen3(name: str, shape: Shape) -> Case:
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    return Case(name, token_bytes, partial(write_model, seed=1, shape=shape), prompt)


def _text(number: int, tokens: int) -> list[int]:
    """A piece of a real text. It begins and ends where no other number's does."""
    return text_tokens(tokens, first=500 * number)


def _smollm2(folder: Path) -> Path:
    del folder
    return MODELS / SMOLLM2


CASES = (
    _qwen3("tiny", TINY),
    _qwen3("wide", WIDE),
    Case("smollm2", 2 * 30 * 3 * 64 * 4, _smollm2, _text),
)


class Side:
    """One backend below servers of its own. took_ms: to the first token, by what had the prompt's KV."""

    def __init__(self, case: Case, model: Path, flags: list[str]) -> None:
        self.flags = flags
        self.took_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.cold: list[list[int]] = []
        self._model = model
        self._prompts = [case.prompt(number, TOKENS) for number in range(1, PROMPTS + 1)]

    @contextmanager
    def server(self) -> Iterator[Server]:
        """One that is killed in the end."""
        with Server(self._model, self.flags, device_tokens=DEVICE_TOKENS) as server:
            yield server
            server.kill()

    def fill(self) -> None:
        """Every prompt is computed, and is in the storage when this returns."""
        with self.server() as server:
            server.ask(WARM_UP)
            for number in range(PROMPTS):
                self.cold.append(self._ask(server, number, "cold", (0, 0, 0)).tokens)
            server.detach()
        assert len(set(map(tuple, self.cold))) == PROMPTS, "KV of another prompt would not show"

    def restart(self, server: Server, turn: int) -> None:
        """All prompts of an engine that was just started; each turn begins with another one."""
        order = [(turn + number) % PROMPTS for number in range(PROMPTS)]
        for number in order:
            loaded = self._checked(server, number, "first" if number == order[0] else "restart", (0, 0, CACHED_TOKENS))
            again = self._checked(server, number, "device", (CACHED_TOKENS, 0, 0))
            if number != order[0]:
                self.took_ms["restore"].append((loaded.first_s - again.first_s) * 1e3)
        for number in order:
            self._checked(server, number, "host", (0, CACHED_TOKENS, 0))

    def control(self, server: Server) -> None:
        """Pages that are changed on their way change the answer."""
        server.detach()
        server.flush()
        server.attach(media.attached(self.flags, module_path="tampered_storage", class_name="Scaled"))
        answer = server.ask(self._prompts[0], NEW_TOKENS)
        assert answer.storage == CACHED_TOKENS, answer
        assert answer.tokens != self.cold[0], "changed pages did not change the answer"

    def _checked(self, server: Server, number: int, kind: str, had: tuple[int, int, int]) -> Answer:
        answer = self._ask(server, number, kind, had)
        assert answer.tokens == self.cold[number], f"{kind}: {answer.tokens} for {self.cold[number]}"
        return answer

    def _ask(self, server: Server, number: int, kind: str, had: tuple[int, int, int]) -> Answer:
        answer = server.ask(self._prompts[number], NEW_TOKENS)
        assert answer[2:] == had, f"{kind}: device, host and storage had {answer[2:]} tokens, not {had}"
        self.took_ms[kind].append(answer.first_s * 1e3)
        return answer


@cache
def played(case: Case, restarts: int) -> tuple[Side, Side]:
    """Ours and SGLang's `file`. All figures of a case are of the same requests."""
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder, Daemon(managed=MANAGED) as daemon:
        model = case.model(Path(folder) / "model")
        ours = Side(case, model, launch_flags(daemon, LENT_GIB))
        files = Side(case, model, file_flags(ours.flags, Path(folder) / "files"))
        for side in (ours, files):
            side.fill()
        assert ours.cold == files.cold
        for turn in range(restarts):
            for side in (ours, files):
                with side.server() as server:
                    side.restart(server, turn)
                    if side is ours and turn == restarts - 1:
                        side.control(server)
    return ours, files


def file_flags(ours: list[str], folder: Path) -> list[str]:
    """Our launch line with SGLang's own backend in it."""
    storage = media.file(folder)
    line = list(ours)
    line[line.index("--hicache-storage-backend") + 1] = str(storage.backend)
    line[line.index("--hicache-storage-backend-extra-config") + 1] = str(storage.extra_json())
    return line


def _measured(case: Case, kind: str, run: Run) -> Measurement:
    ours, files = (side.took_ms[kind] for side in played(case, min(run.rounds, RESTARTS)))
    size_mb = case.token_bytes * CACHED_TOKENS / 1e6
    note = f"p95 {_p95(ours):.0f}, theirs {_p95(files):.0f}; {TOKENS:,} tokens, {size_mb:.0f} MB; {THREADS} thread(s)"
    return run.of(ours, files, note=note)


def _p95(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=20, method="inclusive")[-1]


TARGETS = {"cold": "", "device": "", "host": "", "first": "", "restart": "", "restore": "ratio<=1"}
"""By what had the prompt's KV; `restore` is `restart` less `device`."""
for _case in CASES:
    for _kind, _target in TARGETS.items():
        figure(
            f"sglang.server_{_case.name}_{_kind}",
            unit="ms",
            target=_target,
            reference="SGLang's file backend",
        )(partial(_measured, _case, _kind))
