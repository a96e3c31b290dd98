"""``python -m tcache``."""

from tcache.cli import main

main(prog_name="tcache")
