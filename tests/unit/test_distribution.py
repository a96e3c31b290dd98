"""Whether the installed Triton is the one its record describes, and what an unchanged one need not compute again."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import triton

from tcache._triton.distribution import distribution
from tcache._triton.spared import believable, recorded

FILES = {
    "triton/__init__.py": b"",
    "triton/_C/libtriton.so": b"\x7fELF library",
    "triton/runtime/jit.py": b"run = 1\n",
    "triton/compiler/compiler.py": b"compile = 1\n",
    "triton/backends/nvidia/__init__.py": b"",
    "triton/backends/nvidia/bin/ptxas": b"\x7fELF program",
    "triton/language/core.py": b"load = 1\n",
    "triton/README.md": b"text",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH"):
        monkeypatch.delenv(name, raising=False)
    rows = []
    for name, data in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (1_000_000, 1_000_000))
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    record = tmp_path / "triton-9.9.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("\n".join([*rows, "triton-9.9.dist-info/RECORD,,"]) + "\n")
    return tmp_path


def described(place):
    from tcache._triton.distribution import _compared

    _compared.cache_clear()
    return distribution(str(place), "9.9")


def test_an_untouched_installation_has_a_digest_and_no_problem(installed):
    found = described(installed)
    assert found.problem is None
    assert len(found.digest) == 64


@pytest.mark.parametrize("name", sorted(set(FILES) - {"triton/README.md"}))
def test_an_edited_file_is_noticed(installed, name):
    path = installed / name
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1, *data[1:]]) if data else b"x")  # the same size where there is one
    assert described(installed).problem.startswith(str(path))


def aged(installed, data):
    """As ``COPY`` does it in a Dockerfile: the file keeps the time of the checkout it comes from."""
    path = installed / "triton/compiler/compiler.py"
    path.write_bytes(data)
    os.utime(path, (1_000, 1_000))


def clamped(installed, data):
    """As reproducible images do it: one time for everything."""
    (installed / "triton/compiler/compiler.py").write_bytes(data)
    for path in installed.rglob("*"):
        os.utime(path, (0, 0))


def linked(installed, data):
    (installed / "elsewhere").write_bytes(data)
    os.utime(installed / "elsewhere", (1_000, 1_000))
    path = installed / "triton/compiler/compiler.py"
    path.unlink()
    path.symlink_to(installed / "elsewhere")


@pytest.mark.parametrize("edit", [aged, clamped, linked])
def test_a_source_of_the_same_size_is_noticed_however_old_it_looks(installed, edit):
    edit(installed, FILES["triton/compiler/compiler.py"])
    assert described(installed).problem is None
    edit(installed, b"compile = 2\n")
    assert described(installed).problem == f"{installed}/triton/compiler/compiler.py: edited after it was installed"


def test_an_edited_release_has_no_digest(installed):
    """A bundle that it packs must not say that it was packed with the release."""
    (installed / "triton/compiler/compiler.py").write_bytes(b"compile = 2\n")
    assert described(installed).digest == ""


DAMAGED = {
    "long": 'triton/x.py,"' + "a" * 200_000 + '",1',
    "digest": "triton/x.py,sha256=a,1",
    "nul": "triton/x\0.py,sha256=YQ,1",
    "size": "triton/x.so,sha256=YQ," + "9" * 5000,
}


@pytest.mark.parametrize("row", DAMAGED.values(), ids=DAMAGED)
def test_a_record_that_is_damaged_is_a_problem(installed, row):
    record = installed / "triton-9.9.dist-info" / "RECORD"
    record.write_text(record.read_text() + row + "\n")
    found = described(installed)
    assert found.problem
    assert found.digest == ""


@pytest.mark.parametrize("name", ["triton/_C/libtriton.so", "triton/compiler/compiler.py"])
def test_a_missing_file_is_noticed(installed, name):
    (installed / name).unlink()
    assert "No such file" in described(installed).problem


def test_a_file_that_was_only_touched_is_read_and_believed(installed):
    os.utime(installed / "triton/compiler/compiler.py")
    assert described(installed).problem is None


@pytest.mark.parametrize(
    "name",
    [
        "triton/compiler/more.py",
        "triton/backends/mine/__init__.py",
        "triton/language/extra.so",
        "triton/compiler/compiled.pyc",
        f"triton/compiler/compiler/__init__{EXTENSION_SUFFIXES[0]}",
    ],
)
def test_a_module_that_no_record_lists_is_noticed(installed, name):
    path = installed / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    assert described(installed).problem == f"{path}: not of the installed release"


def test_what_triton_key_does_not_hash_may_be_added(installed):
    (installed / "triton/compiler/__pycache__").mkdir()
    (installed / "triton/compiler/notes.txt").write_text("x")
    assert described(installed).problem is None


def test_another_build_has_another_digest(installed):
    before = described(installed).digest
    record = installed / "triton-9.9.dist-info" / "RECORD"
    path = installed / "triton/language/core.py"
    path.write_bytes(b"load = 2\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"load = 2\n").digest()).rstrip(b"=").decode()
    lines = [line for line in record.read_text().splitlines() if "core.py" not in line]
    record.write_text("\n".join([*lines, f"triton/language/core.py,sha256={digest},9"]) + "\n")
    after = described(installed)
    assert after.problem is None
    assert after.digest != before


def test_a_ptxas_from_elsewhere_is_noticed(installed, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/bin/ptxas")
    assert described(installed).problem == "TRITON_PTXAS_PATH is set"


def test_the_installed_release_is_described_by_its_record():
    found = distribution()
    assert found.problem is None, found
    assert found.digest


def test_a_source_tree_has_no_record(tmp_path):
    assert "not installed from a wheel" in described(tmp_path).problem


# values that are given back


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_triton_is_given_what_it_would_compute():
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime.cache import triton_key

    known = recorded([80, 90, "gfx942"])
    assert known == {
        "triton_key": triton_key(), "ptxas 80": get_ptxas_version(80), "ptxas 90": get_ptxas_version(90)
    }  # fmt: skip


def test_only_what_the_record_bears_out_is_believed():
    here = distribution()
    version, known = triton.__version__, recorded([80, 90, 100])
    assert believable(known, version, here.files) == known
    edited = known["triton_key"].replace(here.files["triton/compiler/compiler.py"], "0" * 64)
    library = known["triton_key"].replace("-" + here.files["triton/_C/libtriton.so"], "")
    for key in ("another", version, "9.9.9" + known["triton_key"].removeprefix(version), edited, library):
        assert key != known["triton_key"]
        assert believable({"triton_key": key}, version, here.files) == {}
    for name in ("ptxas", "ptxas ", "ptxas \u00b2", "ptxas " + "9" * 5000, "ptxas -1", "more"):
        assert believable({name: "x"}, version, here.files) == {}
    bare = {name: digest for name, digest in here.files.items() if "/bin/ptxas" not in name}
    assert believable(known, version, bare) == {"triton_key": known["triton_key"]}
    old = {name: digest for name, digest in here.files.items() if not name.endswith("ptxas-blackwell")}
    assert set(believable(known, version, old)) == {"triton_key", "ptxas 80", "ptxas 90"}


def test_what_was_given_is_not_recorded():
    code = """
    from tcache._triton.spared import recorded, spare
    before = recorded([90])
    spare({"triton_key": "given", "ptxas 90": "given"})
    print(recorded([90]) == before)
    """
    assert run(code) == "True"


ASKED = """
    import subprocess
    def never(*_, **__):
        raise AssertionError("a process was started")
    from tcache._triton.spared import spare
    from triton.backends.nvidia import compiler
    from triton.runtime import autotuner, cache
    spare({"triton_key": "the key", "ptxas 90": "the version"})
    spare({"triton_key": "another", "ptxas 80": "of 80"})
    assert cache.triton_key() == autotuner.triton_key() == "the key"
    if EXPECTED:
        subprocess.check_output = subprocess.run = never
    print(compiler.get_ptxas_version(90) == "the version", compiler.get_ptxas_version(80) == "of 80")
"""


def test_what_was_recorded_is_not_computed_again():
    assert run(ASKED.replace("EXPECTED", "True")) == "True True"


def test_another_ptxas_is_asked_itself(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 1.2, V1.2.3'\n")
    tool.chmod(0o755)
    named = {"TRITON_PTXAS_PATH": str(tool), "TRITON_PTXAS_BLACKWELL_PATH": str(tool)}
    assert run(ASKED.replace("EXPECTED", "False"), **named) == "False False"


def test_the_first_answer_stands_as_upstreams_does():
    """torch.compile asks for the version, and only then names a ptxas of its own: its keys have the first."""
    code = """
        import os
        from triton.backends.nvidia import compiler
        from triton.backends.nvidia.compiler import get_ptxas_version as upstream
        real = upstream(90)
        from tcache._triton.spared import spare
        spare({"ptxas 90": real + " as recorded"})
        first = compiler.get_ptxas_version(90)
        os.environ["TRITON_PTXAS_PATH"] = "/nonexistent"
        print(first == real + " as recorded", compiler.get_ptxas_version(90) == first, upstream(90) == real)
    """
    assert run(code) == "True True True"
