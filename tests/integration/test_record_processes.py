"""Recording whole programs: children, signals, crashes, and the loop record, warm up, pack, serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tcache.manifest import load_manifest
from tcache.rows import Appender, read_rows

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA H200"

SERVE = """
import os, sys
sys.path.insert(0, os.environ["CONTRACT"])
import torch, triton, triton.language as tl
import null_driver

@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)

X = torch.zeros(64)

def launch(n, block=32):
    return scale[(1,)](X, n, block)

if __name__ == "__main__":
    null_driver.activate()
    BODY
"""


@pytest.fixture
def program(tmp_path):
    def write(body, name="serve.py"):
        path = tmp_path / "app" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SERVE.replace("BODY", body.replace("\n", "\n    ")))
        return path

    return write


@pytest.fixture
def environment(tmp_path):
    found = {name: value for name, value in os.environ.items() if not name.startswith("TCACHE_")}
    found |= {
        "CONTRACT": str(ROOT / "tests" / "contract"), "TCACHE_GPU_NAME": GPU, "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton-cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    return found


def record(environment, output, *command, options=(), **kwargs):
    line = [sys.executable, "-m", "tcache", "record", "-o", str(output), *options, "--", *map(str, command)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=120, **kwargs)


def launches(path):
    return [row for _, row in load_manifest(path).recordings[0].launches]


def blocks(path):
    return sorted(row.specialization.constants["BLOCK"] for row in launches(path))


def test_a_program_that_never_imports_tcache(environment, program, tmp_path):
    path = program("launch(64)\nlaunch(1)\nassert 'tcache' not in globals()\nsys.exit(7)")
    output = tmp_path / "app" / "serve.launches.json"
    done = record(environment, output, sys.executable, path, options=["--counts"])
    assert done.returncode == 7, done.stderr
    assert "2 launches, 0 of them cannot be replayed" in done.stderr
    assert [row.kernel for row in launches(output)] == ["serve.py:scale"] * 2, "relative to the recording"
    assert [row.count for row in launches(output)] == [1, 1]
    assert str(tmp_path) not in output.read_text()


CHILDREN = """
import multiprocessing, subprocess
launch(64, 16)
context = multiprocessing.get_context("fork")
child = context.Process(target=launch, args=(64, 32)); child.start(); child.join(); assert child.exitcode == 0
code = "import serve; serve.null_driver.activate(); serve.launch(64, 64)"
subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.dirname(os.path.abspath(__file__)))
context = multiprocessing.get_context("spawn")
child = context.Process(target=spawned, args=(128,)); child.start(); child.join(); assert child.exitcode == 0
"""


SPAWNED = """def spawned(block):
    null_driver.activate()
    launch(64, block)

"""


def test_children_and_grandchildren(environment, program, tmp_path):
    path = program(CHILDREN)
    path.write_text(path.read_text().replace("if __name__", SPAWNED + "if __name__"))
    output = tmp_path / "app" / "serve.launches.json"
    done = record(environment, output, "sh", "-c", f"{sys.executable} {path}; exit $?", options=["--counts"])
    assert done.returncode == 0, done.stderr
    assert blocks(output) == [16, 32, 64, 128]
    assert {row.kernel for row in launches(output)} == {"serve.py:scale"}, "one kernel, whatever its module is called"
    assert [row.count for row in launches(output)] == [1] * 4


def test_signals_are_forwarded_and_what_was_recorded_stays(environment, program, tmp_path):
    path = program("launch(64)\nprint('ready', flush=True)\nimport time\ntime.sleep(60)")
    output = tmp_path / "x.launches.json"
    line = [sys.executable, "-m", "tcache", "record", "-o", str(output), "--", sys.executable, str(path)]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 128 + signal.SIGTERM
    assert len(launches(output)) == 1


def test_killed_while_recording(environment, program, tmp_path):
    path = program(
        "import itertools\nfor n in itertools.count():\n    launch(64, 1 << n % 12)\n    print(n, flush=True)"
    )
    output = tmp_path / "x.launches.json"
    environment |= {"TCACHE_RECORD": str(output)}
    path.write_text("import tcache\n" + path.read_text())  # as a service does: no `tcache record` around it
    with subprocess.Popen([sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, text=True) as running:
        for _ in range(3):
            running.stdout.readline()
        running.send_signal(signal.SIGKILL)
    assert {1, 2, 4} <= set(blocks(output))
    with output.open("a") as file:
        file.write('{"schema":1,"kern')  # the worst a kill may leave
    again = Appender(output)
    again.append({"id": "x", "count": 1})
    again.close()
    rows, torn = read_rows(output)
    assert len(torn) == 1
    assert rows[-1][1]["id"] == "x"
    assert {1, 2, 4} <= set(blocks(output))


APPEND = """
import sys
from pathlib import Path
from tcache.rows import Appender
file = Appender(Path(sys.argv[1]))
for number in range(300):
    file.append({"id": f"{sys.argv[2]}-{number}", "kernel": "k.py:k", "args": ["x" * (number * 37 % 9000)]})
"""


def test_sixteen_processes_append(environment, tmp_path):
    output = tmp_path / "x.launches.json"
    running = [
        subprocess.Popen([sys.executable, "-c", APPEND, str(output), str(number)], env=environment)
        for number in range(16)
    ]
    assert [process.wait(60) for process in running] == [0] * 16
    rows, torn = read_rows(output)
    assert torn == []
    assert {row["id"] for _, row in rows} == {f"{number}-{line}" for number in range(16) for line in range(300)}
    assert len(rows) == 16 * 300
    assert all(row["args"] == ["x" * (int(row["id"].split("-")[1]) * 37 % 9000)] for _, row in rows)


def test_nothing_is_imported_for_a_program_without_triton(environment, tmp_path):
    code = "import sys; print(sorted({name.split('.')[0] for name in sys.modules} & {'triton', 'torch', 'pydantic'}))"
    done = record(environment, tmp_path / "x.json", sys.executable, "-c", code)
    assert done.stdout == "[]\n"
    assert "no launch was recorded" in done.stderr
    isolated = record(environment, tmp_path / "x.json", sys.executable, "-I", "-c", "print('ran')")
    assert isolated.stdout == "ran\n"
    assert "-I, -E or -S" in isolated.stderr


def test_a_sitecustomize_of_the_environment_still_runs(environment, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path / "site")
    code = "import sitecustomize; print(customized, sitecustomize.__file__)"
    done = record(environment, tmp_path / "x.json", sys.executable, "-c", code)
    assert done.stdout == f"True {tmp_path / 'site' / 'sitecustomize.py'}\n"


def test_a_command_that_is_not_there(environment, tmp_path):
    done = record(environment, tmp_path / "x.json", "/nonexistent/program")
    assert done.returncode == 2
    assert "cannot be run" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "file").touch()
    done = record(environment, tmp_path / "file" / "x.json", "true")
    assert done.returncode == 2
    assert "cannot be recorded to" in done.stderr


MISSING = """
import tcache
tcache.activate()
misses = 0
for n, block in [(64, 32), (1, 32), (64, 64)]:
    try:
        launch(n, block)
    except tcache.CacheMiss as miss:
        misses += 1
print("misses", misses)
"""


def test_the_loop_closes(environment, program, tmp_path, tcache):
    """Record what is known; a frozen service misses the rest, and records it; warmed up and packed, it hits."""
    app, bundle = tmp_path / "app", tmp_path / "bundle"
    path = program(MISSING)
    code = "import serve; serve.null_driver.activate(); serve.launch(64, 32)"
    done = record(environment, app / "first.launches.json", sys.executable, "-c", code, cwd=app)
    assert done.returncode == 0, done.stderr
    build = {"TRITON_CACHE_DIR": str(tmp_path / "build-cache"), "CONTRACT": environment["CONTRACT"]}
    recordings = ["first.launches.json", "serve.launches.json"]
    for number, misses in enumerate([2, 0]):
        manifest = app / f"serve-{number}.yaml"
        items = "".join(f"  - launches: {name}\n" for name in recordings[: number + 1])
        manifest.write_text(f"version: 1\ngpus: [{GPU}]\nkernels:\n{items}")
        tcache("warmup", manifest, cwd=app, env=build, check=0)
        tcache("pack", manifest, "-o", bundle, "--force", "--no-native", cwd=app, env=build, check=0)
        served = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=False,
            env=environment | {"TCACHE_BUNDLES": str(bundle), "TCACHE_RECORD": str(app / recordings[1]),
                               "TRITON_CACHE_DIR": str(tmp_path / "nothing")},
        )  # fmt: skip
        assert served.stdout == f"misses {misses}\n", served.stderr
    rows = launches(app / recordings[1])
    missed = {
        (row.specialization.constants["BLOCK"], row.specialization.constants.get("n")) for row in rows if row.miss
    }
    assert missed == {(64, None), (32, 1)}
    assert all("not prebaked" in row.miss for row in rows if row.miss)
    assert not (tmp_path / "nothing").exists()


TUNED = """
import tcache
tuned = tcache.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])(scale)

if __name__"""

UNTUNED = """
tcache.activate()
for _ in range(3):
    try:
        tuned[(1,)](X, 64)
    except tcache.CacheMiss as miss:
        print(miss.message)
"""


def test_a_launch_without_a_winner_is_recorded_for_any_config(environment, program, tmp_path, tcache):
    path = program(UNTUNED)
    path.write_text(path.read_text().replace("if __name__", TUNED))
    output = tmp_path / "app" / "serve.launches.json"
    served = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False,
        env=environment | {"TCACHE_MODE": "frozen", "TCACHE_RECORD": str(output)},
    )  # fmt: skip
    assert served.stdout.count("has no best config") == 3, served.stderr
    [row] = launches(output)
    assert "never tuned" in row.miss
    assert row.shape == "n=64 | x_ptr=torch.float32"
    assert row.specialization is None
    build = {"TRITON_CACHE_DIR": str(tmp_path / "build-cache"), "CONTRACT": environment["CONTRACT"]}
    done = tcache("resolve", output, "--untuned", "all", "--json", cwd=tmp_path, env=build, check=0)
    assert done.stdout.count('"entry"') == 2


def test_recording_begins_within_the_launch_that_imports_tcache(environment, program, tmp_path):
    """With TRITON_CACHE_MANAGER alone, tcache is imported while the first launch compiles."""
    path = program("first = launch(64)\nassert launch(64) is first\nlaunch(1)")
    output = tmp_path / "app" / "serve.launches.json"
    more = {"TRITON_CACHE_MANAGER": "tcache.overlay:OverlayCacheManager", "TCACHE_RECORD": str(output)}
    subprocess.run([sys.executable, str(path)], env=environment | more, check=True)
    assert len(launches(output)) == 2


STOCK = """
import triton
def bench(call, quantiles):
    call()
    return [1.0 for _ in quantiles]

configs = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]
stock = triton.autotune(configs, key=["n"], do_bench=bench)(scale)

if __name__"""


def test_recorded_while_others_autotuner_tunes_then_proven(environment, program, tmp_path, tcache):
    path = program("import tcache\ntcache.adopt(stock)\nstock[(1,)](X, 64)\nstock[(1,)](X, 65)\nstock[(1,)](X, 64)")
    path.write_text(path.read_text().replace("if __name__", STOCK))
    app, store, bundle = path.parent, tmp_path / "store", tmp_path / "bundle"
    output = app / "serve.launches.json"
    done = record(environment | {"TCACHE_STORE": str(store)}, output, sys.executable, path, options=["--counts"])
    assert done.returncode == 0, done.stderr
    assert sorted((row.shape.split()[0], row.count) for row in launches(output)) == [("n=64", 2), ("n=65", 1)]
    cache = environment["TRITON_CACHE_DIR"]
    build = {"TRITON_CACHE_DIR": cache, "TCACHE_STORE": str(store), "CONTRACT": environment["CONTRACT"]}
    warmed = tcache("warmup", output, cwd=app, env=build, check=0)
    assert "0 compiled, 2 present before" in warmed.stdout, "a script's kernel has the store entries it was tuned under"
    tcache("pack", output, "-o", bundle, "--no-native", cwd=app, env=build, check=0)
    proven = tcache("verify", bundle, output, "--root", app, cwd=app, env=build)
    assert "1 kernels are tuned by others and hit after tcache.adopt only: serve:scale" in proven.stderr
