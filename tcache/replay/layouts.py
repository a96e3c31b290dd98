"""Operations whose results a GPU's kernels lay out in another way than torch's meta functions do.

A kernel that is launched with such a result is specialized on its strides. Attention goes to one of several kernels,
which write heads next to each other or as the queries are; the one that torch would choose is chosen here, and its own
meta function asked. Convolutions are channels-last where their input or weight is.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``…/transformers/attention.cpp`` and
``cudnn_conv_suggest_memory_format`` in ``aten/src/ATen/native/ConvUtils.h``. What an H200 answered for these and 150
other operations under torch 2.11 is in ``tests/unit/gpu_layouts.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LAID_OUT", "Attention", "Machine", "along_ones"]


@dataclass(frozen=True)
class Machine:
    """What of a GPU and of torch decides which attention kernel is taken.

    Attributes:
        hip: an AMD GPU.
        capability: compute capability, as ``torch.cuda.get_device_capability`` has it.
        release: torch's, such as ``(2, 11)``.
        enabled: kinds of kernels that ``torch.nn.attention.sdpa_kernel`` or flags leave on.
    """

    hip: bool
    capability: tuple[int, int]
    release: tuple[int, int]
    enabled: frozenset[str] = frozenset({"cudnn", "flash", "efficient", "math"})


@dataclass(frozen=True)
class Attention:
    """What of a call of ``scaled_dot_product_attention`` decides that.

    Attributes:
        dtype: torch's name of the element type.
        dims: dimensions of the queries.
        plain: sizes and types fit together without broadcasting, no size is 0, heads' elements lie side by side. What
            torch refuses is not plain: the math kernel's way leads through its checks.
        grouped: several query heads share a key head.
        mask: there is a mask; ``learnt``, one that requires a gradient.
        width, value_width: head dimensions of queries and keys, and of values.
    """

    dtype: str
    dims: int
    plain: bool
    grouped: bool
    mask: bool
    learnt: bool
    width: int
    value_width: int

    def kernel(self, machine: Machine) -> str:
        """Return ``cudnn``, ``flash``, ``efficient`` or ``math``: the first in torch's order that can do it."""
        if self.dims != 4 or not self.plain or self.dtype not in ("float16", "bfloat16", "float32"):
            return "math"
        half = self.dtype != "float32"
        ampere = machine.hip or machine.capability >= (8, 0)
        same = self.width == self.value_width and self.width <= 256
        able = {
            "cudnn": half and same and self.width % 8 == 0 and not self.learnt and _prefers_cudnn(machine),
            "flash": half and same and not self.mask and ampere,
            "efficient": (ampere or self.dtype != "bfloat16")
            and not (self.grouped and machine.release < (2, 14))
            and not (self.width % (8 if half else 4) or self.value_width % (8 if half else 4)),
        }
        return next((name for name, can in able.items() if can and name in machine.enabled), "math")


def _prefers_cudnn(machine: Machine) -> bool:
    """Return whether cuDNN comes first: since torch 2.11, whose builds have one newer than 9.15, on these two kinds."""
    return not machine.hip and machine.capability in ((9, 0), (10, 0)) and machine.release >= (2, 11)


def _here() -> Machine:
    """Return the machine that ``torch.cuda`` answers for: inside a replay that of the replay."""
    flags = torch.backends.cuda
    enabled = {
        "cudnn": flags.cudnn_sdp_enabled(), "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(), "math": flags.math_sdp_enabled(),
    }  # fmt: skip
    major, minor = torch.__version__.split(".")[:2]
    return Machine(
        bool(torch.version.hip), torch.cuda.get_device_capability(), (int(major), int(minor)),
        frozenset(name for name, on in enabled.items() if on),
    )  # fmt: skip


def _attention(operator: Any) -> Callable[..., Any]:
    """``scaled_dot_product_attention`` as the kernel of a GPU would lay it out."""

    def call(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        kernel = _described(query, key, value, attn_mask, grouped=enable_gqa).kernel(_here())
        given, rest = (query, key, value), (dropout_p, is_causal)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        kept = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*given, bias))
        width = query.shape[-1]
        if kernel == "math" or (is_causal and attn_mask is not None):
            return operator(*given, attn_mask, *rest, scale=scale, enable_gqa=enable_gqa)
        if kernel == "efficient":
            return _ATEN._scaled_dot_product_efficient_attention(*given, bias, kept, *rest, scale=scale)[0]
        if kernel == "cudnn":
            made = _ATEN._scaled_dot_product_cudnn_attention(*given, bias, kept, *rest, False, scale=scale)[0]  # noqa: FBT003
        elif width % 8:
            padded = [torch.constant_pad_nd(x, [0, -width % 8]) for x in given]
            return _ATEN._scaled_dot_product_flash_attention(*padded, *rest, scale=scale)[0][..., :width]
        else:
            made = _ATEN._scaled_dot_product_flash_attention(*given, *rest, scale=scale)[0]
        return along_ones(made, query)

    return call


_ATEN = torch.ops.aten


def along_ones(made: Any, like: Any) -> Any:
    """Give a tensor the strides of another along sizes of 1, where meta functions invent them."""
    apart = [(size, a, b) for size, a, b in zip(made.shape, made.stride(), like.stride(), strict=True) if a != b]
    return made.as_strided(made.shape, like.stride()) if apart and all(size == 1 for size, *_ in apart) else made


def _described(query: Any, key: Any, value: Any, mask: Any, *, grouped: bool) -> Attention:
    tensors = (query, key, value)
    plain = query.dim() == 4 and all(x.dim() == 4 and x.is_meta and x.stride(-1) == 1 and x.numel() for x in tensors)
    if plain:
        alike = len({(x.shape[0], x.dtype) for x in tensors}) == 1 and query.shape[-1] == key.shape[-1]
        shared = query.shape[1] != key.shape[1]
        plain = alike and key.shape[1:3] == value.shape[1:3] and (grouped or not shared)
        grouped = shared
    learnt = mask is not None and torch.is_grad_enabled() and mask.requires_grad
    name = str(query.dtype).removeprefix("torch.")
    return Attention(name, query.dim(), plain, grouped, mask is not None, learnt, query.shape[-1], value.shape[-1])


def _bias(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask as what is added to the scores, for every batch and head."""
    bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
    return bias.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _channels_last(x: Any) -> bool:
    """Return whether torch takes a tensor for a channels-last one. Source: ``is_channels_last_strides_2d`` of c10."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(x.dim())
    if order is None or x.stride(1) == 0:
        return False
    least = 0
    for dim in order:
        size, stride = x.shape[dim], x.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == x.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def _as_channels_last(x: Any) -> Any:
    wanted = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    strides = torch.empty(x.shape, device="meta", memory_format=wanted).stride()
    made = x.contiguous(memory_format=wanted)
    return made if made.stride() == strides else made.as_strided(x.shape, strides)  # they differ along sizes of 1


def _convolves_channels_last(x: Any, weight: Any) -> bool:
    return bool(
        x.is_meta
        and not torch.version.hip
        and torch.float64 not in (x.dtype, weight.dtype)
        and (_channels_last(x) or _channels_last(weight))
    )


def _convolution(operator: Any) -> Callable[..., Any]:
    """A convolution, by cuDNN or by torch's own kernels for depthwise ones: alike in this."""

    def call(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        result = operator(x, weight, *args, **kwargs)
        return _as_channels_last(result) if _convolves_channels_last(x, weight) else result

    return call


def _convolution_backward(operator: Any) -> Callable[..., Any]:
    def call(gradient: Any, x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        *results, bias = operator(gradient, x, weight, *args, **kwargs)
        if _convolves_channels_last(x, weight):
            results = [None if result is None else _as_channels_last(result) for result in results]
        return (*results, bias)

    return call


def _contiguous(operator: Any) -> Callable[..., Any]:
    """What a GPU does by permuting and copying, where the CPU and the meta function keep the input's order."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        result = operator(x, *args, **kwargs)
        return result.contiguous() if x.is_meta else result

    return call


LAID_OUT: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        (
            "conv2d", "conv3d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "_convolution",
            "_convolution.deprecated",
        ),
        _convolution,
    ),
    "convolution_backward": _convolution_backward,
    "pixel_unshuffle": _contiguous,
}  # fmt: skip
"""ATen's operator (name, or name.overload) -> what makes of it one that lays out its result as a GPU's kernel does."""
