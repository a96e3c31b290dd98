"""Triton kernels tuned for NVIDIA H200, each with a Python wrapper, a torch reference, and its FLOPs and least bytes.

In this repository's manifests they are named by path (``call: ../kernels/softmax.py:softmax``). A service installs them
as the package ``tcache_kernels``, of the distribution ``triton-tcache-kernels`` (``pip install ./kernels``, or
``pip install "git+https://…#subdirectory=kernels"``)::

    import tcache
    from tcache_kernels import rmsnorm, softmax

    tcache.activate(bundles=["/opt/bundle"], mode="frozen")

A bundle packed here hits there: best configs and packed binaries are found by a kernel's name and source, not by the
module it is imported from. Nothing is called ``kernels`` when it is installed, because a package of that name on PyPI is
another project.

Arguments that a wrapper does not take are refused before a launch, by name: TypeError for what is no tensor, number or
flag where one is expected, ValueError for dtypes, shapes, devices, layouts and sizes. Tensors that torch negates lazily
are read as what they are, at the price of a copy, and refused where they would be written.

Gradients: of ``attention``, ``layernorm``, ``rmsnorm`` and ``SparseConv.apply``, once: what is to be differentiated twice
is refused when it is. The other wrappers compute forward only: what they return is detached from autograd's graph, and
they warn where an argument requires a gradient.

Wrappers are imported when they are first asked for. What a wrapper's module has besides (its kernels, ``softmax_flops``)
comes from the module: ``from tcache_kernels.softmax import softmax_kernel``. In the package itself, a name that both a
wrapper and its module have is always the wrapper.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__version__ = "0.1.0"

WRAPPERS = {
    "attention": ("attention",),
    "attention_backward": ("attention_backward",),
    "attention_forward": ("attention_forward",),
    "decode_attention": ("decode_attention",),
    "dequant_matmul": ("dequant_matmul",),
    "elementwise": ("affine_relu", "affine_relu_"),
    "grouped_gemm": ("grouped_gemm",),
    "layernorm": ("layernorm", "layernorm_backward", "layernorm_forward"),
    "linear": ("linear",),
    "matmul": ("matmul",),
    "matmul_decode": ("matmul_decode",),
    "matmul_persistent": ("matmul_persistent",),
    "moe": ("align", "route"),
    "moe_mlp": ("moe_mlp",),
    "moe_rows": ("combine", "gather", "silu_gate"),
    "quantize": ("dequantize", "quantize_fp8", "quantize_int8"),
    "rmsnorm": ("rmsnorm", "rmsnorm_backward", "rmsnorm_forward"),
    "softmax": ("softmax",),
    "sparse_conv": ("sparse_conv",),
    "sparse_conv_backward": ("sparse_conv_features_gradient", "sparse_conv_weight_gradient"),
    "vector_add": ("axpy",),
    "voxels": ("fill_map", "neighbour_map", "sort_rows"),
}
"""Module -> the wrappers it has."""

FUNCTIONS = {"sparse_conv_backward": ("SparseConv",)}
"""Module -> the functions of autograd that it has, used by ``apply``."""

_MODULE_OF = {name: module for table in (WRAPPERS, FUNCTIONS) for module, names in table.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - the table says it


def __getattr__(name: str):
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing ``softmax.py`` sets the package's ``softmax``: to the wrapper, whichever of the two is asked for first."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _MODULE_OF and hasattr(value, name):
            value = getattr(value, name)
        super().__setattr__(name, value)


if __name__ in sys.modules:
    sys.modules[__name__].__class__ = _Package
