"""``tcache record``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcache.cli.options import json_option
from tcache.cli.output import print_json

if TYPE_CHECKING:
    from types import FrameType

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGWINCH", "SIGCONT")


@click.command("record", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path, dir_okay=False), show_envvar=True,
              help="Recording to append to, such as serve.launches.json.")  # fmt: skip
@click.option("--counts", is_flag=True, show_envvar=True, help="Also record how often each launch was made.")
@json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENT]...")
def command(output: Path, counts: bool, as_json: bool, program: tuple[str, ...]) -> None:
    """Run COMMAND and record every Triton launch that it and its child processes make. Exits as COMMAND does; what was
    recorded so far is in the file at any time.
    """
    from tcache.errors import UsageError
    from tcache.rows import Appender, compact

    output = output.absolute()
    Appender(output).close()  # refused before the program runs
    site = Path(__file__).parent.parent / "_site"
    environment = dict(os.environ)
    environment["TCACHE_RECORD"] = str(output)
    environment["TCACHE_RECORD_COUNTS"] = "1" if counts else "0"
    search = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{search}" if search else str(site)
    try:
        child = subprocess.Popen(program, env=environment)
    except OSError as error:
        raise UsageError(f"{program[0]}: cannot be run: {error.strerror}", "give a command after --") from error
    code = _wait(child)
    launches = compact(output)
    _report(output, launches, as_json)
    if code < 0:  # ended by a signal: as a shell says it
        raise SystemExit(128 - code)
    raise SystemExit(code)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the program, handing signals on; an interrupt reaches it from the terminal by itself."""

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    before: dict[int, Any] = {}
    for name in _FORWARDED:
        number = getattr(signal, name, None)
        if number is not None:
            before[number] = signal.signal(number, forward)
    before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt(child))
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(child: subprocess.Popen[bytes]) -> Any:
    def forward(number: int, _frame: FrameType | None) -> None:
        # of one process group with the terminal, the child has it already
        if not sys.stdin.isatty():
            child.send_signal(number)

    return forward


def _report(output: Path, launches: int, as_json: bool) -> None:
    from tcache.manifest.launches import load_recording

    problems = load_recording(output).unreplayable() if launches else []
    if as_json:
        print_json({"output": str(output), "launches": launches, "unreplayable": problems})
        return
    for line in problems:
        click.echo(f"note: {line}", err=True)
    if not launches:
        click.echo(
            f"tcache: no launch was recorded in {output}\nhint: the program launched no Triton kernel, or ran Python "
            "with -I, -E or -S, or without tcache installed: then use `with tcache.record(path):` in it",
            err=True,
        )
    else:
        click.echo(f"tcache: {output}: {launches} launches, {len(problems)} of them cannot be replayed", err=True)
