"""``tcache manifest generalize``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option
from tcache.cli.output import print_json

if TYPE_CHECKING:
    from tcache.generalize import Item
    from tcache.manifest.launches import RecordedLaunch, Recording


@click.command("generalize")
@click.argument("recordings", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RECORDED...")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path, dir_okay=False), show_envvar=True,
              help="Shape manifest to write.")  # fmt: skip
@click.option("--force", is_flag=True, show_envvar=True, help="Replace an existing file.")
@json_option
def command(recordings: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Propose a shape manifest with names for what varies in RECORDED: sizes and integers that are equal in every
    launch share a name. It covers at least what was recorded; edit it to cover what will come.
    """
    from tcache._fs import atomic_write
    from tcache.cli.options import quiet_noise
    from tcache.errors import OutputError
    from tcache.generalize import generalize
    from tcache.manifest.launches import load_recording

    if output.exists() and not force:
        raise OutputError(f"{output}: output exists already", "choose another --output, or pass --force to replace it")
    quiet_noise()
    loaded = [load_recording(path) for path in recordings]
    rows, rest = _rows(loaded, output.parent)
    items = generalize(rows)
    names = _write_rest(rest, output)
    gpus = sorted({gpu for one in loaded for _, launch in one.launches for gpu in launch.gpus})
    atomic_write(output, _yaml(items, gpus, names).encode())
    skipped = [line for one in loaded for line in one.unreplayable()]
    cases = sum(_count(item) for item in items)
    if as_json:
        kept = [f"{where}: {why}" for _, where, why, _ in rest]
        numbers = {"items": len(items), "launches": len(rows), "cases": cases}
        print_json({"output": str(output), **numbers, "kept_as_recorded": kept, "skipped": skipped})
        return
    for line in skipped:
        click.echo(f"note: {line}", err=True)
    for _, where, why, _ in rest:
        click.echo(f"note: {where}: kept as it was recorded: {why}", err=True)
    also = f", {len(rest)} kept as recorded" if rest else ""
    click.echo(f"{output}: {len(items)} items, {cases} cases for {len(rows)} recorded launches{also}")


def _rows(loaded: list[Recording], folder: Path) -> tuple[list[Any], list[tuple[RecordedLaunch, str, str, Path]]]:
    """Return the launches that can be written out, and those that cannot with the reason."""
    from tcache._triton.kernels import is_kernel, jit_of
    from tcache.errors import ManifestError, TcacheError
    from tcache.generalize import flatten
    from tcache.replay.ref import KernelRef, load

    rows, rest = [], []
    for recording in loaded:
        for where, launch in recording.launches:
            if launch.problem is not None:
                continue
            try:
                kernel = load(KernelRef.parse(launch.kernel), recording.path.parent)
            except TcacheError as error:
                raise ManifestError(where, error.message, error.hint) from error
            if not is_kernel(kernel):
                raise ManifestError(where, f"{launch.kernel} is no Triton kernel", "record again: the program changed")
            moved = _moved_launch(launch, recording.path.parent, folder)
            row = flatten(moved, list(jit_of(kernel).arg_names))
            if isinstance(row, str):
                rest.append((moved, where, f"the manifest's language has no words for {row}", recording.path.parent))
            else:
                rows.append(row)
    return rows, rest


def _moved(ref: str, there: Path, here: Path) -> str:
    """Return a ref whose path is relative to another directory."""
    module, _, attribute = ref.rpartition(":")
    if not module.endswith(".py"):
        return ref
    return f"{Path(os.path.relpath((there / module).resolve(), here.resolve())).as_posix()}:{attribute}"


def _moved_launch(launch: RecordedLaunch, there: Path, here: Path) -> RecordedLaunch:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        refs = ("function", "enum", "named", "sequence", "dataclass")
        return {name: _moved(item, there, here) if name in refs and isinstance(item, str) else moved(item)
                for name, item in value.items()}  # fmt: skip

    kernel = _moved(launch.kernel, there, here)
    return launch.model_copy(update={"kernel": kernel, "args": moved(launch.args), "kwargs": moved(launch.kwargs)})


def _write_rest(rest: list[tuple[RecordedLaunch, str, str, Path]], output: Path) -> list[str]:
    """Write what the language has no words for beside the manifest, as a recording."""
    from tcache._fs import atomic_write
    from tcache.rows import text_of

    if not rest:
        return []
    name = f"{output.name.removesuffix('.yaml')}.rest.launches.json"
    lines = [text_of(launch.model_dump(by_alias=True, exclude_none=True)) for launch, *_ in rest]
    atomic_write(output.parent / name, "".join(line + "\n" for line in sorted(lines)).encode())
    return [name]


def _yaml(items: list[Item], gpus: list[str], recordings: list[str]) -> str:
    from tcache.manifest.edit import flow

    lines = ["version: 1", *([f"gpus: {flow(gpus)}"] if gpus else []), "kernels:"]
    for item in items:
        lines.append(f"  - kernel: {flow(item.kernel)}")
        lines += [f"    # {note}" for note in item.notes]
        lines.append("    args:")
        lines += [f"      {flow(name)}: {flow(spec)}" for name, spec in item.args.items()]
        lines.append(f"    grid: {flow(item.grid)}")
        lines.append("    cases:")
        lines += [f"      - {flow(case)}" for case in item.cases]
    lines += [f"  - launches: {flow(name)}" for name in recordings]
    return "\n".join(lines) + "\n"


def _count(item: Item) -> int:
    total = 0
    for case in item.cases:
        size = 1
        for value in case.values():
            size *= len(value) if isinstance(value, list) else 1
        total += size
    return total
