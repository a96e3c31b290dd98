"""Which ptxas compiles, for the reader of a bundle; Triton's own key covers it."""

from __future__ import annotations

from triton import knobs

__all__ = ["ptxas_release"]


def ptxas_release(arch: int | str) -> str | None:
    """Return the release of the ptxas that compiles for ``arch``, None for AMD.

    Source: ``get_ptxas`` in ``triton/backends/nvidia/compiler.py``.
    """
    if not isinstance(arch, int):
        return None
    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    return str(tool.version)
