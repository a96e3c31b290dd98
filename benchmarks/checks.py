"""What the argument checks of the kernel library cost on the host, beside the calls that they are part of.

Every wrapper of ``kernels/`` that launches something is called with all of its arguments, small tensors on the CPU, on
a driver that compiles for real (compute capability 9.0, best configs of an NVIDIA H200) and launches nothing:

- ``call_us``: the whole call: checks, results, choice of the kernel and its entry, launches without the launch.
- ``unchecked_us``: the same call while nothing is checked: functions that check arguments return them as they are.
- ``checks_us``: the difference, and ``share``, what it is of the call.

Both kinds run in turns, in many short rounds, by the thread's own clock, which stands still while another process has
the core; the median of the rounds counts. Comparisons that stand in a wrapper's own body
stay in both. On a GPU a call takes longer: results are made by torch's allocator, a context of the tensors' device is
entered, and Triton's launcher hands over its arguments. Writes ``kernel_checks.json`` to ``--output`` (default:
``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _machine
from _machine import ROOT


def _scaled(scale: float | None, dim: int) -> float:
    return dim**-0.5 if scale is None else scale


def _nothing(*_: object, **__: object) -> None:
    pass


UNCHECKED = {
    "_check": {
        **dict.fromkeys(("readable", "writable", "number", "flag"), lambda _, value, *__, **___: value),
        **dict.fromkeys(("check_device", "check_dtype", "check_shape", "check_fp8", "check_any_order"), _nothing),
        "integer": lambda _, value, *__: value,
        "positive": lambda _, value, default: default if value is None else value,
    },
    "_matrices": {"operands": lambda a, b: (a, b)},
    "_norm_launches": {
        "check_norm": lambda x, weight, bias: (x, weight, bias),
        "statistic": lambda _, value, __: value,
    },
    "_rows": {"vector": lambda _, value, __: value},
    "attention_forward": {"check_attention": lambda q, k, v, scale: (q, k, v, _scaled(scale, q.shape[3]))},
    "decode_attention": {"_check": lambda q, *rest: (q, *rest[:-1], _scaled(rest[-1], q.shape[2]))},
    "elementwise": {"_factors": lambda _, a, b: (a, b)},
    "grouped_gemm": {"_check": lambda *given: given},
    "quantize": {"_readable_scale": lambda scale, *_: scale},
    "sparse_conv": {
        "read_map": lambda neighbours: neighbours,
        "read_rows": lambda _, rows, __: rows,
        "read_weight": lambda weight, *_: weight,
        "read_sorted": lambda order, masks, _: (order, masks),
    },
}
"""Module of the library -> its functions that check arguments -> what takes their place."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let nothing be checked inside the block: wherever the library has one of these functions, under its name."""
    put: list[tuple[Any, str, object]] = []
    stand_ins = {
        id(getattr(sys.modules[f"kernels.{module}"], name)): stand_in
        for module, functions in UNCHECKED.items()
        for name, stand_in in functions.items()
    }
    for module in [each for name, each in sys.modules.items() if name.startswith("kernels.")]:
        put += [(module, name, value) for name, value in vars(module).items() if id(value) in stand_ins]
    for module, name, value in put:
        setattr(module, name, stand_ins[id(value)])
    try:
        yield
    finally:
        for module, name, value in put:
            setattr(module, name, value)


def per_call(function: Any, arguments: dict[str, Any], calls: int) -> float:
    """Return microseconds of this thread's time a call."""
    begin = time.thread_time()
    for _ in range(calls):
        function(**arguments)
    return (time.thread_time() - begin) / calls * 1e6


def measure(function: Any, arguments: dict[str, Any], counter: Any, rounds: int, calls: int) -> dict[str, Any] | None:
    """Return what a wrapper's call and its checks cost; None where it launches nothing."""
    function(**arguments)  # compiles
    before = next(counter)
    function(**arguments)
    launches = next(counter) - before - 1
    if not launches:
        return None
    whole, bare = [], []
    for _ in range(rounds):
        whole.append(per_call(function, arguments, calls))
        with unchecked():
            bare.append(per_call(function, arguments, calls))
    call, rest = statistics.median(whole), statistics.median(bare)
    return {
        "launches": launches,
        "call_us": round(call, 2),
        "unchecked_us": round(rest, 2),
        "checks_us": round(call - rest, 2),
        "share": round((call - rest) / call, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=151)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--only", help="a wrapper, to look at it alone; writes nothing")
    parser.add_argument("--output", type=Path, default=_machine.RESULTS)
    arguments = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(("TCACHE_", "TRITON_"))]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(
            TCACHE_MODE="lookup", TCACHE_STORE=str(ROOT / "best_configs"), TCACHE_GPU_NAME="NVIDIA H200",
            TRITON_CACHE_DIR=scratch,
        )  # fmt: skip
        sys.path[:0] = [str(ROOT / "tests" / "contract"), str(ROOT / "tests" / "numerics")]
        import null_driver

        counter = itertools.count()
        null_driver.activate().launcher_cls = lambda *_: lambda *_: next(counter)
        import argument_cases

        logging.getLogger("tcache").setLevel(logging.ERROR)  # shapes this small were never tuned
        wrappers = {name: argument_cases.wrapper(name) for name in argument_cases.MODULE_OF}
        found = {}
        for name, given in argument_cases.calls("cpu").items():
            if arguments.only in (None, name):
                values = argument_cases.values(given)
                found[name] = measure(wrappers[name], values, counter, arguments.rounds, arguments.calls)
                print(name, found[name], flush=True)
    _report(arguments, {name: row for name, row in sorted(found.items()) if row is not None})
    os._exit(0)  # a null driver may go before its kernels


def _report(arguments: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Write what was found, with the medians over all wrappers."""
    if arguments.only is not None:
        return
    _machine.RESULTS = arguments.output
    result = {
        "driver": "null: what is launched costs nothing",
        "rounds": arguments.rounds,
        "calls_a_round": arguments.calls,
        "medians": {
            kind: round(statistics.median(row[kind] for row in found.values()), 3)
            for kind in ("call_us", "checks_us", "share")
        },
        "wrappers": found,
    }
    print(_machine.write("kernel_checks", result).read_text(), flush=True)


if __name__ == "__main__":
    main()
