"""Which bundles a process is offered: named ones first, then those of installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import NamedTuple

__all__ = ["GROUP", "OPT_OUT", "Offer", "installed", "named"]

GROUP = "tcache.bundles"
"""Entry point group: the value names a package whose directory is a bundle, or has bundles directly below it."""

OPT_OUT = "TCACHE_INSTALLED_BUNDLES"
"""Set to 0 to leave installed packages alone."""

_MARK = "bundle.json"


class Offer(NamedTuple):
    """A directory that may be a bundle.

    Attributes:
        path: the directory.
        problem: why there is none, for a package that promises one; empty otherwise.
    """

    path: str
    problem: str = ""


def named() -> list[str]:
    """Return the bundles that ``TCACHE_BUNDLES`` names, separated like ``PATH``."""
    return [path for path in os.environ.get("TCACHE_BUNDLES", "").split(os.pathsep) if path]


def installed() -> list[Offer]:
    """Return the bundles of installed packages, sorted by the entry point's name; the packages are not imported."""
    if os.environ.get(OPT_OUT, "1") == "0":
        return []
    found: list[Offer] = []
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        found += [offer for offer in _below(point.value) if offer not in found]
    return found


def _below(value: str) -> list[Offer]:
    package = value.partition(":")[0].strip()
    try:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
    except (ImportError, ValueError, AttributeError) as error:
        return [Offer(package, f"entry point {value!r} leads nowhere: {error}")]
    found = []
    for place in places:
        if os.path.isfile(os.path.join(place, _MARK)):
            found.append(Offer(place))
        elif os.path.isdir(place):
            inner = (os.path.join(place, name) for name in sorted(os.listdir(place)))
            found += [Offer(path) for path in inner if os.path.isfile(os.path.join(path, _MARK))]
    return found or [Offer(package, f"entry point {value!r} names no package with a {_MARK}")]
