"""``tcache manifest``: work on shape manifests."""

from __future__ import annotations

import click

from tcache.cli.manifest_generalize import command as generalize


@click.group("manifest")
def command() -> None:
    """Work on shape manifests."""


command.add_command(generalize)
