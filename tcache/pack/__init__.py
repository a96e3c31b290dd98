"""Ship only what is referenced."""

from tcache.pack.directory import Packed, pack_directory
from tcache.pack.members import IR, missing_entries

__all__ = ["IR", "Packed", "missing_entries", "pack_directory"]
