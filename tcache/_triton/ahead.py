"""Triton's key of itself, computed by another thread while this one imports torch.

``triton_key`` hashes the 415 MB of ``libtriton``, 0.3 s in which Python's lock is free. Nothing else is done ahead: the
value is upstream's own, kept where upstream keeps it.
"""

from __future__ import annotations

import contextlib
import threading

from triton.runtime import cache

__all__ = ["begin_key", "key_begun"]

_under_way: list[threading.Thread] = []


def begin_key() -> None:
    """Begin to compute the key, unless that was done before."""
    if not _under_way:
        thread = threading.Thread(target=_compute, name="tcache: triton_key", daemon=True)
        _under_way.append(thread)
        thread.start()


def key_begun() -> None:
    """Wait for a key that was begun: what asks for it meanwhile would compute it a second time."""
    for thread in _under_way:
        thread.join()


def _compute() -> None:
    with contextlib.suppress(Exception):  # whoever needs the key computes it again, and meets the error
        cache.triton_key()
