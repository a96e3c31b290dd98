"""Zero JIT, zero tuning, zero compiler in production: prebaked Triton kernels, proven before you ship.

``import tcache`` is cheap: the names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcache.active import activate
    from tcache.adopting import adopt
    from tcache.counters import stats
    from tcache.decorate import autotune
    from tcache.errors import CacheMiss, TcacheError
    from tcache.preloading import preload
    from tcache.recording import record

__all__ = ["CacheMiss", "TcacheError", "__version__", "activate", "adopt", "autotune", "preload", "record", "stats"]

__version__ = "0.1.0"

_HOMES = {
    "CacheMiss": "tcache.errors",
    "TcacheError": "tcache.errors",
    "activate": "tcache.active",
    "adopt": "tcache.adopting",
    "autotune": "tcache.decorate",
    "preload": "tcache.preloading",
    "record": "tcache.recording",
    "stats": "tcache.counters",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tcache' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("TCACHE_RECORD"):
    from tcache.startup import arm

    arm()
