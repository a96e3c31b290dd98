"""On an NVIDIA H200: bundles that came as wheels, from a machine without a GPU, in a clean environment.

``TCACHE_TEST_WHEELS`` names the folder that ``wheel_project.py`` filled there, with this machine's Python and Triton.
``TCACHE_TEST_WHEEL_REPORT`` names a file to write the result to.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import wheel_project

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def stamps(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def report():
    wheels = os.environ.get("TCACHE_TEST_WHEELS")
    if not wheels:
        pytest.skip("TCACHE_TEST_WHEELS is not set: run wheel_project.py on a machine without a GPU")
    place = Path(tempfile.mkdtemp(prefix="tcache-wheels-"))
    python = wheel_project.install(Path(wheels).resolve(), place)
    before = stamps(place / "venv")
    found = wheel_project.serve(python, ROOT, "cuda", place)
    other = wheel_project.serve(python, ROOT, "cuda", place, NVPTX_ENABLE_DUMP="1")
    found["outcomes"] |= other["outcomes"]
    found["compiled"] += other["compiled"]
    found["environment_untouched"] = before == stamps(place / "venv")
    found["own_environment"] = found.pop("tcache").startswith(str(place))
    found["wheels"] = sorted(path.name for path in Path(wheels).glob("*.whl") if "tcache" in path.name)
    target = os.environ.get("TCACHE_TEST_WHEEL_REPORT")
    if target:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from _machine import describe

        Path(target).write_text(json.dumps({"machine": describe(), **found}, indent=1) + "\n")
    return found


def test_every_launch_of_the_manifest_ran_and_is_right(report):
    assert report["launches"] == report["checked"] == 52
    assert report["others"] == 3  # stock, behind a wrapper, and tuned
    assert report["own_environment"]


def test_nothing_was_compiled(report):
    assert report["compiled"] == []
    assert report["entries"] > report["prebaked"] > 0
    assert report["tools"] == [None] * 5


def test_nothing_was_written(report):
    assert report["home"] == []
    assert not report["home_writable"]
    assert report["environment_untouched"]


def test_what_is_not_packed_is_a_miss_that_says_why(report):
    wheel_project.check_outcomes(report["outcomes"])
