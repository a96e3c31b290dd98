"""The command line: parse, call, print. Heavy imports stand inside the bodies."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
from typing import Any

import click

from tcache import __version__
from tcache.errors import TcacheError

__all__ = ["main"]

_COMMANDS = {
    "tune": "Benchmark a manifest's launches on this GPU and store the best configs.",
    "record": "Run a program and record every Triton launch it makes, for a manifest.",
    "manifest": "Check shape manifests, make them from recordings, print their JSON Schema.",
    "warmup": "Compile the winners of a manifest into the Triton cache; needs no GPU.",
    "resolve": "Print the entry of every launch, present or not; compiles nothing.",
    "pack": "Copy what a manifest references into a bundle, and nothing else.",
    "diff": "Show what changed between two bundles.",
    "gpus": "Print the GPUs known by name, with target, sizes and sources.",
    "bench": "Measure a manifest's kernels on this GPU against torch and the GPU's own limits.",
    "verify": "Prove in a fresh, frozen process that every launch of a bundle hits.",
}


class _Lazy(click.Group):
    """Imports a command's module when the command runs; ``--help`` needs only the one-liners above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tcache.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TcacheError as error:
            _refuse(error)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(130) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Be the program, if no arguments are given: those of the process count, and the process ends here."""
        if args or "args" in kwargs:
            return super().__call__(*args, **kwargs)
        with contextlib.suppress(Exception):  # no standard error to write to
            faulthandler.enable()  # a replay runs the user's code: where it crashes, its line is shown
        try:
            return super().__call__(**kwargs)
        except SystemExit as end:
            if "torch" in sys.modules and (end.code is None or isinstance(end.code, int)):
                _leave(end.code or 0)
            raise

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"{error.message.rstrip('.')}.{hint}", ctx) from None


def _leave(code: int) -> None:
    """End the process without taking it apart: torch's part of that takes half a second and 130 MB.

    What is registered with ``atexit`` is run and what was printed is written. Where that fails, or another thread is to
    be waited for, the process is left to end as any other.
    """
    import atexit
    import threading

    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if any(not thread.daemon for thread in others):
        return
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or whoever read it has gone
        return
    os._exit(code)


def _refuse(error: TcacheError) -> None:
    """Print one message and one tip, and exit with the error's code. With --json, as JSON on standard output."""
    details = getattr(error, "details", ())
    if "--json" in sys.argv[1:] or os.environ.get("TCACHE_JSON", "") not in ("", "0"):
        more = {"details": list(details)} if details else {}
        click.echo(json.dumps({"version": 1, "error": error.message, "hint": error.hint, **more}))
    click.echo("\n".join([f"error: {error.message}", *(f"  {line}" for line in details)]), err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
    raise SystemExit(error.exit_code)


_HELP = """Prebaked Triton kernels: zero JIT, zero tuning, zero compiler in production, proven before you ship.

\b
tcache tune MANIFEST       on the GPU, once: best configs, JSON in git
tcache warmup MANIFEST     no GPU: the winners, compiled
tcache pack MANIFEST -o B  only what is referenced
tcache verify B            exit 0: production will hit
"""


@click.group(
    cls=_Lazy,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TCACHE", "max_content_width": 100},
    epilog="Exit codes: 0 success; 1 an honest negative (misses, failed compiles); 2 bad input; 130 interrupted.",
)
@click.version_option(__version__, prog_name="tcache", allow_from_autoenv=False)
def main() -> None:
    """See :data:`_HELP`, which click shows: in it a backspace keeps lines as they are."""
