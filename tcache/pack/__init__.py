"""Ship only what is referenced: choose the members, then write them as a directory, a wheel, an image or a cache."""

from tcache.pack.captured import captured_entries
from tcache.pack.contents import Contents, Packed, collect
from tcache.pack.directory import write_directory
from tcache.pack.members import IR, missing_entries
from tcache.pack.native import write_native
from tcache.pack.oci import write_oci
from tcache.pack.plan import Plan, plan
from tcache.pack.wheel import write_wheel

__all__ = [
    "IR",
    "Contents",
    "Packed",
    "Plan",
    "captured_entries",
    "collect",
    "missing_entries",
    "plan",
    "write_directory",
    "write_native",
    "write_oci",
    "write_wheel",
]
