"""The contract tests again, against every other Triton release that tcache supports.

Each release is installed once into ``.compat/<version>`` without its dependencies and put before the pinned one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
RELEASES = ["3.6.0", "3.7.1", "3.8.0", "3.9.0"]
TESTS = [
    "tests/contract/test_entry_names.py",
    "tests/contract/test_arguments.py",
    "tests/contract/test_autotuner.py",
    "tests/contract/test_more_than_upstream.py",
    "tests/contract/test_conformance.py",
    "tests/contract/test_conformance_choice.py",
    "tests/contract/test_conformance_hooks.py",
    "tests/contract/test_conformance_object.py",
    "tests/contract/test_conformance_values.py",
    "tests/contract/test_chain.py",
    "tests/contract/test_record.py",
    "tests/contract/test_binaries.py",
    "tests/contract/test_misses.py",
    "tests/contract/test_verify.py",
    "tests/contract/test_preload.py",
    "tests/contract/test_every_argument.py",
    "tests/contract/test_concurrency.py",
    "tests/contract/test_specialize.py",
    "tests/contract/test_launch_path.py",
    "tests/contract/test_spared.py",
    "tests/unit/test_distribution.py",
    "tests/unit/test_source.py",
    "tests/unit/test_cubin.py",
]
# of the chain, what a release could change; damaged bundles are the same on all
CHAIN = "not chain or warmup or verify or stock or frozen or lookup or same_bytes or edited or flip or helper"

pytestmark = pytest.mark.compat


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", [version for version in RELEASES if version != triton.__version__])
def test_contract(version, tmp_path):
    place = ROOT / ".compat" / version
    if not (place / "triton" / "__init__.py").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(place),
            f"triton=={version}",
        ]
        subprocess.run(command, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(place), "TCACHE_TEST_TRITON": version}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'base'}",
        "-k",
        CHAIN,
    ]
    done = subprocess.run([*command, *TESTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
