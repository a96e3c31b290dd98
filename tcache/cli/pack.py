"""``tcache pack``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tcache.cli.options import json_option, manifests, select, selection_options
from tcache.cli.output import print_json, size
from tcache.cli.resolve import report_untuned


@click.command("pack")
@manifests()
@selection_options
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), show_envvar=True, help="Where to write."
)
@click.option("--format", "_form", envvar="TCACHE_FORMAT", type=click.Choice(["dir"]), default="dir",
              show_default=True, show_envvar=True, help="dir: a directory, for COPY --from=builder.")  # fmt: skip
@click.option("--include-ir", default="", metavar="KINDS", show_envvar=True,
              help="Comma-separated intermediate files to include, such as ttgir,ptx.")  # fmt: skip
@click.option(
    "--no-native",
    is_flag=True,
    show_envvar=True,
    help="Leave out native helpers; the service then needs gcc and mode lookup.",
)
@click.option("--force", is_flag=True, show_envvar=True, help="Replace an existing output directory.")
@json_option
def command(
    manifests: tuple[Path, ...], gpus: tuple[str, ...], target: str | None, store: Path | None, cache_dir: Path | None,
    output: Path, _form: str, include_ir: str, no_native: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Copy what MANIFEST references from the Triton cache into a bundle: binaries, metadata, best configs and native
    helpers, each with its digest. Needs no GPU.
    """
    from tcache.errors import BundleError, UsageError
    from tcache.pack import IR, missing_entries, pack_directory

    begin = time.perf_counter()
    kinds = tuple(part.strip() for part in include_ir.split(",") if part.strip())
    for kind in kinds:
        if kind not in IR:
            raise UsageError(f"--include-ir: unknown kind {kind!r}", f"use some of {', '.join(IR)}")
    selection = select(manifests, gpus, target, store, cache_dir)
    resolved, missing = selection.resolve("error")
    report_untuned(missing)
    absent = missing_entries(resolved)
    if absent:
        first = absent[0]
        names = " ".join(str(path) for path in manifests)
        raise BundleError(
            f"{len(absent)} of {len({launch.entry for launch in resolved})} entries are not in the Triton cache, "
            f"the first is {first.kernel} [{first.shape}] {first.entry}",
            f"run: tcache warmup {names}",
        )
    packed = pack_directory(
        resolved,
        selection.manifests,
        selection.stores,
        output,
        include_ir=kinds,
        with_native=not no_native,
        force=force,
    )
    seconds = time.perf_counter() - begin
    if as_json:
        print_json(
            {"output": str(packed.path), "launches": packed.launches, "entries": packed.entries,
             "native_helpers": packed.helpers, "bytes": packed.bytes, "seconds": round(seconds, 3)}
        )  # fmt: skip
    else:
        click.echo(
            f"{packed.path}: {packed.launches} launches, {packed.entries} entries, {packed.helpers} native helpers, "
            f"{size(packed.bytes)}, {seconds:.1f} s"
        )
