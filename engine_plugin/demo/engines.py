"""An engine as a child process: started, its address read from what it prints, always stopped by its pid.

DESIGN: one thread per child reads its output until the end: every line goes to the log file, the last ones are kept
for error messages, and the line with the address, or the end of the output, wakes the waiting starter. The child leads
a process group of its own, so that a Ctrl-C in the terminal reaches us alone and the child is stopped in order.
"""

import contextlib
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from engine_plugin.demo.client import EngineClient
from engine_plugin.demo.errors import EngineError

_ADDRESS = re.compile(r"http://([0-9.]+):([1-9][0-9]*)")
_TAIL_LINES = 20
_KILL_WAIT_S = 10.0


class EngineProcess:
    """A context: entering starts the engine and waits until it listens, leaving stops it. One use.

    Raises EngineError when it does not come up within start_timeout_s; `last_words` then tells more.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        start_timeout_s: float = 180.0,
        stop_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._command = tuple(command)
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._clock = clock
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._heard = threading.Event()  # the address is known, or will never be
        self._address: tuple[str, int] | None = None
        self._reader = threading.Thread(target=self._read, name="engine-log", daemon=True)
        self._own_status: int | None = None
        self.start_s = 0.0
        self.stop_s = 0.0

    def __enter__(self) -> Self:
        begin = self._clock()
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            self._reader.start()
            self._heard.wait(self._start_timeout_s)
            if self._address is None:
                raise EngineError("the engine did not start")
        except BaseException:
            self.stop()
            raise
        self.start_s = self._clock() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def client(self) -> EngineClient:
        """A client of the running engine."""
        if self._address is None:
            raise EngineError("the engine is not running")
        return EngineClient(*self._address)

    def stop(self) -> None:
        """Asks the engine to end (it drains what it still writes), waits, then kills it."""
        begin = self._clock()
        if self._has_ended():
            self._own_status = self._child.returncode
        else:
            self._child.terminate()
            try:
                self._child.wait(self._stop_timeout_s)
            except BaseException as error:
                self._child.kill()
                self._child.wait(_KILL_WAIT_S)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                self._tail.append(f"(killed: it did not end within {self._stop_timeout_s:.0f} s)")
        self._reader.join(_KILL_WAIT_S)
        self.stop_s = self.stop_s or self._clock() - begin

    def last_words(self) -> str:
        """What was run, how it ended, the last lines it printed: for error messages, once the engine has stopped."""
        state = (
            "stopped by the demo" if self._own_status is None else f"it ended by itself, exit status {self._own_status}"
        )
        return "\n".join([f"$ {' '.join(self._command)}", *(f"  | {line}" for line in self._tail), f"  ({state})"])

    def _has_ended(self) -> bool:
        """True once the child is gone of its own accord; a child that has closed its output is about to."""
        if self._child.poll() is None and not self._reader.is_alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_KILL_WAIT_S)
        return self._child.poll() is not None

    def _read(self) -> None:
        """Thread: the child's output, line by line, until it closes it."""
        output = self._child.stdout
        assert output is not None  # asked for with PIPE
        with output, self._log_path.open("w", encoding="utf-8") as log:
            for line in output:
                log.write(line)
                log.flush()
                self._tail.append(line.rstrip("\n"))
                if self._address is None and (match := _ADDRESS.search(line)):
                    self._address = (match[1], int(match[2]))
                    self._heard.set()
        self._heard.set()
