"""Tune many cases with worker processes, one for each GPU, and go on past whatever a config does to them.

A worker that dies, faults its GPU or hangs is replaced. The journal of the shape it was tuning says which config was
in flight; that config is recorded as failed with the reason, and the case is run again from where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache.errors import UsageError
from tcache.journal import Journal, in_flight
from tcache.store import Timing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COMMAND", "Result", "Task", "gpu_names", "supervise", "visible_gpus"]

COMMAND = [sys.executable, "-c", "from tcache.tuneworker import main; main()"]
_DEATHS = 3


@dataclass(frozen=True)
class Task:
    """What workers are started with.

    Attributes:
        request: first line to a worker: ``manifests``, ``store``, ``retune``, ``since``.
        store: root of the store, where journals are.
        timeout: seconds a config may be benchmarked before it counts as hung.
        patience: seconds a worker may start, or run a case without benchmarking anything, before it counts as hung;
            compiling is part of it.
        command: how to start a worker.
    """

    request: dict[str, Any]
    store: Path
    timeout: float
    command: list[str] = field(default_factory=lambda: list(COMMAND))
    patience: float = 900.0


@dataclass(frozen=True)
class Result:
    """What became of one case.

    Attributes:
        case: its number.
        seconds: how long it took, failed attempts included.
        launches: ``gpu``, ``kernel``, ``shape``, ``config`` and ``default`` of every autotuned launch in it.
        error: why it could not be run, else None.
        failed: configs that ended or hung a worker: ``(config, reason)``.
    """

    case: int
    seconds: float
    launches: list[dict[str, Any]]
    error: str | None = None
    failed: tuple[tuple[str, str], ...] = ()


def visible_gpus() -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` may be set to for each GPU, without starting CUDA in this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device.strip()]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return ["0"]
    return [str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU")] or ["0"]


def gpu_names() -> set[str]:
    """Return the names of this machine's NVIDIA GPUs; empty where there is no ``nvidia-smi`` to ask."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return set()
    return {match[1] for match in re.finditer(r"^GPU \d+: (.+?) \(UUID", done.stdout, re.MULTILINE)}


def supervise(
    task: Task, cases: list[int], devices: list[str], done: Callable[[Result], None], budget: float | None = None
) -> list[int]:
    """Run cases on the GPUs named and call ``done`` for each as it ends, in this thread.

    Args:
        task: what workers are started with.
        cases: numbers of the cases.
        devices: values of ``CUDA_VISIBLE_DEVICES``, one worker each.
        done: what to do with a result.
        budget: seconds after which no further case is begun.

    Returns:
        The cases that were not begun because the budget was spent.

    Raises:
        TcacheError: a worker cannot be started.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    results: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    end = time.monotonic() + budget if budget is not None else None
    ending = threading.Event()

    def serve(device: str) -> None:
        worker = _Worker(task, device, ending)
        try:
            while not ending.is_set() and (end is None or time.monotonic() < end):
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    break
                results.put(worker.run(case))
        except BaseException as error:
            results.put(error)
        finally:
            worker.stop()
            results.put(None)

    threads = [threading.Thread(target=serve, args=(device,), daemon=True) for device in devices[: max(1, len(cases))]]
    for thread in threads:
        thread.start()
    try:
        ended = 0
        while ended < len(threads):
            result = results.get()
            if result is None:
                ended += 1
            elif isinstance(result, BaseException):
                raise result
            else:
                done(result)
    finally:  # whatever ends this call ends the workers too: what they found is in their journals
        ending.set()
        for thread in threads:
            thread.join()
    left = []
    while not waiting.empty():
        left.append(waiting.get_nowait())
    return left


class _Worker:
    """One worker process on one GPU, restarted as often as needed."""

    def __init__(self, task: Task, device: str, ending: threading.Event) -> None:
        self._task, self._device, self._ending = task, device, ending
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._idle, self._alive = False, time.monotonic()

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._device}
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        process = subprocess.Popen(
            self._task.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._process, self._lines = process, queue.SimpleQueue()
        threading.Thread(target=_pump, args=(process, self._lines), daemon=True).start()
        try:
            self._send(self._task.request)
            line = self._first_line()
            first = json.loads(line) if line else {}
        except (OSError, ValueError):
            first = {}
        if "ready" not in first:
            self.stop()
            raise UsageError(first.get("error", "the tuning worker ended before it was ready"), first.get("hint"))
        return process

    def _first_line(self) -> str | None:
        end = time.monotonic() + self._task.patience
        while not self._ending.is_set():
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=1.0)
            if time.monotonic() > end:
                raise UsageError(
                    f"the tuning worker on GPU {self._device} did not start within {self._task.patience:.0f} s",
                    "see whether the GPU answers: nvidia-smi",
                )
        return None

    def _send(self, row: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()

    def run(self, case: int) -> Result:
        """Run one case to its end."""
        begin = time.monotonic()
        failed: list[tuple[str, str]] = []
        unexplained = 0
        while True:
            process = self._process or self._start()
            try:
                self._send({"case": case})
                answer = self._answer(process, failed)
            except (OSError, ValueError):  # it ended between two cases, or what it said is no answer
                answer = None
            if answer is not None and "faulted" not in answer:
                seconds = time.monotonic() - begin
                error = answer.get("error")
                return Result(case, seconds, answer.get("launches", []), error, tuple(failed))
            if answer is not None:  # the worker wrote down the config itself before it gave up
                failed.append((answer["faulted"], "faulted the GPU"))
            else:
                unexplained += 1
            self.stop()
            if self._ending.is_set():
                return Result(case, time.monotonic() - begin, [], "interrupted", tuple(failed))
            if self._idle:
                reason = f"no sign of life for {self._task.patience:.0f} s outside a benchmark"
                return Result(case, time.monotonic() - begin, [], reason, tuple(failed))
            if unexplained + len(failed) > 100 or unexplained >= _DEATHS:
                return Result(case, time.monotonic() - begin, [], "the worker keeps ending", tuple(failed))

    def _answer(self, process: subprocess.Popen[str], failed: list[tuple[str, str]]) -> dict[str, Any] | None:
        """Wait for an answer; None when the worker ended or hung, after noting the config in flight."""
        self._idle, self._alive = False, time.monotonic()
        while True:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                if self._ending.is_set() or self._hung(process, failed):
                    return None
                continue
            if line is None:
                code = process.wait()
                name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self._note(process, f"ended the process ({name})", failed)
                return None
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _hung(self, process: subprocess.Popen[str], failed: list[tuple[str, str]]) -> bool:
        for path in self._journals():
            row = in_flight(path)
            if row is not None and row.get("pid") == process.pid:
                try:
                    age = time.time() - path.stat().st_mtime
                except FileNotFoundError:
                    continue
                self._alive = time.monotonic()
                if age > self._task.timeout:
                    process.kill()
                    process.wait()
                    self._note(process, f"hung: no result after {self._task.timeout:.0f} s", failed)
                    return True
        self._idle = time.monotonic() - self._alive > self._task.patience
        return self._idle

    def _journals(self) -> list[Path]:
        return sorted(self._task.store.glob("*/.tuning/*.jsonl"))

    def _note(self, process: subprocess.Popen[str], reason: str, failed: list[tuple[str, str]]) -> None:
        """Record the config that a dead worker was benchmarking as failed."""
        for path in self._journals():
            row = in_flight(path)
            if row is not None and row.get("pid") == process.pid:
                Journal(path, str(row["source"])).result(str(row["config"]), Timing(failed=reason))
                failed.append((str(row["config"]), reason))

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self._ending.is_set() or self._idle:
            process.kill()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)
