"""What a kernel does when its store, its file system or its user is not as it should be: one stated outcome for each.

Either it tunes again, or it raises one clear error; it never uses a wrong or stale config and never loses an entry.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import triton

from tcache.active import activate
from tcache.errors import StoreError, TcacheError
from tcache.keys.config import config_key

sys.path.insert(0, str(Path(__file__).parent))
from test_autotuner import CONFIGS, Bench, gpu, launch, tuned  # noqa: F401 - gpu is a fixture

ROOT = Path(__file__).parents[2]


def stored(tmp_path):
    activate(store=tmp_path, mode="tune")
    launch(tuned(Bench()))
    [path] = tmp_path.glob("*/*.json")
    return path


def test_a_winner_that_is_no_config_any_more(tmp_path):
    path = stored(tmp_path)
    bench = Bench()
    assert launch(tuned(bench, [CONFIGS[0], CONFIGS[2]])) == 64  # the best of what is left, not benchmarked again
    data = json.loads(path.read_text())
    [entry] = data["entries"].values()
    entry["config"] = "BLOCK=1024 | num_warps=1 num_stages=3 num_ctas=1"  # somebody's edit
    path.write_text(json.dumps(data))
    activate(store=tmp_path, mode="tune")
    assert launch(tuned(bench)) == 32
    assert bench.asked == []


def test_winners_and_timings_of_configs_that_never_existed(tmp_path):
    path = stored(tmp_path)
    data = json.loads(path.read_text())
    [entry] = data["entries"].values()
    entry["config"] = "nonsense"
    entry["timings"] = {"nonsense": {"median_ms": 0.001}}
    path.write_text(json.dumps(data))
    activate(store=tmp_path, mode="tune")
    bench = Bench()
    assert launch(tuned(bench)) == 32
    assert bench.asked == [16, 32, 64]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "corrupt store file"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "store schema 2, expected 1"),
        (lambda _: "", "corrupt store file"),
        (lambda _: "[]", "not a tcache store file"),
        (lambda text: text.replace('"median_ms": 1.0', '"median_ms": -1.0'), "expected a time"),
        (lambda text: text.replace('"median_ms": 1.0', '"median_ms": "fast"'), "expected a number"),
        (lambda text: text.replace("NVIDIA H200", "NVIDIA-H200"), "belongs to 'NVIDIA-H200'"),
    ],
)
@pytest.mark.parametrize("mode", ["tune", "lookup", "frozen"])
def test_a_damaged_file_is_one_error_and_stays_as_it_is(tmp_path, change, message, mode):
    path = stored(tmp_path)
    path.write_text(change(path.read_text()))
    before = path.read_bytes()
    activate(store=tmp_path, mode=mode)
    bench = Bench()
    with pytest.raises(StoreError, match=message) as error:
        launch(tuned(bench))
    assert str(path) in error.value.message
    assert error.value.hint
    assert bench.asked == []
    assert path.read_bytes() == before


def test_unknown_fields_survive_tuning(tmp_path):
    path = stored(tmp_path)
    data = json.loads(path.read_text())
    data["reviewed-by"] = "someone"
    data["kernel"]["owner"] = "team"
    [entry] = data["entries"].values()
    entry["comment"] = "keep"
    entry["timings"][config_key(CONFIGS[0])]["clock"] = 1980
    path.write_text(json.dumps(data))
    activate(store=tmp_path, mode="tune")
    more = [*CONFIGS, triton.Config({"BLOCK": 128}, num_warps=1)]
    assert launch(tuned(Bench(), more)) == 128
    assert launch(tuned(Bench()), n=17) == 32
    again = json.loads(path.read_text())
    assert again["reviewed-by"] == "someone"
    assert again["kernel"]["owner"] == "team"
    assert len(again["entries"]) == 2
    entry = next(entry for shape, entry in again["entries"].items() if "n=16" in shape)
    assert entry["comment"] == "keep"
    assert entry["timings"][config_key(CONFIGS[0])]["clock"] == 1980
    assert entry["config"] == config_key(more[-1])


@pytest.mark.parametrize("time", [float("inf"), float("nan"), -1.0])
def test_benchmarks_that_measured_nothing(tmp_path, time):
    activate(store=tmp_path, mode="tune")
    with pytest.raises(TcacheError, match=r"every config failed.*the benchmark returned"):
        launch(tuned(lambda _, quantiles: [time for _ in quantiles]))
    [path] = tmp_path.glob("*/*.json")
    [entry] = json.loads(path.read_text())["entries"].values()
    assert entry["config"] is None
    again = Bench()
    with pytest.raises(TcacheError, match="every config failed"):
        launch(tuned(again))
    assert again.asked == []  # a failure is a result: told, not tried again
    activate(store=tmp_path, mode="lookup")
    assert launch(tuned(again)) == 16  # the first config, with a notice


def test_a_store_that_is_a_file(tmp_path):
    (tmp_path / "store").write_text("kept")
    activate(store=tmp_path / "store", mode="tune")
    bench = Bench()
    with pytest.raises(StoreError, match="cannot write the store"):
        launch(tuned(bench))
    assert bench.asked == []
    assert (tmp_path / "store").read_text() == "kept"


def test_a_file_where_the_record_should_be_a_file(tmp_path):
    path = stored(tmp_path)
    path.unlink()
    path.mkdir()
    activate(store=tmp_path, mode="tune")
    with pytest.raises(StoreError, match="cannot be read"):
        launch(tuned(Bench()))


def test_a_file_system_that_takes_no_files():
    activate(store="/proc/tcache-store", mode="tune")
    bench = Bench()
    with pytest.raises(StoreError, match="cannot write the store") as error:
        launch(tuned(bench))
    assert "TCACHE_STORE" in error.value.hint
    assert bench.asked == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, code):
    def refused(*_):
        raise OSError(code, os.strerror(code))

    path = stored(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(fcntl, "flock", refused)
    activate(store=tmp_path, mode="tune")
    assert launch(tuned(Bench())) == 32  # reading takes no lock
    bench = Bench()
    with pytest.raises(StoreError, match="cannot write the store"):
        launch(tuned(bench), n=17)
    assert bench.asked == []
    assert path.read_bytes() == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody without an account")
@pytest.mark.parametrize("home", [None, "/nonexistent", ""])
def test_a_user_without_account_and_home(tmp_path, home, request):
    """As in a container with an arbitrary uid: tuning works, in memory only, and says so."""
    cache = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are for their owner only
    cache.chmod(0o777)
    request.addfinalizer(lambda: shutil.rmtree(cache))
    program = f"""
import os, sys
os.chdir("/")
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
import logging, null_driver, tcache, torch
from test_autotuner import Bench, edited, launch, tuned
logging.basicConfig()
null_driver.activate()
tcache.activate(store={str(tmp_path / "store")!r})
launch(tuned(Bench(), kernel=edited))  # loads every module while Python's own folder may still be read
os.setgroups([]); os.setgid(54321); os.setuid(54321)
tcache.activate()
bench = Bench()
kernel = tuned(bench)
assert launch(kernel) == 32 == launch(kernel)
assert bench.asked == [16, 32, 64], bench.asked
print("done", flush=True)
os._exit(0)  # the null driver goes before its kernels
"""
    environment = {"PATH": os.environ["PATH"], "TRITON_CACHE_DIR": str(cache), "TCACHE_GPU_NAME": "NVIDIA H200"}
    if home is not None:
        environment["HOME"] = home
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "done" in done.stdout, done.stderr[-2000:]
    assert "kept in memory only" in done.stderr or "cannot write the store" in done.stderr
    assert not list(Path("/").glob(".tcache"))
