"""The platform's part of a native helper's key, without running a program."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys

import pytest
from triton.runtime import build

from tcache._triton import cache

KEY = "from triton.runtime.build import platform_key; print(platform_key())"


@pytest.mark.skipif(not shutil.which("file"), reason="there is no file program to compare with")
def test_the_header_says_what_the_file_program_says():
    said = subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, check=True).stdout.strip()
    assert cache.platform_key(sys.executable, file_program=True) == said


def test_without_the_file_program():
    environment = {**os.environ, "PATH": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, check=True, env=environment)
    assert cache.platform_key(sys.executable, file_program=False) == done.stdout.strip()


def test_what_is_no_program_is_left_to_upstream(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    assert cache.platform_key(str(script), file_program=True) is None
    assert cache.platform_key(str(tmp_path / "absent"), file_program=True) is None


def test_no_process_is_started(monkeypatch):
    upstream = build.platform_key
    expected = getattr(upstream, "__wrapped__", upstream)()
    monkeypatch.setattr(build, "platform_key", functools.lru_cache(lambda: pytest.fail("asked upstream")))
    monkeypatch.setattr(platform, "architecture", lambda *_: pytest.fail("asked platform"))
    cache.spare_platform_search()
    assert build.platform_key() == expected
    ours = build.platform_key
    cache.spare_platform_search()
    assert build.platform_key is ours
