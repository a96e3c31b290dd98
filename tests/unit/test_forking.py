"""Pieces of work on several cores: the same answers, whatever becomes of the processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, os, signal, sys, threading
from tcache import forking

forking.cores = lambda: 3
own = os.getpid()
{setup}
def look(part):
    {look}
    return [f"{{os.getpid()}} {{piece}}" for piece in part]
rows = forking.spread(look, list(range({pieces})), lambda: [f"{{os.getpid()}} besides"])
try:
    os.waitpid(-1, 0)
    left = True
except ChildProcessError:
    left = False
print(json.dumps([rows, own, left]))
"""


def spread(pieces, look="pass", setup="", code=0):
    script = PROBE.format(pieces=pieces, look=look, setup=setup)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if code:
        return done.stderr, None
    rows, own, left = json.loads(done.stdout)
    assert not left  # no child is left behind
    found = [row.split() for row in rows]
    assert sorted(piece for _, piece in found) == sorted([*map(str, range(pieces)), "besides"])
    assert [pid for pid, piece in found if piece == "besides"] == [str(own)]
    return found, {pid for pid, _ in found}


def test_few_pieces_stay_here():
    assert len(spread(200)[1]) == 1


def test_many_pieces_go_to_as_many_processes_as_there_are_cores():
    assert len(spread(400)[1]) == 2
    assert len(spread(5000)[1]) == 3


def test_a_process_with_another_thread_is_not_copied():
    assert len(spread(5000, setup="threading.Thread(target=threading.Event().wait, daemon=True).start()")[1]) == 1


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit()", "raise ValueError", "return 1 / 0"]
)
def test_what_a_process_that_ended_had_to_do_is_done_here(end):
    assert len(spread(5000, look=f"if os.getpid() != own: {end}")[1]) == 1


def test_children_that_somebody_else_waits_for():
    assert len(spread(5000, setup="signal.signal(signal.SIGCHLD, signal.SIG_IGN)")[1]) == 3


def test_processes_that_cannot_be_made():
    refuse = "def refuse():\n    raise OSError\nos.{} = refuse"
    assert len(spread(5000, setup=refuse.format("fork"))[1]) == 1
    assert len(spread(5000, setup=refuse.format("pipe"))[1]) == 1


def test_long_answers():
    found, pids = spread(120_000)
    assert len(pids) == 3
    assert len(found) == 120_001


def test_what_fails_here_fails():
    error, _ = spread(5000, look="if os.getpid() == own: raise ValueError('mine')", code=1)
    assert "ValueError: mine" in error
