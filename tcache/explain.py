"""Why a launch missed: the nearest packed entry and the fields that differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tcache._triton.distribution import distribution
from tcache._triton.probe import key_environment, launch_in_progress
from tcache.differences import Difference, differences
from tcache.errors import BundleError, CacheMiss
from tcache.snippet import manifest_lines

if TYPE_CHECKING:
    from tcache._triton.probe import Compilation
    from tcache.active import Active
    from tcache.bundle import Bundle
    from tcache.environment import Rejected

__all__ = [
    "Difference",
    "differences",
    "explain_config",
    "explain_entry",
    "explain_helper",
    "facts_of",
    "specialization_of",
]


def facts_of(compilation: Compilation) -> dict[str, Any]:
    """Return what an entry's name depends on, as named JSON values: the same for packing and for explaining.

    Keys: ``kernel``, ``target``, ``signature``, ``constants``, ``attributes``, ``options``, ``source`` (identity,
    see :mod:`tcache.keys.source`), ``line`` (where the kernel starts in its file), ``text`` (Triton's own
    key of text and lines) and ``given`` (the options that the launch stated, in order: no part of the name).
    """
    from tcache.keys.source import source_identity

    function = compilation.source.fn
    target = compilation.target
    return {
        "kernel": f"{function.__module__}:{function.__qualname__}",
        "target": f"{target.backend}:{target.arch}:{target.warp_size}",
        **specialization_of(compilation),
        "source": source_identity(function),
        "line": int(function.starting_line_number),
        "text": function.cache_key,
        "given": [[name, _plain(value)] for name, value in compilation.given],
    }


def specialization_of(compilation: Compilation) -> dict[str, Any]:
    """Return what Triton's binder made of a launch: ``signature``, ``constants``, ``attributes`` and ``options``."""
    options = {name: _plain(value) for name, value in sorted(compilation.options.items()) if name != "extern_libs"}
    return {**compilation.specialization(), "options": options}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


class _Near(NamedTuple):
    entry: str
    differing: list[Difference]
    ref: str | None
    bundle: Bundle


def _nearest(wanted: dict[str, Any], active: Active) -> _Near | None:
    best: _Near | None = None
    name = wanted["kernel"].rpartition(":")[2]
    for bundle in active.bundles:
        try:
            index = bundle.index()
            for entry, kernel in index.kernels():
                if kernel.rpartition(":")[2] == name:
                    differing = differences(wanted, index.fact(entry))
                    if best is None or (len(differing), entry) < (len(best.differing), best.entry):
                        best = _Near(entry, differing, index.ref(entry), bundle)
        except (BundleError, KeyError, TypeError, AttributeError, ValueError):
            continue  # the index was damaged after it was opened, or is another's: an explanation can do without it
    return best


def explain_entry(key: str, compilation: Compilation | None, active: Active, refused: tuple[str, ...]) -> CacheMiss:
    """Return the :class:`CacheMiss` for an entry that no bundle has.

    Args:
        key: the entry Triton asked for.
        compilation: the compilation under way, None where it cannot be told.
        active: the settings in force.
        refused: why bundles that have the entry could not give it.
    """
    details = [f"refused: {reason}" for reason in refused]
    reasons = ["damaged"] if refused else []
    details += [f"skipped bundle {row.path}: {row.reason}" for row in active.skipped]
    kernel = nearest = None
    manifest = ""
    hint = "add the shape to the shape manifest, then run `tcache warmup` and `tcache pack` again"
    wanted = _facts(compilation)
    if wanted is None:
        details.append(f"entry: {key}")
    else:
        kernel = wanted["kernel"]
        details += [f"specialization: {_brief(wanted)}", f"entry: {key}"]
        near = None if refused else _nearest(wanted, active)
        nearest = near.entry if near else None
        if near is not None:
            rows = _environment_differences(near) + near.differing
            reasons += [row.reason for row in rows] or ["build"]
            details += _near_details(near, rows)
            if near.differing and near.differing[0].reason in ("source", "line", "text"):
                hint = "this is not the source that was packed: ship that one, or warm up and pack this one"
            elif rows and rows[0].reason == "variable":
                hint = "start the service with the environment that was packed, or warm up and pack with this one"
            elif not rows:
                hint = "pack with the service's own Triton, unedited: warm up and pack again, or install the one packed"
        elif refused:
            hint = _RESTART if all("was replaced after" in reason for reason in refused) else _COPY_AGAIN
        else:
            reasons.append("kernel")
            details.append(f"no entry of this kernel is packed in {_bundles(active)}")
        if not refused:
            manifest, lines = _coverage(wanted, near)
            details += lines
    reasons += [row.kind for row in active.skipped]
    return CacheMiss(
        f"{kernel or 'a kernel'} is not prebaked for this launch (mode frozen)",
        kernel=kernel,
        details=tuple(details),
        hint=hint,
        reasons=tuple(dict.fromkeys(reasons)),
        entry=key,
        nearest=nearest,
        manifest=manifest,
    )


def _facts(compilation: Compilation | None) -> dict[str, Any] | None:
    """Return a compilation's facts, None where they cannot be had: a miss is reported all the same."""
    try:
        return None if compilation is None else facts_of(compilation)
    except Exception:  # of source that somebody generated, with values of any kind
        return None


_COPY_AGAIN = "the bundle is not what was packed: copy it again, and see `tcache verify`"
_RESTART = "start the process again: it has the old bundle's list of files"


def _near_details(near: _Near, rows: list[Difference]) -> list[str]:
    if rows:
        return [f"nearest packed entry: {near.entry}; it differs in", *(f"  {row.text}" for row in rows)]
    agrees = f"packed entry {near.entry} agrees in every field tcache knows: Triton itself or ptxas differs"
    here, packed = distribution(), near.bundle.environment.distribution
    if here.problem is not None:
        return [agrees, f"installed Triton: {here.problem}"]
    return [agrees, *(["it was packed with another build of this release"] if packed not in ("", here.digest) else [])]


def _environment_differences(near: _Near) -> list[Difference]:
    """Compare the variables of Triton's keys as they are now: a program may set one after its bundles were opened."""
    packed, here = near.bundle.environment.variables, key_environment()
    return [
        Difference("variable", f"variable {name}: {here.get(name, 'unset')}, packed {packed.get(name, 'unset')}")
        for name in sorted({*packed, *here})
        if packed.get(name) != here.get(name)
    ]


def _coverage(wanted: dict[str, Any], near: _Near | None) -> tuple[str, list[str]]:
    """Return the manifest lines that cover the launch under way, and the same with an introduction."""
    kernel, launch = wanted["kernel"], launch_in_progress()
    if launch is None:
        return "", [
            "the launch cannot be spelled out: `tcache record` writes what a running program launches",
            "of kernels that torch.compile generates it keeps the entries: pack those with --include-captured",
        ]
    module, _, qualname = kernel.rpartition(":")
    ref = kernel if module != "__main__" else f"{Path(launch.function.fn.__code__.co_filename).name}:{qualname}"
    wrapper = None
    if near is not None and near.ref is not None:
        place, _, attribute = near.ref.rpartition(":")
        ref = f"{place}:{qualname}"
        wrapper = near.ref if attribute != qualname else None
    # a manifest names arguments, and one that is called num_warps, say, is then that option too
    options = wanted["options"]
    stated = [(name, value) for name, value in launch.arguments.items() if name in options]
    unlike = [name for name, value in stated if hasattr(value, "data_ptr") or options[name] != value]
    spelled = launch.named.issuperset(unlike)
    lines = manifest_lines(ref, launch.arguments, filled=launch.filled, grid=launch.grid) if spelled else ""
    found = [f"covered by a further case of `call: {wrapper}`"] if wrapper else []
    if lines:
        introduction = "or, spelled out, by these lines of a manifest" if wrapper else "manifest lines that cover it"
        found += [f"{introduction}:", *lines.splitlines()]
    elif not wrapper:
        found.append("its arguments cannot be spelled out: write a `call:` item for the function that launches it")
    return lines, found


def explain_helper(name: str, digest: str, active: Active, refused: tuple[Rejected, ...]) -> CacheMiss:
    """Return the :class:`CacheMiss` for a native helper that no bundle has."""
    details = [f"refused: {row.reason}" for row in refused]
    details += [f"skipped bundle {row.path}: {row.reason}" for row in active.skipped]
    details.append(f"source sha256: {digest}")
    return CacheMiss(
        f"native helper {name} is not prebaked in {_bundles(active)} (mode frozen)",
        details=tuple(details),
        hint="pack on the service's Triton and Python, without --no-native",
        reasons=tuple(dict.fromkeys(["helper", *(row.kind for row in refused), *(row.kind for row in active.skipped)])),
    )


def explain_config(
    kernel: str,
    gpu: str,
    shape: str,
    active: Active,
    *,
    reason: str,
    near: str | None = None,
    word: str = "untuned",
    arguments: dict[str, Any] | None = None,
) -> CacheMiss:
    """Return the :class:`CacheMiss` for a shape that has no best config.

    Args:
        kernel: the kernel as ``module:qualname``.
        gpu: the GPU's name.
        shape: the shape key as text.
        active: the settings in force.
        reason: why there is none, in words.
        near: the nearest tuned shape and its config, as text.
        word: the reason as one of the words of :class:`~tcache.errors.CacheMiss`.
        arguments: the launch's arguments by name.
    """
    refused = active.refused(kernel.rpartition(":")[2])
    details = [f"refused: {text}" for text in refused]
    details += [f"GPU: {gpu}", f"shape key: {shape}", f"reason: {reason}"]
    details += [f"skipped bundle {row.path}: {row.reason}" for row in active.skipped]
    if near:
        details.append(f"nearest tuned shape: {near}")
    lines = manifest_lines(kernel, arguments) if arguments else ""
    if lines:
        details += ["manifest lines that cover it:", *lines.splitlines()]
    return CacheMiss(
        f"{kernel} has no best config for this launch (mode {active.mode})",
        kernel=kernel,
        details=tuple(details),
        hint=_COPY_AGAIN
        if refused
        else "add the shape to the shape manifest and run `tcache tune` on this GPU, then warm up and pack again",
        reasons=tuple(dict.fromkeys([*(["damaged"] if refused else []), word, *(row.kind for row in active.skipped)])),
        manifest=lines,
    )


def _brief(facts: dict[str, Any]) -> str:
    types = ", ".join(f"{name}: {kind}" for name, kind in facts["signature"].items() if kind != "constexpr")
    constants = ", ".join(f"{name}={value}" for name, value in facts["constants"].items())
    return f"({types}) with {constants}" if constants else f"({types})"


def _bundles(active: Active) -> str:
    return ", ".join(str(bundle.root) for bundle in active.bundles) or "any bundle (none is active)"
