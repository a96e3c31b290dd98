"""The supervisor of tuning workers, against workers that crash, hang, fault and lie."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time

import pytest

from tcache.errors import UsageError
from tcache.journal import Journal, in_flight
from tcache.store import Timing
from tcache.supervise import Task, supervise, visible_gpus

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from tcache.journal import Journal
from tcache.store import Timing
request = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True, "gpu": "G", "gpus": 1}), flush=True)
folder = Path(request["store"]) / "g" / ".tuning"
for line in sys.stdin:
    case = json.loads(line)["case"]
    journal = Journal(folder / f"k-{case}.jsonl", "s")
    for config in request["configs"]:
        if config in journal.timings:
            continue
        journal.start(config)
        if config == "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        elif config == "hang":
            time.sleep(1000)
        elif config == "fault":
            journal.result(config, Timing(failed="illegal access"))
            print(json.dumps({"case": case, "faulted": config}), flush=True)
            os._exit(75)
        elif config == "exit":
            os._exit(3)
        journal.result(config, Timing(1.0))
    time.sleep(request.get("sleep", 0))
    where = os.environ["CUDA_VISIBLE_DEVICES"]
    print(json.dumps({"case": case, "seconds": 0.0, "launches": [{"gpu": where}]}), flush=True)
"""


def task(tmp_path, configs, *, worker=WORKER, timeout=2.0, patience=60.0, **more):
    request = {"store": str(tmp_path), "configs": configs, **more}
    return Task(request, tmp_path, timeout, [sys.executable, "-c", textwrap.dedent(worker)], patience)


def run(made, cases, devices=("0",), **more):
    results = []
    left = supervise(made, cases, list(devices), results.append, **more)
    return sorted(results, key=lambda row: row.case), left


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("abort", "ended the process (SIGABRT)"), ("exit", "ended the process (exit code 3)"),
     ("hang", "hung: no result after 2 s"), ("fault", "illegal access")],
)  # fmt: skip
def test_a_bad_config_is_recorded_and_the_rest_goes_on(tmp_path, bad, reason):
    [result], _ = run(task(tmp_path, ["one", bad, "two"]), [7])
    assert result.error is None
    assert [config for config, _ in result.failed] == [bad]
    timings = Journal(tmp_path / "g" / ".tuning" / "k-7.jsonl", "s").timings
    assert timings == {"one": Timing(1.0), bad: Timing(failed=reason), "two": Timing(1.0)}


def test_every_config_bad(tmp_path):
    [result], _ = run(task(tmp_path, ["abort", "fault", "exit"]), [0])
    assert result.error is None
    assert len(result.failed) == 3


def test_a_worker_that_dies_outside_a_benchmark_is_given_up(tmp_path):
    worker = WORKER.replace("    journal = Journal", "    os._exit(9)\n    journal = Journal")
    [result], _ = run(task(tmp_path, ["one"], worker=worker), [0])
    assert result.error == "the worker keeps ending"


def test_a_worker_that_ends_between_two_cases_is_replaced(tmp_path):
    worker = WORKER + "    os._exit(0)\n"
    results, _ = run(task(tmp_path, ["one"], worker=worker), [0, 1, 2])
    assert [row.error for row in results] == [None] * 3


def test_a_torn_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path, "s").result("a", Timing(1.0))
    with path.open("a") as file:
        file.write('{"config": "b", "pi')
    Journal(path, "s").result("c", Timing(2.0))
    assert sorted(Journal(path, "s").timings) == ["a", "c"]


def test_a_worker_that_cannot_start_is_one_error(tmp_path):
    worker = 'print(\'{"error": "no GPU here", "hint": "elsewhere"}\')'
    with pytest.raises(UsageError, match="no GPU here"):
        run(task(tmp_path, [], worker=worker), [0])
    with pytest.raises(UsageError, match="ended before it was ready"):
        run(task(tmp_path, [], worker="pass"), [0])


def test_a_worker_that_never_gets_ready(tmp_path):
    begin = time.monotonic()
    with pytest.raises(UsageError, match="did not start within 2 s"):
        run(task(tmp_path, [], worker="import time; time.sleep(1000)", patience=2.0), [0])
    assert time.monotonic() - begin < 30


def test_a_case_that_hangs_outside_a_benchmark_is_given_up_and_the_next_one_runs(tmp_path):
    worker = WORKER.replace("    journal = Journal", "    if case == 1: time.sleep(1000)\n    journal = Journal")
    results, _ = run(task(tmp_path, ["one"], worker=worker, patience=2.0), [0, 1, 2])
    assert [row.error for row in results] == [None, "no sign of life for 2 s outside a benchmark", None]


def test_an_error_ends_the_workers_of_all_gpus(tmp_path):
    worker = f"""
import os, sys, time
open(r"{tmp_path}/pids", "a").write(f"{{os.getpid()}}\\n")
if os.environ["CUDA_VISIBLE_DEVICES"] == "1":
    time.sleep(1)
    print('{{"error": "broken"}}', flush=True)
    sys.exit()
print('{{"ready": true}}', flush=True)
time.sleep(1000)
"""
    with pytest.raises(UsageError, match="broken"):
        run(task(tmp_path, ["one"], worker=worker), [0, 1], devices=("0", "1"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_cases_spread_over_gpus(tmp_path):
    results, _ = run(task(tmp_path, ["one"], sleep=0.2), list(range(6)), devices=("0", "GPU-b"))
    assert [row.case for row in results] == list(range(6))
    assert {row.launches[0]["gpu"] for row in results} == {"0", "GPU-b"}


def test_the_budget_leaves_cases_for_the_next_run(tmp_path):
    results, left = run(task(tmp_path, ["one"], sleep=0.3), list(range(20)), budget=1.0)
    assert results
    assert left
    assert sorted([row.case for row in results] + left) == list(range(20))


def test_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert visible_gpus() == ["2", "GPU-abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert visible_gpus() == ["0"]


def test_a_journal_survives_any_cut(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(path, "s")
    for number in range(5):
        journal.start(f"c{number}")
        journal.result(f"c{number}", Timing(float(number + 1)))
    journal.start("last")
    data = path.read_bytes()
    assert in_flight(path)["config"] == "last"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        found = Journal(path, "s").timings
        whole = sum(json.loads(line).get("timing") is not None for line in data[:end].decode().split("\n")[:-1] if line)
        assert len(found) >= whole
        assert all(timing.failed is None for timing in found.values())


def test_a_config_that_kills_twice_is_taken_for_the_cause(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path, "s").start("deadly")
    assert Journal(path, "s").timings == {}
    Journal(path, "s").start("deadly")
    assert Journal(path, "s").timings["deadly"].failed == "the process died twice while benchmarking it"
    assert Journal(path, "other source").timings == {}
