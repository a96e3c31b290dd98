"""Why a launch missed: the nearest packed entry and the fields that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcache.errors import BundleError, CacheMiss

if TYPE_CHECKING:
    from tcache._triton.probe import Compilation
    from tcache.active import Active

__all__ = ["differences", "explain_config", "explain_entry", "explain_helper", "facts_of"]


def facts_of(compilation: Compilation) -> dict[str, Any]:
    """Return what an entry's name depends on, as named JSON values: the same for packing and for explaining.

    Keys: ``kernel``, ``target``, ``signature``, ``constants``, ``attributes``, ``options``, ``source`` (identity,
    see :mod:`tcache.keys.source`), ``line`` (where the kernel starts in its file) and ``text`` (Triton's own
    key of text and lines).
    """
    from tcache.keys.source import source_identity

    function = compilation.source.fn
    target = compilation.target
    return {
        "kernel": f"{function.__module__}:{function.__qualname__}",
        "target": f"{target.backend}:{target.arch}:{target.warp_size}",
        **compilation.specialization(),
        "options": {
            name: _plain(value) for name, value in sorted(compilation.options.items()) if name != "extern_libs"
        },
        "source": source_identity(function),
        "line": int(function.starting_line_number),
        "text": function.cache_key,
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


def differences(wanted: dict[str, Any], packed: dict[str, Any]) -> list[str]:
    """Return one line per field in which a launch differs from a packed entry."""
    found = []
    if wanted["source"] != packed["source"]:
        found.append("source: the kernel, or something it calls or reads, was edited after packing")
    elif wanted["line"] != packed["line"]:
        found.append(f"line: the kernel starts at line {wanted['line']}, packed at line {packed['line']}")
    elif wanted["text"] != packed["text"]:
        found.append("text: formatting or comments changed, or a function it calls moved to another line")
    if wanted["target"] != packed["target"]:
        found.append(f"target: {wanted['target']}, packed {packed['target']}")
    for group in ("signature", "constants", "options"):
        ours, theirs = wanted[group], packed[group]
        found += [
            f"{group.removesuffix('s')} {name}: {ours.get(name, 'none')}, packed {theirs.get(name, 'none')}"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
    ours, theirs = wanted["attributes"], packed["attributes"]
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            mine, other = " ".join(ours.get(name, [])) or "not divisible by 16", " ".join(theirs.get(name, []))
            found.append(f"alignment {name}: {mine}, packed {other or 'not divisible by 16'}")
    return found


def _nearest(wanted: dict[str, Any], active: Active) -> tuple[str, list[str]] | None:
    best: tuple[int, str, list[str]] | None = None
    name = wanted["kernel"].rpartition(":")[2]
    for bundle in active.bundles:
        try:
            index = bundle.index()
        except BundleError:
            continue
        for entry, packed in index.facts.items():
            if packed["kernel"].rpartition(":")[2] != name:
                continue
            differing = differences(wanted, packed)
            if best is None or (len(differing), entry) < best[:2]:
                best = (len(differing), entry, differing)
    return best[1:] if best else None


def explain_entry(key: str, compilation: Compilation | None, active: Active, refused: tuple[str, ...]) -> CacheMiss:
    """Return the :class:`CacheMiss` for an entry that no bundle has."""
    details = [f"refused: {reason}" for reason in refused]
    details += [f"skipped bundle {path}: {reason}" for path, reason in active.skipped]
    kernel = None
    hint = "add the shape to the shape manifest, then run `tcache warmup` and `tcache pack` again"
    if compilation is None:
        details.append(f"entry: {key}")
    else:
        wanted = facts_of(compilation)
        kernel = wanted["kernel"]
        details.append(f"specialization: {_brief(wanted)}")
        details.append(f"entry: {key}")
        near = _nearest(wanted, active)
        if near is None:
            details.append(f"no entry of this kernel is packed in {_bundles(active)}")
        elif near[1]:
            details.append(f"nearest packed entry: {near[0]}; it differs in")
            details += [f"  {line}" for line in near[1]]
            if near[1][0].startswith(("source:", "line:", "text:")):
                hint = "this is not the source that was packed: ship that one, or warm up and pack this one"
        else:
            details.append(f"packed entry {near[0]} agrees in every field tcache knows: Triton itself or ptxas differs")
    return CacheMiss(
        f"{kernel or 'a kernel'} is not prebaked for this launch (mode frozen)",
        kernel=kernel,
        details=tuple(details),
        hint=hint,
    )


def explain_helper(name: str, digest: str, active: Active, reasons: tuple[str, ...]) -> CacheMiss:
    """Return the :class:`CacheMiss` for a native helper that no bundle has."""
    details = [f"refused: {reason}" for reason in reasons]
    details += [f"skipped bundle {path}: {reason}" for path, reason in active.skipped]
    details.append(f"source sha256: {digest}")
    return CacheMiss(
        f"native helper {name} is not prebaked in {_bundles(active)} (mode frozen)",
        details=tuple(details),
        hint="pack on the service's Triton and Python, without --no-native",
    )


def explain_config(
    kernel: str, gpu: str, shape: str, active: Active, *, reason: str, near: str | None = None
) -> CacheMiss:
    """Return the :class:`CacheMiss` for a shape that has no best config."""
    details = [f"GPU: {gpu}", f"shape key: {shape}", f"reason: {reason}"]
    details += [f"skipped bundle {path}: {why}" for path, why in active.skipped]
    if near:
        details.append(f"nearest tuned shape: {near}")
    return CacheMiss(
        f"{kernel} has no best config for this launch (mode {active.mode})",
        kernel=kernel,
        details=tuple(details),
        hint="add the shape to the shape manifest and run `tcache tune` on this GPU, then warm up and pack again",
    )


def _brief(facts: dict[str, Any]) -> str:
    types = ", ".join(f"{name}: {kind}" for name, kind in facts["signature"].items() if kind != "constexpr")
    constants = ", ".join(f"{name}={value}" for name, value in facts["constants"].items())
    return f"({types}) with {constants}" if constants else f"({types})"


def _bundles(active: Active) -> str:
    return ", ".join(str(bundle.root) for bundle in active.bundles) or "any bundle (none is active)"
