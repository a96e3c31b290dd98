"""Which bundles a process is offered: named ones first, then those of installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Return the bundles of installed packages, sorted by the entry point's name.

    The packages are not imported, except those that a dotted name is below.
    """
    if os.environ.get(OPT_OUT, "1") == "0":
        return []
    found: list[Offer] = []
    points, broken = _points()
    for _, value in sorted({(point.name, point.value) for point in points}):
        found += [offer for offer in _below(value) if offer not in found]
    return found + broken


def _points() -> tuple[list[importlib.metadata.EntryPoint], list[Offer]]:
    """Return the entry points of the group, and the packages whose entry points cannot be read."""
    points: list[importlib.metadata.EntryPoint] = []
    broken = []
    for known, place in _packages():
        try:
            points += known.entry_points.select(group=GROUP)
        except Exception as error:  # of any package; importlib.metadata raises what its parser stumbled over
            broken.append(Offer(place, f"its entry points cannot be read: {type(error).__name__}: {error}"))
    return points, broken


def _packages() -> Iterator[tuple[importlib.metadata.Distribution, str]]:
    """Yield the installed packages that may have entry points of the group, and where they are.

    ``importlib.metadata.entry_points`` reads the metadata of every installed package: 15 ms where there are 200. Here
    only those are read whose ``entry_points.txt`` has the group's name in it. Of packages found twice on ``sys.path``
    the first counts, as there.
    """
    seen: set[str] = set()
    for place in dict.fromkeys(sys.path):
        try:
            with os.scandir(place or ".") as listing:
                names = sorted(row.name for row in listing if row.name.endswith((".dist-info", ".egg-info")))
        except OSError:
            if not os.path.isfile(place):
                continue
            for found in importlib.metadata.distributions(path=[place]):  # a zip file
                yield found, str(place)
            continue
        for name in names:
            package = re.sub(r"[-_.]+", "-", name.rpartition(".")[0].partition("-")[0]).lower()
            if package in seen:
                continue
            seen.add(package)
            try:
                with open(os.path.join(place or ".", name, "entry_points.txt"), "rb") as file:
                    text = file.read()
            except OSError:
                continue
            if GROUP.encode() in text:
                path = Path(place or ".", name)
                yield importlib.metadata.PathDistribution(path), str(path)


def _below(value: str) -> list[Offer]:
    package = value.partition(":")[0].strip()
    try:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
    except Exception as error:  # of the package that a dotted name is below
        return [Offer(package, f"entry point {value!r} leads nowhere: {type(error).__name__}: {error}")]
    found = []
    for place in places:
        if os.path.isfile(os.path.join(place, _MARK)):
            found.append(Offer(place))
        elif os.path.isdir(place):
            try:
                inner = [os.path.join(place, name) for name in sorted(os.listdir(place))]
            except OSError as error:
                found.append(Offer(place, f"cannot be read: {error.strerror}"))
                continue
            found += [Offer(path) for path in inner if os.path.isfile(os.path.join(path, _MARK))]
    return found or [Offer(package, f"entry point {value!r} names no package with a {_MARK}")]
