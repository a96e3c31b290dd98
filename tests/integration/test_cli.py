"""The command line as its users meet it: help, refusals, exit codes."""

# ruff: noqa: E501 - one row, one refusal

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys

import pytest

GOOD = """\
version: 1
gpus: [NVIDIA H200]
kernels:
  - kernel: k.py:f
    args: {x: {shape: [n], dtype: float32}, n: n, BLOCK: 64}
    grid: [1]
    cases: [{n: 64}]
"""
KERNEL = """\
import triton
import triton.language as tl

@triton.jit
def f(x, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(x + o, o.to(tl.float32), mask=o < n)

def plain(x):
    return x

def launches_nothing(x):
    pass

def reads(x):
    if x.sum().item() > 0:
        f[(1,)](x, 1, BLOCK=64)
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "m.yaml").write_text(GOOD)
    (tmp_path / "k.py").write_text(KERNEL)
    return tmp_path


KILLER = """
import os
import signal
from triton.compiler import compiler

@triton.jit
def g(x, n, BLOCK: tl.constexpr):
    pass

make_ir = compiler.ASTSource.make_ir

def aborting(self, *args, **kwargs):
    if self.name == "g":
        os.kill(os.getpid(), signal.SIGABRT)
    return make_ir(self, *args, **kwargs)

compiler.ASTSource.make_ir = aborting
"""


def refusal(done, *parts, code=2):
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith(("error: ", "Usage: "))
    assert len([line for line in lines if line.startswith("error: ")]) <= 1
    for part in parts:
        assert part in done.stderr


BAD = [
    (GOOD.replace("gpus", "gpu"), None, ["m.yaml:2:1: unknown key 'gpu'", "did you mean 'gpus'?"]),
    (GOOD.replace("shape: [n]", "shape: [m]"), None, ["m.yaml:5:24: name 'm' is not bound"]),
    (GOOD.replace("float32", "float23"), None, ["m.yaml:5:35: unknown dtype 'float23'", "did you mean 'float32'?"]),
    (GOOD.replace("k.py:f", "k.py:g"), None, ["m.yaml:4:13: k.py has no function 'g'"]),
    (GOOD.replace("k.py:f", "k.py"), None, ["m.yaml:4:13: 'k.py' is not a kernel ref"]),
    (GOOD.replace("k.py:f", "absent.py:f"), None, ["m.yaml:4:13: ", "absent.py: no such kernel file"]),
    (GOOD.replace("k.py:f", "no.such.module:f"), None, ["m.yaml:4:13: no module named 'no.such.module'"]),
    (GOOD.replace("k.py:f", "k.py:plain"), None, ["m.yaml:4:13: k.py:plain is a function, not a Triton kernel", "call:"]),
    (GOOD.replace(", n: n,", ", m: n,"), None, ["m.yaml:7:13: k.py:f has no argument 'm': expected x, n, BLOCK"]),
    (GOOD.replace(", n: n,", ","), None, ["m.yaml:7:13: k.py:f cannot be bound", "missing 1 required positional argument: 'n'"]),
    (GOOD.replace("grid: [1]", "grid: [cdiv(n, BLOK)]"), None, ["grid: name 'BLOK' is not bound", "did you mean 'BLOCK'?"]),
    (GOOD.replace("grid: [1]", "grid: [n // 0]"), None, ["m.yaml:7:13: grid: division by zero"]),
    (GOOD.replace("grid: [1]", "grid: [0]"), None, ["m.yaml:7:13: grid: 0 is 0, expected an integer of at least 1"]),
    (GOOD, "import sys\nsys.exit(0)\n", ["m.yaml:4:13: importing", "k.py:2: SystemExit: 0"]),
    (GOOD, "import nothing_such\n" + KERNEL, ["m.yaml:4:13: importing", "k.py:1: ModuleNotFoundError"]),
    (GOOD, "def broken(:\n" + KERNEL, ["m.yaml:4:13: importing", "k.py:1: SyntaxError"]),
    (GOOD, "raise RuntimeError('no')\n", ["m.yaml:4:13: importing", "k.py:1: RuntimeError: no"]),
    (GOOD.replace("NVIDIA H200", "NVIDIA H20O"), None, ["unknown GPU 'NVIDIA H20O'; the nearest known name is 'NVIDIA H20'", "--target"]),
    ("", None, ["m.yaml:1:1: the manifest is empty"]),
    (GOOD.replace("gpus: [NVIDIA H200]\n", ""), None, ["m.yaml: no GPU named"]),
    (GOOD.replace("kernel: k.py:f", "call: k.py:launches_nothing").replace("    grid: [1]\n", "").replace(", n: n, BLOCK: 64", ""),
     None, ["m.yaml:6:13: k.py:launches_nothing launched no kernel for n=64"]),
    (GOOD.replace("kernel: k.py:f", "call: k.py:reads").replace("    grid: [1]\n", "").replace(", n: n, BLOCK: 64", ""),
     None, ["m.yaml:6:13: k.py:reads cannot be replayed for n=64: ", "k.py:16: ", "spell its launches out with 'kernel:'"]),
]  # fmt: skip


# one command shows each refusal, the others a sample
SHOWN = [("resolve", *row) for row in BAD] + [(name, *row) for name in ("warmup", "pack") for row in BAD[::4]]


@pytest.mark.parametrize(("command", "manifest", "kernel", "parts"), SHOWN, ids=range(len(SHOWN)))
def test_bad_input(project, tcache, command, manifest, kernel, parts):
    (project / "m.yaml").write_text(manifest)
    if kernel is not None:
        (project / "k.py").write_text(kernel)
    before = sorted(project.iterdir())
    options = ["-o", "out"] if command == "pack" else []
    refusal(tcache(command, "m.yaml", *options, cwd=project), *parts)
    left = {path.name for path in project.iterdir()} - {path.name for path in before}
    assert left <= {"__pycache__", "home"}


def test_bad_options(project, tcache):
    refusal(tcache("resolve", "m.yaml", "--target", "sm_90", cwd=project), "'sm_90' is not a target", "cuda:90:32")
    refusal(tcache("resolve", "m.yaml", "--gpu", "H2OO", cwd=project), "unknown GPU 'H2OO'")
    refusal(tcache("resolve", "m.yaml", "--target", "cuda:80:32", cwd=project), "has target cuda:90:32, not cuda:80:32")
    refusal(tcache("resolve", "absent.yaml", cwd=project), "absent.yaml: cannot be read")
    refusal(tcache("resolve", ".", cwd=project), "cannot be read: Is a directory")
    refusal(tcache("resolve", cwd=project), "Missing argument 'MANIFEST...'")
    refusal(tcache("resolv", cwd=project), "Did you mean 'resolve'?")
    refusal(tcache("pack", "m.yaml", "-o", "b", "--include-ir", "sass", cwd=project), "unknown kind 'sass'")
    refusal(tcache("verify", "absent", cwd=project), "absent: not a bundle")
    refusal(tcache("verify", "m.yaml", cwd=project), "m.yaml: not a bundle")
    refusal(tcache("tune", "m.yaml", cwd=project), "no GPU here")
    refusal(tcache("resolve", "m.yaml", "--store", "m.yaml", cwd=project), "the store is a file")
    refusal(tcache("resolve", "m.yaml", "--store", "typo", cwd=project), "typo: no such store")
    refusal(tcache("warmup", "m.yaml", "--cache-dir", "m.yaml/c", cwd=project), "cannot be the Triton cache")


def test_unknown_gpu_with_a_target_works(project, tcache):
    done = tcache("resolve", "m.yaml", "--gpu", "Prototype", "--target", "cuda:89:32", "--json", cwd=project, check=0)
    assert json.loads(done.stdout)["launches"][0]["gpu"] == "Prototype"


def test_errors_as_json(project, tcache):
    done = tcache("resolve", "absent.yaml", "--json", cwd=project, check=2)
    answer = json.loads(done.stdout)
    assert answer["version"] == 1
    assert "absent.yaml: cannot be read" in answer["error"]


def test_a_corrupt_store_file(project, tcache):
    store = project / "store" / "nvidia-h200"
    store.mkdir(parents=True)
    (store / "k.f.json").write_text('{"schema": 1,')
    refusal(tcache("resolve", "m.yaml", "--store", "store", cwd=project), "k.f.json:1:", "corrupt store file")


def test_outputs(project, tcache):
    refusal(
        tcache("pack", "m.yaml", "-o", "out", cwd=project),
        "1 of 1 entries are not in the Triton cache",
        "tcache warmup m.yaml",
    )
    assert not (project / "out").exists()
    tcache("warmup", "m.yaml", cwd=project, check=0)
    (project / "file").write_text("")
    (project / "full").mkdir()
    refusal(tcache("pack", "m.yaml", "-o", "file", cwd=project), "file: output exists already (a file)")
    refusal(tcache("pack", "m.yaml", "-o", "full", cwd=project), "full: output exists already (a directory)", "--force")
    refusal(tcache("pack", "m.yaml", "-o", "file/b", cwd=project), "file/b: cannot write here: a parent is a file")
    refusal(tcache("pack", "m.yaml", "-o", "/proc/b", cwd=project), "/proc/b: cannot write here")
    tcache("pack", "m.yaml", "-o", "full", "--force", cwd=project, check=0)
    assert (project / "full" / "bundle.json").exists()
    tcache("pack", "m.yaml", "-o", "full", "--force", cwd=project, check=0)
    native = ("pack", "m.yaml", "-o", "native", "--format", "native", "--mount-path", "/c", "--force")
    tcache(*native, cwd=project, check=0)
    tcache(*native, cwd=project, check=0)
    (project / "link").symlink_to("full")
    linked = tcache("pack", "m.yaml", "-o", "link", "--force", cwd=project)
    refusal(linked, "link: output exists already (a link)")
    assert "--force" not in linked.stderr
    (project / "mine").mkdir()
    (project / "mine" / "thesis.txt").write_text("")
    refusal(tcache("pack", "m.yaml", "-o", "mine", "--force", cwd=project), "mine: holds other things than")
    assert (project / "mine" / "thesis.txt").exists()
    assert not [path for path in project.iterdir() if path.name.startswith(".")]


def test_no_compiler_is_one_line_with_a_way_out(project, tcache):
    tcache("warmup", "m.yaml", cwd=project, check=0)
    env = {"PATH": "/nonexistent"}
    refusal(tcache("pack", "m.yaml", "-o", "out", cwd=project, env=env), "there is no C compiler", "--no-native")
    assert not (project / "out").exists()
    tcache("pack", "m.yaml", "-o", "out", "--no-native", cwd=project, env=env, check=0)


def test_a_kernel_that_cannot_be_compiled_does_not_stop_the_others(project, tcache):
    (project / "k.py").write_text(
        KERNEL + "\n@triton.jit\ndef g(x, n, BLOCK: tl.constexpr):\n    tl.static_assert(False)\n"
    )
    (project / "m.yaml").write_text(GOOD + GOOD[GOOD.index("  - kernel") :].replace("k.py:f", "k.py:g"))
    done = tcache("warmup", "m.yaml", cwd=project, check=1)
    assert "1 compiled, 0 present before, 1 failed" in done.stdout
    assert "m.yaml:11:13: k:g" in done.stderr
    found = json.loads(tcache("warmup", "m.yaml", "--json", cwd=project, check=1).stdout)
    assert [row["kernel"] for row in found["failed"]] == ["k:g"]


def test_a_compiler_that_dies_takes_only_its_kernel_along(project, tcache):
    (project / "k.py").write_text(KERNEL + KILLER)
    more = GOOD[GOOD.index("  - kernel") :].replace("[{n: 64}]", "[{n: [1, 63, 64]}]")
    (project / "m.yaml").write_text(GOOD + more.replace("k.py:f", "k.py:g") + more)
    done = tcache("warmup", "m.yaml", "--jobs", "2", cwd=project, check=1)
    assert "3 compiled, 0 present before, 3 failed" in done.stdout
    assert "the compiler ended the process (signal SIGABRT)" in done.stderr


def test_help_of_every_command(tcache):
    top = tcache("--help", check=0).stdout
    assert "\n  tcache verify B            exit 0: production will hit\n" in top  # lines are kept as they are
    for command in ("tune", "record", "warmup", "resolve", "pack", "diff", "gpus", "verify"):
        assert command in top
        text = tcache(command, "--help", check=0).stdout
        assert "--json" in text
        for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE):
            if option != "--help":
                assert re.search(rf"{option}\b.*?env\s+var:", text, re.DOTALL), f"{command} {option}"


def test_settings_from_the_environment(project, tcache):
    env = {"TCACHE_GPU": "Proto Type", "TCACHE_TARGET": "cuda:89:32", "TCACHE_JSON": "1"}
    done = tcache("resolve", "m.yaml", cwd=project, env=env, check=0)
    assert json.loads(done.stdout)["launches"][0]["gpu"] == "Proto Type"
    assert "absent" in json.loads(tcache("resolve", "absent", cwd=project, env=env, check=2).stdout)["error"]
    tcache("resolve", "m.yaml", cwd=project, env={"TCACHE_VERSION": "1"}, check=0)


def test_plain_lines_without_a_terminal_and_a_bar_on_one(project, tcache, tmp_path):
    assert re.search(
        r"^\[1/1\] f cuda:90:32 .*s$", tcache("warmup", "m.yaml", cwd=project, check=0).stderr, re.MULTILINE
    )
    parent, child = pty.openpty()
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "other"), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "tcache", "warmup", "m.yaml"]
    process = subprocess.Popen(command, cwd=project, env=env, stdin=child, stdout=child, stderr=child)
    os.close(child)
    seen = b""
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        try:
            seen += os.read(parent, 65536)
        except OSError:
            break
    os.close(parent)
    assert process.wait() == 0
    assert b"\x1b[" in seen
    assert b"1/1" in seen
    assert b"[1/1]" not in seen


ENDS = """
import atexit, threading, time
import torch

def late():
    with open("end.txt", "a") as file:
        file.write("exit ")

atexit.register(late)

def wrapper(x, n):
    f[(1,)](x, n, BLOCK=64)
"""
WAITS = """
def wait():
    time.sleep(1.0)
    with open("end.txt", "a") as file:
        file.write("thread ")

threading.Thread(target=wait).start()
"""


@pytest.mark.parametrize(("more", "wanted"), [("", "exit "), (WAITS, "thread exit ")])
def test_what_a_program_registers_for_its_end_is_run(project, tcache, more, wanted):
    """Although tools do not take torch apart when they end."""
    (project / "k.py").write_text(KERNEL + ENDS + more)
    (project / "m.yaml").write_text(
        "version: 1\ngpus: [NVIDIA H200]\nkernels:\n"
        "  - call: k.py:wrapper\n    args: {x: {shape: [n], dtype: float32}, n: n}\n    cases: [{n: '1..2000'}]\n"
    )
    done = tcache("resolve", "m.yaml", "--json", cwd=project, check=0)
    assert len(json.loads(done.stdout)["launches"]) == 2000, "all of it is written"
    assert (project / "end.txt").read_text() == wanted
    assert tcache("resolve", "m.yaml", "--gpu", "no such", cwd=project).returncode == 2
