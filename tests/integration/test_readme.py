"""The README's code and commands, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_commands_on_the_first_screen(tcache, tmp_path):
    commands = [line.split("#")[0].split() for line in blocks("console")[0].splitlines()]
    assert [command[:2] for command in commands] == [["tcache", name] for name in ("tune", "warmup", "pack", "verify")]
    for command in commands[1:]:  # tuning needs a GPU
        arguments = [str(tmp_path / "bundle") if argument == "bundle" else argument for argument in command[1:]]
        done = tcache(*arguments, check=0)
    assert done.stdout.startswith("proven: 52 launches, 52 hits, 0 misses")


def test_the_example_in_an_empty_folder(tcache, tmp_path):
    [code] = blocks("python")
    [manifest] = blocks("yaml")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "double.py").write_text(code)
    (folder / "m.yaml").write_text(manifest)
    [command] = [block.split() for block in blocks("console") if "--untuned default" in block]
    done = tcache(*command[1:], cwd=folder, check=0)
    assert "7 launches, 7 entries, 0 present" in done.stdout
    refused = tcache("warmup", "m.yaml", cwd=folder, check=1)
    assert "never tuned" in refused.stderr
    assert "hint: run `tcache tune` on the GPU" in refused.stderr


def test_the_figures_are_those_of_the_committed_results():
    done = subprocess.run(
        [sys.executable, "benchmarks/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_tcache_and_nothing_that_hides_another_package(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith("triton_tcache-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tcache"}
    assert "tcache/keys/gpus.json" in names
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert not re.search(r"^Requires-Dist: tcache\b", metadata, re.MULTILINE)
