"""Which ptxas compiles, for the reader of a bundle; Triton's own key covers it."""

from __future__ import annotations

__all__ = ["ptxas_release"]


def ptxas_release(arch: int | str) -> str | None:
    """Return the release of the ptxas that compiles for ``arch``, None for AMD.

    Source: ``get_ptxas`` in ``triton/backends/nvidia/compiler.py``.
    """
    if not isinstance(arch, int):
        return None
    from triton.backends.nvidia.compiler import get_ptxas  # since Triton 3.9 the newer one compiles for sm_90, too

    return str(get_ptxas(arch).version)
