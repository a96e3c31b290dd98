"""``tcache pack``."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option, manifests, select, selection_options
from tcache.cli.output import print_json, progress, size, table
from tcache.cli.resolve import brief, report_untuned

if TYPE_CHECKING:
    from tcache.cli.options import Selection
    from tcache.pack import Contents, Packed, Plan
    from tcache.resolve import Resolved
    from tcache.warmup import Outcome

FORMS = ("dir", "wheel", "oci", "native")


@click.command("pack")
@manifests()
@selection_options
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    show_envvar=True,
    help="Where to write: a new directory; for a wheel its folder; for an image a directory or a .tar file.",
)
@click.option(
    "--format",
    "form",
    envvar="TCACHE_FORMAT",
    type=click.Choice(FORMS),
    default="dir",
    show_default=True,
    show_envvar=True,
    help="dir: for COPY --from=builder. wheel: for pip. oci: an image of one layer. "
    "native: a plain TRITON_CACHE_DIR, for services without tcache.",
)
@click.option(
    "--name",
    show_envvar=True,
    help="What the bundle is called.  [default: the output's name, or for a wheel the manifest's]",
)
@click.option(
    "--version",
    "version",
    envvar="TCACHE_VERSION",
    show_envvar=True,
    help="wheel: its version.  [default: one that follows from the contents]",
)
@click.option(
    "--mount-path",
    metavar="PATH",
    show_envvar=True,
    help="native, oci: absolute path of the cache in the service. Group files name it.  "
    "[oci default: /io.triton.cache]",
)
@click.option(
    "--libcuda-dir",
    "libcuda_dirs",
    multiple=True,
    metavar="DIR",
    show_envvar=True,
    help="native, oci: where the service has libcuda.so.1; Triton 3.8 and later name helpers after it. May "
    "be repeated.  [default: the usual places]",
)
@click.option(
    "--hip-library",
    metavar="FILE",
    show_envvar=True,
    help="Path of libamdhip64.so in the service, for AMD targets.  [default: as on this machine]",
)
@click.option(
    "--base", type=click.Path(path_type=Path), show_envvar=True, help="oci: image layout directory to put the layer on."
)
@click.option("--tag", default="latest", show_default=True, show_envvar=True, help="oci: name of the image.")
@click.option(
    "--include-ir",
    default="",
    metavar="KINDS",
    show_envvar=True,
    help="Comma-separated intermediate files to include, such as ttgir,ptx.",
)
@click.option(
    "--include-captured",
    is_flag=True,
    show_envvar=True,
    help="Include the entries that recordings captured of kernels torch.compile generates.",
)
@click.option(
    "--no-native",
    is_flag=True,
    show_envvar=True,
    help="Leave out native helpers; the service then needs gcc and mode lookup.",
)
@click.option("--warmup", "warmup", is_flag=True, show_envvar=True, help="Compile entries that are missing first.")
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    show_envvar=True,
    help="--warmup: kernels to compile at once.  [default: the cores of this machine]",
)
@click.option("--dry-run", is_flag=True, show_envvar=True, help="Show what would be packed and why; write nothing.")
@click.option("--force", is_flag=True, show_envvar=True, help="Replace an existing output.")
@json_option
def command(
    manifests: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, cache_dir: Path | None,
    output: Path | None, form: str, include_ir: str, warmup: bool, jobs: int | None, dry_run: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Copy what MANIFEST references from the Triton cache into a bundle: binaries, metadata, best configs and native
    helpers, each with its digest. Needs no GPU. Several manifests, GPUs and targets go into one bundle.
    """
    from tcache.pack import captured_entries, missing_entries, plan

    begin = time.perf_counter()
    kinds = _kinds(include_ir)
    name = _name(manifests, options["name"])
    if not dry_run:
        _check(output, form, options)
    selection = select(manifests, gpus, target, store, cache_dir)
    resolved, untuned = selection.resolve("error")
    report_untuned(untuned, "run `tcache tune` on the GPU: only winners are packed")
    if not options["include_captured"]:
        _tell_captured(selection)
    if dry_run:
        captured = captured_entries(selection.manifests, selection.gpus) if options["include_captured"] else []
        _show(plan(resolved, selection.stores, kinds, captured), as_json=as_json)
        return
    if warmup:
        _warm(resolved, jobs, quiet=as_json)
    absent = missing_entries(resolved)
    if absent:
        again = {"--gpu": gpus, "--target": target, "--store": store, "--cache-dir": cache_dir}
        raise _missing(absent, resolved, manifests, again)
    packed = _pack(resolved, selection, name, kinds, form, output or Path(), options)
    _report(packed, time.perf_counter() - begin, as_json=as_json)


def _tell_captured(selection: Selection) -> None:
    recordings = [
        recording for manifest in selection.manifests for part in manifest.everything()
        for recording in part.recordings.values()
    ]  # fmt: skip
    count = len(
        {launch.captured.entry for recording in recordings for _, launch in recording.launches if launch.captured}
    )
    if count:
        click.echo(f"note: {count} captured entries are left out: pass --include-captured to pack them", err=True)


def _kinds(text: str) -> tuple[str, ...]:
    from tcache.errors import UsageError
    from tcache.pack import IR

    kinds = tuple(part.strip() for part in text.split(",") if part.strip())
    for kind in kinds:
        if kind not in IR:
            raise UsageError(f"--include-ir: unknown kind {kind!r}", f"use some of {', '.join(IR)}")
    return kinds


_ARCHIVE_HINT = "name a directory; --format oci makes a .tar, and --format wheel a .whl"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip", ".whl")


def _check(output: Path | None, form: str, options: dict[str, Any]) -> None:
    """Refuse options that do not go together, before anything is compiled."""
    from tcache.errors import UsageError

    if output is None:
        raise UsageError("no --output", "say where to write with -o, or pass --dry-run to see what would be written")
    ending = next((end for end in _ARCHIVES if output.name.endswith(end)), None)
    if ending is not None and (form, ending) not in (("oci", ".tar"), ("wheel", ".whl")):
        hint = "end it in .tar: the layer is compressed already" if form == "oci" else _ARCHIVE_HINT
        raise UsageError(f"{output}: --format {form} writes no {ending}", hint)
    if form == "native" and not options["mount_path"]:
        raise UsageError(
            "--format native needs --mount-path: Triton's cache lists absolute paths",
            "give the path at which the service will see the directory, such as /opt/triton/cache",
        )
    for option, forms in (
        ("version", "wheel"), ("base", "oci"), ("mount_path", "native oci"), ("libcuda_dirs", "native oci"),
    ):  # fmt: skip
        if options[option] and form not in forms.split():
            flag = {"mount_path": "mount-path", "libcuda_dirs": "libcuda-dir"}.get(option, option)
            raise UsageError(f"--{flag} goes with --format {' or '.join(forms.split())}, not with {form}")


def _name(manifests: tuple[Path, ...], name: str | None) -> str:
    from tcache.errors import UsageError

    if name is None:  # not the output's name: where a bundle is written is no part of it
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", manifests[0].stem).strip("-.") or "bundle"
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]{0,99}", name, re.ASCII):
        raise UsageError(f"{name!r} cannot be a bundle's name", "pass --name with letters, digits, '.', '-' and '_'")
    return name


def _warm(resolved: list[Resolved], jobs: int | None, *, quiet: bool) -> None:
    from tcache.compile import cores
    from tcache.errors import BundleError
    from tcache.warmup import pending, warm

    todo = pending(resolved)
    failed: list[Outcome] = []
    with progress("compiling", len(todo), quiet=quiet) as step:

        def done(outcome: Outcome) -> None:
            if outcome.error is not None:
                failed.append(outcome)
            step(f"{outcome.resolved.compilation.name} {outcome.error or f'{outcome.seconds:.1f} s'}")

        warm(todo, jobs or cores(), done)
    if failed:
        first = failed[0]
        raise BundleError(
            f"{len(failed)} of {len(todo)} entries cannot be compiled, the first is {first.resolved.where}: "
            f"{first.resolved.kernel} [{first.resolved.config}]: {first.error}",
            "free some space where the cache is"
            if f"[Errno {errno.ENOSPC}]" in str(first.error)
            else "tune again, or take the case out of the manifest",
        )


def _missing(
    absent: list[Resolved], resolved: list[Resolved], manifests: tuple[Path, ...], again: dict[str, Any]
) -> Exception:
    import shlex

    from tcache.errors import MissingEntries

    rows = [" ".join([row.kernel, *([f"[{row.shape}]", str(row.config)] if row.shape else []), row.entry])
            for row in absent]  # fmt: skip
    words = ["tcache", "warmup", *map(str, manifests)]
    for option, values in again.items():
        for value in values if isinstance(values, tuple) else [values] if values is not None else []:
            words += [option, str(value)]
    total = len({launch.entry for launch in resolved})
    return MissingEntries(rows, total, f"run: {shlex.join(words)}, or pass --warmup")


def _pack(
    resolved: list[Resolved], selection: Selection, name: str, kinds: tuple[str, ...], form: str, output: Path,
    options: dict[str, Any],
) -> Packed:  # fmt: skip
    from tcache.pack import collect

    contents = collect(
        resolved,
        selection.manifests,
        selection.stores,
        name,
        include_ir=kinds,
        with_native=not options["no_native"],
        hip_library=options["hip_library"],
        gpus=selection.gpus,
        include_captured=options["include_captured"],
    )
    return _write(contents, form, output, options)


def _write(contents: Contents, form: str, output: Path, options: dict[str, Any]) -> Packed:
    from tcache.archives import opened_image
    from tcache.pack import write_directory, write_native, write_oci, write_wheel

    force, mount, drivers = options["force"], options["mount_path"], options["libcuda_dirs"]
    if form == "wheel":
        return write_wheel(contents, output, options["version"], force=force)
    if form == "native":
        return write_native(contents, output, mount, drivers, force=force)
    if form == "oci":
        with contextlib.ExitStack() as stack:
            base = stack.enter_context(opened_image(options["base"])) if options["base"] else None
            tag = options["tag"]
            return write_oci(contents, output, mount_path=mount, driver_dirs=drivers, base=base, tag=tag, force=force)
    return write_directory(contents, output, force=force)


def _report(packed: Packed, seconds: float, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"output": str(packed.path), "format": packed.form, "launches": packed.launches, "entries": packed.entries,
             "native_helpers": packed.helpers, "bytes": packed.bytes, "notes": list(packed.notes),
             **(packed.digests or {}), "seconds": round(seconds, 3)}
        )  # fmt: skip
        return
    for note in packed.notes:
        click.echo(f"note: {note}", err=True)
    for what, digest in (packed.digests or {}).items():
        click.echo(f"{what} {digest}")
    click.echo(
        f"{packed.path}: {packed.launches} launches, {packed.entries} entries, {packed.helpers} native helpers, "
        f"{size(packed.bytes)}, {seconds:.1f} s"
    )


def _show(planned: Plan, *, as_json: bool) -> None:
    if as_json:
        entries = [
            {
                "entry": row.entry, "kernel": row.kernel, "gpus": row.gpus, "shapes": row.shapes, "config": row.config,
                "specialization": row.specialization, "launches": row.launches, "where": row.where,
                "present": row.present, "bytes": row.bytes, "files": row.files,
            }
            for row in planned.entries
        ]  # fmt: skip
        summary = {"launches": planned.launches, "missing": len(planned.missing), "bytes": planned.bytes}
        print_json({**summary, "entries": entries, "others": planned.others})
        return
    shown = [
        [
            row.kernel.rpartition(":")[2],
            _several(row.shapes) or "-",
            row.config or "-",
            brief(row.specialization),
            row.entry,
            size(row.bytes) if row.present else "missing",
            f"{row.launches} from {_several(tuple(Path(place).name for place in row.where))}",
        ]
        for row in planned.entries
    ]
    table("", ["kernel", "shape key", "config", "specialization", "entry", "size", "launches"], shown)
    others = f"{len(planned.others)} other files {size(sum(planned.others.values()))}"
    click.echo(
        f"would pack {planned.launches} launches, {len(planned.entries)} entries ({len(planned.missing)} missing), "
        f"{others}, {size(planned.bytes)} and native helpers"
    )


def _several(values: tuple[str, ...]) -> str:
    return values[0] + (f" and {len(values) - 1} more" if len(values) > 1 else "") if values else ""
