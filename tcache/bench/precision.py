"""In what torch multiplies float32 on a GPU: the program's setting, on which no peak and no reference may depend."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["float32_products"]


@contextlib.contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Let torch's matmuls multiply float32 in TF32, or in float32, inside the block.

    Containers and programs set it for speed (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE``, ``set_float32_matmul_precision``).
    The older of torch's two settings sets both, and that of the CPU; the newer one alone makes whatever reads the older
    raise, and so does an older one that was not put back as it was.

    Args:
        tf32: 10 bits of mantissa instead of 23.
    """
    import torch

    places = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    newer = [place.fp32_precision for place in places]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the newer one alone
        older = "highest"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for place, value in zip(places, newer, strict=True):
            place.fp32_precision = value
