"""The process that tunes on one GPU: told which case to run, line by line, by :mod:`tcache.supervise`.

It reads ``{"case": 3}`` and answers ``{"case": 3, "seconds": 1.2, "launches": [...]}``, or ``{"case": 3, "error": …}``
when the case itself cannot run. It may die at any time: what it found is in the store or in a journal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tcache.errors import TcacheError

__all__ = ["main"]


def main() -> None:
    """Serve cases from standard input until it ends."""
    request = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what kernels and libraries print is no answer

    def answer(row: dict[str, Any]) -> None:
        print(json.dumps(row), file=answers, flush=True)

    import torch

    if not torch.cuda.is_available():
        answer(
            {"error": "no GPU here: tuning benchmarks kernels", "hint": "run it on the GPU the best configs are for"}
        )
        return
    from tcache.tuning import Faulted

    seen: list[dict[str, Any]] = []
    try:
        cases = _prepare(request, seen)
    except TcacheError as error:
        answer({"error": error.message, "hint": error.hint})
        return
    answer({"ready": True, "gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()})
    from tcache.lookup import current_gpu
    from tcache.replay import run_case

    name = current_gpu().name
    for line in sys.stdin:
        number = json.loads(line)["case"]
        seen.clear()
        begin = time.perf_counter()
        try:
            if cases[number].runs_on(name):
                run_case(cases[number])
        except Faulted as error:
            answer({"case": number, "faulted": error.message})
            os._exit(error.exit_code)  # the context is beyond use, also for tearing it down
        except TcacheError as error:
            answer({"case": number, "error": error.message, "hint": error.hint})
        else:
            answer({"case": number, "seconds": time.perf_counter() - begin, "launches": list(seen)})


def _prepare(request: dict[str, Any], seen: list[dict[str, Any]]) -> list[Any]:
    from tcache.active import activate
    from tcache.manifest import load_manifest

    def selected(gpu: str, kernel: Any, shape: Any, config: str, default: str) -> None:
        seen.append({"gpu": gpu, "kernel": kernel.ref, "shape": str(shape), "config": config, "default": default})

    activate(mode="tune", store=request["store"], retune=request["retune"], since=request["since"], on_select=selected)
    return [case for path in request["manifests"] for case in load_manifest(Path(path)).cases()]
