"""What differs between two bundles: launches, entries, best configs, native helpers, manifests, environment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tcache.archives import opened
from tcache.bundle import Bundle, Rejected
from tcache.errors import BundleError
from tcache.scan import Scan

if TYPE_CHECKING:
    from pathlib import Path

    from tcache.bundle import Index

__all__ = ["Difference", "diff"]

Fields = dict[str, tuple[Any, Any]]
"""Field -> its value in the one and in the other bundle; None where it has none."""


@dataclass(frozen=True)
class Difference:
    """What differs, from ``a`` to ``b``.

    Attributes:
        added, removed: launches that only one has: rows of ``gpu``, ``ref``, ``shape``, ``config``, ``entry`` and the
            ``specialization`` in short.
        changed: ``{"launch", "entry", "fields"}`` of launches whose entry is another one; without fields where
            all that tcache knows of is equal, so Triton itself or its environment differs.
        bytes_changed: entries of one name and other bytes: compiled anew.
        best: ``{"gpu", "kernel", "shape", "config", "ms"}`` of best configs that changed, each a pair.
        helpers: native helpers, as ``added``, ``removed`` or ``rebuilt``.
        environment: fields of the environment.
        captured: ``{"entry", "kernel", "state"}`` of entries that no launch of a manifest reads, as ``added`` or
            ``removed``.
        manifests: ``{"path", "state"}`` of what they were packed from, as ``added``, ``removed`` or ``changed``: their
            launches may be the same all the same.
        files: other files of one name and other bytes, where nothing above says why.
    """

    added: list[dict[str, Any]] = field(default_factory=list)
    removed: list[dict[str, Any]] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    bytes_changed: list[str] = field(default_factory=list)
    best: list[dict[str, Any]] = field(default_factory=list)
    helpers: list[dict[str, Any]] = field(default_factory=list)
    environment: Fields = field(default_factory=dict)
    captured: list[dict[str, str]] = field(default_factory=list)
    manifests: list[dict[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not any(asdict(self).values())


def diff(a: Path, b: Path) -> Difference:
    """Compare two bundles: directories, wheels, image layouts or archives of them.

    Raises:
        BundleError: one is no bundle, or a file that is read is damaged.
    """
    with opened(a) as root_a, opened(b) as root_b:
        one, other = Bundle(root_a), Bundle(root_b)
        index_a, index_b = one.index(), other.index()
        added, removed, changed = _launches(index_a, index_b)
        best, captured = _best(_configs(one), _configs(other)), _captured(index_a, index_b)
        return Difference(
            added,
            removed,
            changed,
            _bytes(one, other),
            best,
            _helpers(one, other),
            _environment(one, other),
            captured,
            _manifests(one, other),
            _files(one, other, said={"index.json": bool(added or removed or changed or captured), "store": bool(best)}),
        )


def _launches(a: Index, b: Index) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Pair the launches of equal GPU, ref and shape key: equal entries first, then those that differ least."""
    added, removed, changed = [], [], []
    ours, theirs = _grouped(a), _grouped(b)
    for key in sorted({*ours, *theirs}, key=str):
        left = [row for row in ours.get(key, []) if row["entry"] not in {one["entry"] for one in theirs.get(key, [])}]
        right = [row for row in theirs.get(key, []) if row["entry"] not in {one["entry"] for one in ours.get(key, [])}]
        pairs = sorted(
            (len(fields), i, j, fields)
            for i, row in enumerate(left)
            for j, other in enumerate(right)
            for fields in [_fields(_facts(a, row), _facts(b, other))]
        ) if left and right else []  # fmt: skip
        done_left: set[int] = set()
        done_right: set[int] = set()
        for _, i, j, fields in pairs:
            if i not in done_left and j not in done_right:
                done_left.add(i)
                done_right.add(j)
                launch = {name: left[i][name] for name in ("gpu", "ref", "shape")}
                entries = [left[i]["entry"], right[j]["entry"]]
                changed.append({"launch": launch, "entry": entries, "fields": dict(fields)})
        removed += [_shown(a, row) for i, row in enumerate(left) if i not in done_left]
        added += [_shown(b, row) for j, row in enumerate(right) if j not in done_right]
    return added, removed, changed


def _grouped(index: Index) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in index.launches:
        found.setdefault((row["gpu"], row["ref"], row["shape"]), []).append(row)
    return found


def _facts(index: Index, row: dict[str, Any]) -> dict[str, Any]:
    """Return a launch's facts as flat fields, its config among them."""
    facts = index.facts.get(row["entry"], {})
    flat: dict[str, Any] = {"config": row["config"]}
    for name, value in facts.items():
        if name == "launch":
            continue  # the same arguments once more, for preloading
        if isinstance(value, dict):
            flat |= {f"{name.removesuffix('s')} {inner}": one for inner, one in value.items()}
        else:
            flat[name] = value
    return flat


def _fields(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    found = {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}
    if "source" in found or "line" in found:
        found.pop("text", None)  # Triton's digest of the text follows from either
    return sorted(found.items())


def _shown(index: Index, row: dict[str, Any]) -> dict[str, Any]:
    facts = index.facts.get(row["entry"], {})
    names = ("signature", "constants", "attributes")
    return {**row, "specialization": {name: facts.get(name, {}) for name in names}}


def _bytes(a: Bundle, b: Bundle) -> list[str]:
    """Return the entries both have under one name with other files or other bytes."""
    found = set()
    for name in sorted({*a.files, *b.files}):
        parts = name.split("/")
        if parts[0] == "entries" and {parts[1]} <= a.entries & b.entries and a.files.get(name) != b.files.get(name):
            found.add(parts[1])
    return sorted(found)


def _configs(bundle: Bundle) -> dict[tuple[str, str, str], tuple[str | None, float | None]]:
    """Return (GPU, kernel, shape key) -> winner and its median in milliseconds."""
    found = {}
    for name in sorted(bundle.files):
        if not name.startswith("store/"):
            continue
        checked = bundle.check(name)
        if isinstance(checked, Rejected):
            raise BundleError(checked.reason, "pack it again")
        path = bundle.root / name
        record = Scan(path.read_text("utf-8"), path).record()
        for shape, entry in record.entries.items():
            timing = entry.timings.get(entry.config or "")
            median = timing.median if timing is not None else None
            found[record.gpu.name, record.kernel.ref, str(shape)] = (entry.config, median)
    return found


def _best(a: dict[Any, Any], b: dict[Any, Any]) -> list[dict[str, Any]]:
    rows = []
    for key in sorted({*a, *b}):
        one, other = a.get(key, (None, None)), b.get(key, (None, None))
        if one != other:
            gpu, kernel, shape = key
            config, ms = [one[0], other[0]], [one[1], other[1]]
            rows.append({"gpu": gpu, "kernel": kernel, "shape": shape, "config": config, "ms": ms})
    return rows


def _helpers(a: Bundle, b: Bundle) -> list[dict[str, Any]]:
    ours = {helper.source: helper for helper in a.helpers}
    theirs = {helper.source: helper for helper in b.helpers}
    rows = []
    for source in sorted({*ours, *theirs}):
        helper = ours.get(source) or theirs[source]
        state = "removed" if source not in theirs else "added" if source not in ours else None
        if state is None and a.files.get(ours[source].path) != b.files.get(theirs[source].path):
            state = "rebuilt"
        if state is not None:
            rows.append({"name": helper.name, "source": source, "state": state})
    return rows


def _captured(a: Index, b: Index) -> list[dict[str, str]]:
    found = []
    for index in (a, b):
        read = {row["entry"] for row in index.launches}
        found.append({entry: kernel for entry, kernel in index.kernels() if entry not in read})
    ours, theirs = found
    return [
        {"entry": entry, "kernel": {**ours, **theirs}[entry], "state": "removed" if entry in ours else "added"}
        for entry in sorted(ours.keys() ^ theirs.keys())
    ]


def _manifests(a: Bundle, b: Bundle) -> list[dict[str, str]]:
    """Compare manifests by their path in the project; by their name where there is none."""
    ours, theirs = (
        {
            str(row["path"] or row["file"].rpartition("/")[2].partition("-")[2]): (
                bundle.files[row["file"]],
                row["gpus"],
            )
            for row in bundle.manifests
        }
        for bundle in (a, b)
    )
    return [
        {"path": path, "state": "removed" if path not in theirs else "added" if path not in ours else "changed"}
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
    ]


def _files(a: Bundle, b: Bundle, said: dict[str, bool]) -> list[str]:
    """Return files both have with other bytes, of those kinds of which nothing else was said."""
    return [
        name
        for name in sorted(a.files.keys() & b.files.keys())
        if said.get(name.partition("/")[0]) is False and a.files[name] != b.files[name]
    ]


def _environment(a: Bundle, b: Bundle) -> Fields:
    flat = []
    for bundle in (a, b):
        fields = asdict(bundle.environment)
        variables = fields.pop("variables")
        fields |= {f"variable {name}": value for name, value in variables.items()}
        fields["GPUs"] = ", ".join(sorted(str(gpu["name"]) for gpu in bundle.gpus))
        fields["targets"] = ", ".join(bundle.targets)
        flat.append(fields)
    one, other = flat
    names = sorted({*one, *other})
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
