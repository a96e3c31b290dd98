"""``torch.autocast("cuda")`` for ghosts.

torch's autocast casts tensors that are on a CUDA device; ghosts are meta tensors underneath, so its kernels let them
pass. Here the same operators get kernels under a dispatch key that no real device uses (``AutocastPrivateUse1``),
switched on for the replay. They sit where torch's own sit, above autograd and above composite operators, so that a
loss written in terms of ``log_softmax`` is cast as on a GPU.

Source of the lists and policies: ``aten/src/ATen/autocast_mode.h`` (``AT_FORALL_*``, ``enum class CastPolicy``) and
https://pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float16. Only operators for which the installed
torch has a CUDA autocast kernel are taken.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from tcache.replay.layouts import LAID_OUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["AUTOCAST", "POLICIES", "autocast_for_ghosts"]

POLICIES: dict[str, str] = {
    "lower": """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    "fp32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    "fp32 unless dtype": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    "fp32 result": "norm.Scalar norm.ScalarOpt_dim",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}
"""Operators of ATen (name, or name.overload) by what autocast does with their arguments."""

_APPENDED = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
AUTOCAST = torch._C.DispatchKey.AutocastPrivateUse1


def _eligible(value: Any) -> bool:
    """Return whether autocast would cast it: a floating tensor on the GPU, but no float64."""
    if not isinstance(value, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return bool(value.is_meta and value.is_floating_point() and value.dtype != torch.float64)


def _cast(value: Any, dtype: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _eligible(value) else value


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _lower(operator: Any, args: Any, kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cuda")
    return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _fp32(operator: Any, args: Any, kwargs: Any) -> Any:
    dtype = torch.float32
    return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _fp32_unless(operator: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _eligible(args[0]) and given.get("dtype") is None:
        place = names.index("dtype")
        args, kwargs = (*args[:place],), {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


def _fp32_result(operator: Any, args: Any, kwargs: Any) -> Any:
    name = f"norm.{operator._overloadname}"
    wider = getattr(torch.ops.aten.norm, _APPENDED[name])
    names = [argument.name for argument in operator._schema.arguments]
    given = {
        argument.name: argument.default_value for argument in operator._schema.arguments if argument.has_default_value()
    }
    given |= dict(zip(names, args, strict=False)) | kwargs
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    return wider(*[given[name] for name in names], dtype=dtype)


def _widest(operator: Any, args: Any, kwargs: Any) -> Any:
    tensors = [value for value in _flat([*args, *kwargs.values()]) if _eligible(value)]
    wide = any(tensor.dtype == torch.float32 for tensor in tensors)
    dtype = torch.float32 if wide else torch.get_autocast_dtype("cuda")
    return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _banned(operator: Any, _args: Any, _kwargs: Any) -> Any:
    raise RuntimeError(
        f"{operator._schema.name} is unsafe to autocast: on a GPU torch refuses it as well; "
        "use binary_cross_entropy_with_logits"
    )


_APPLY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "lower": _lower,
    "fp32": _fp32,
    "fp32 unless dtype": _fp32_unless,
    "fp32 result": _fp32_result,
    "widest": _widest,
    "banned": _banned,
}


def _kernel(operator: Any, apply: Callable[[Any, Any, Any], Any] | None) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(AUTOCAST)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # a backward runs inside the mode, where ghosts say that they are on a GPU
        with torch._C._ExcludeDispatchKeyGuard(keys), torch._C.DisableTorchFunction():
            if apply is None or not torch.is_autocast_enabled("cuda"):
                return operator(*args, **kwargs)
            return apply(operator, args, kwargs)

    return kernel


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what replaces an operator: it casts as autocast does, and lays out its result as a GPU does."""
    policies = {full: policy for policy, text in POLICIES.items() for full in text.split()}
    for full in {**policies, **LAID_OUT}:
        name, _, overload = full.partition(".")
        autocast = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "AutocastCUDA")
        apply = _APPLY[policies[full]] if autocast and full in policies else None
        if apply is not None or full in LAID_OUT:
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            yield full, _kernel(LAID_OUT[full](operator) if full in LAID_OUT else operator, apply)


@contextlib.contextmanager
def autocast_for_ghosts() -> Iterator[None]:
    """Make ``torch.autocast("cuda")`` cast ghosts inside the block, in this thread."""
    rest = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL")
    for full, kernel in _kernels():
        library.impl(full, kernel, "AutocastPrivateUse1")
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOCAST)
    included = torch._C._dispatch_tls_is_dispatch_key_included(AUTOCAST)
    torch._C._dispatch_tls_set_dispatch_key_excluded(AUTOCAST, False)  # noqa: FBT003
    torch._C._dispatch_tls_set_dispatch_key_included(AUTOCAST, True)  # noqa: FBT003
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(AUTOCAST, included)
        torch._C._dispatch_tls_set_dispatch_key_excluded(AUTOCAST, excluded)
        library._destroy()
        rest._destroy()
