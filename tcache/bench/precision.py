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
    The older of torch's two settings sets both; the newer one alone makes whatever reads the older raise.

    Args:
        tf32: 10 bits of mantissa instead of 23.
    """
    import torch

    settings = torch.backends.cuda.matmul
    newer = settings.fp32_precision
    try:
        older = settings.allow_tf32
    except RuntimeError:  # the program has set the newer one alone
        older = False
    settings.allow_tf32 = tf32
    try:
        yield
    finally:
        settings.allow_tf32 = older
        settings.fp32_precision = newer
