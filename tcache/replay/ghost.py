"""Ghost tensors: they claim to live on a GPU, need neither one nor memory, and keep shape, stride and dtype.

A ghost is a plain meta tensor; what makes it a ghost is a mode. Inside :class:`GhostMode` every meta tensor answers
``device``, ``is_cuda`` and the like for the GPU, whatever says ``cuda`` makes meta tensors, and code that needs values
gets an error at its line. Since ghosts are of torch's own class, parameters, autograd and custom functions work as
they are. A ghost elsewhere than on the first GPU (brought to the CPU, or made on ``cuda:1`` or ``meta``) carries a
mark.

A meta view's ``data_ptr()`` is its storage offset in bytes, so alignment comes out right, inside the mode and out.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._device import _device_constructors

from tcache.replay.known import LIKE, as_ghosts, keep_all, sizes_known, values_of
from tcache.replay.layouts import along_ones
from tcache.replay.operators import is_operator, prepare
from tcache.replay.place import CPU, FIRST, below, default_device, flat, mark, place_of, resolve
from tcache.replay.values import LIMIT, ValueUnknown, keep, known, reads_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GhostMode", "ghost", "hooks_in_mode", "inside_mode"]

_LARGE = 16 << 20
"""Bytes from which a CPU tensor of arbitrary content (empty, random) is a ghost too: initial weights of a model."""


class GhostMode(TorchFunctionMode):  # type: ignore[misc]  # untyped here
    """Inside this mode meta tensors are on the GPU, and tensors made on the GPU are meta tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        handler = _SPECIAL.get(func)
        if handler is not None:
            return handler(func, args, named)
        return _operator(func, args, named) if is_operator(func) else _call(func, args, named)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what is no special case: devices replaced, results marked, values carried along."""
    wanted = _wanted(func, kwargs)
    if wanted == CPU and func in _ARBITRARY and "out" not in kwargs:
        large = _large(func, args, kwargs)
        if large is not None:
            return large
    inputs = [value for value in flat((args, kwargs)) if isinstance(value, torch.Tensor)]
    ghosts = [value for value in inputs if value.is_meta]
    if wanted is not None:
        kwargs["device"] = below(wanted)
    if ghosts or wanted not in (None, CPU):
        kwargs.pop("generator", None)
    kwargs.pop("pin_memory", None)
    values = values_of(func, args, kwargs, inputs, wanted) if ghosts or wanted is not None else None
    try:
        result = func(*args, **kwargs)
    except ValueUnknown:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if not ghosts or not reads_values(error, resolve_name(func) or str(func)):
            raise
        return _with_numbers(func, args, kwargs, error) if values is None else as_ghosts(values)
    if func in _PRESERVING and result.is_meta and result.shape == inputs[0].shape:
        result = _strides_of(inputs[0], result, kwargs.get("memory_format"))
    places = {wanted} if wanted is not None else {place_of(value) for value in ghosts}
    if places and (wanted is not None or places != {FIRST}):
        mark(result, places.pop() if len(places) == 1 else FIRST)
    if values is not None:
        keep_all(result, values)
    return result


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Call what failed because it needs values once more, with numbers for the tensors that are known ones (sizes)."""
    stated = sizes_known((args, tuple(kwargs.values())))
    if all(one is two for one, two in zip(flat(stated), flat((args, kwargs)), strict=True)):
        raise ValueUnknown(_name(func)) from error
    return _call(func, stated[0], dict(zip(kwargs, stated[1], strict=True)))


def _operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of ``torch.ops``: what Python implements for a GPU launches kernels, and their results are unknown."""
    places = [place_of(value) for value in flat((args, kwargs)) if isinstance(value, torch.Tensor) and value.is_meta]
    call = prepare(func, inside_mode) if any(place.type == "cuda" for place in places) else None
    return _call(func, args, kwargs) if call is None else call(*args, **kwargs)


def _wanted(func: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return where a call says that its result shall be, None where it says nothing."""
    said = kwargs.get("device")
    if said is None and func in _device_constructors():
        said = default_device()
        if said == CPU and func not in _ARBITRARY:
            return None
    found = None if said is None else resolve(said)
    # autograd's engine runs inside the mode, and with it torch's kernels for meta tensors, who mean the ghosts' place
    return FIRST if found is not None and found.type == "meta" and _by_torch() else found


def _by_torch() -> bool:
    """Return whether it is torch's Python for meta tensors that called a function, not the program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("tcache.", "torch.overrides")):
        frame = frame.f_back
    meta = ("torch._meta_registrations", "torch._refs", "torch._prims", "torch._decomp")
    return str(frame.f_globals.get("__name__")).startswith(meta)


def _name(func: Any) -> str:
    """Return an operation as a user would write it: ``.item()``, ``torch.unique()``."""
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    return f"{name.removeprefix('torch.Tensor').removesuffix('.__get__')}()"


def _large(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a marked ghost in place of a large CPU tensor whose content is arbitrary, None for a small one."""
    named = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    made = func(*args, **{**named, "device": "meta"})
    if made.nbytes < _LARGE:
        return None
    mark(made, CPU)
    return made


def _strides_of(source: Any, made: Any, memory_format: Any) -> Any:
    """Give a tensor made like another its strides, also along sizes of 1."""
    if memory_format not in (None, torch.preserve_format):
        return made
    with torch.no_grad():
        found = along_ones(made.detach(), source)
    return made if found.stride() == made.stride() else found.requires_grad_(made.requires_grad)


def _move(x: Any, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.to(device, …)``: to the GPU it becomes a ghost, from it a ghost marked as being on the CPU."""
    wanted, now = resolve(device), place_of(x)
    kwargs.pop("device", None)
    if not x.is_meta and below(wanted) == now:
        return x.to(wanted, *args, **kwargs)
    if x.is_meta and wanted == now:
        return _call(torch.Tensor.to, (x, *args), kwargs) if args or kwargs else x
    values = known(x) if x.is_meta else (x if x.numel() <= LIMIT else None)
    if x.is_meta and wanted.type == "cpu" and values is not None:
        return values.to(*args, **{**kwargs, "copy": True})
    if x.is_meta:
        kwargs["copy"] = True
    moved = x.to("meta", *args, **kwargs)
    mark(moved, wanted)
    if values is not None and wanted.type != "meta":
        keep(moved, values.detach().clone().to(moved.dtype))
    return moved


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    other = rest[0] if rest and isinstance(rest[0], torch.Tensor) else kwargs.pop("other", None)
    if other is not None:
        return _move(x, place_of(other), (other.dtype, *rest[1:]), kwargs)
    if rest and isinstance(rest[0], (str, int, torch.device)) and not isinstance(rest[0], bool):
        return _move(x, rest[0], tuple(rest[1:]), kwargs)
    if kwargs.get("device") is not None:
        return _move(x, kwargs["device"], tuple(rest), kwargs)
    return _call(func, args, kwargs)


def _cuda(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    device = kwargs.pop("device", rest.pop(0) if rest else None)
    return _move(x, "cuda" if device is None else device, (), kwargs)


def _as_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], torch.Tensor):
        x = args[0] if kwargs.get("dtype") is None else _call(torch.Tensor.to, (args[0], kwargs["dtype"]), {})
        return x if kwargs.get("device") is None else _move(x, kwargs["device"], (), {})
    return _call(func, args, kwargs)


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation whose result is values: answered where they are known, refused where they are not."""
    x = args[0]
    if not isinstance(x, torch.Tensor) or not x.is_meta:
        return func(*args, **kwargs)
    values = known(x)
    if values is None:
        raise ValueUnknown(_name(func))
    return func(values, *args[1:], **kwargs)


def _accumulate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``addmm`` and ``baddbmm`` with a dtype of the result, which torch takes for a factor where tensors are meta.

    Source: ``addmm`` in ``torch/_decomp/decompositions.py`` up to 2.11, ``baddbmm`` there up to 2.13: overloads with
    ``out_dtype`` have no formula of their own.
    """
    names = (
        ("input", "mat1", "mat2", "out_dtype") if func is torch.addmm else ("input", "batch1", "batch2", "out_dtype")
    )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dtype, (x, left, right) = given.get("out_dtype"), (given.get(name) for name in names[:3])
    if not isinstance(dtype, torch.dtype) or not all(isinstance(one, torch.Tensor) for one in (x, left, right)):
        return _call(func, args, kwargs)
    product = _call(torch.mm if func is torch.addmm else torch.bmm, (left, right), {"out_dtype": dtype})
    total = _call(torch.add, (product, x), {})
    return total if given.get("out") is None else _call(torch.Tensor.copy_, (given["out"], total), {})


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, value = args
    if x.is_meta == value.is_meta:
        return _call(func, args, kwargs)
    # across devices torch swaps what is below on a GPU; between a CPU tensor and a meta tensor it refuses to
    made = value.detach().requires_grad_(x.requires_grad)
    torch.utils.swap_tensors(
        x, torch.nn.Parameter(made, x.requires_grad) if isinstance(x, torch.nn.Parameter) else made
    )
    return None


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the engine inside the mode: a custom function's ``backward`` is the user's code."""
    if func is torch.Tensor.backward and len(args) == 1 and kwargs.get("gradient") is None and args[0].numel() == 1:
        seed = torch.ones((), dtype=args[0].dtype).expand_as(torch.empty(args[0].shape))
        kwargs["gradient"] = _move(seed, place_of(args[0]), (), {})  # its value is known, as on a GPU it would be
    engine = torch.autograd._engine_run_backward
    torch.autograd._engine_run_backward = inside_mode(engine)
    try:
        return func(*args, **kwargs)
    finally:
        torch.autograd._engine_run_backward = engine


def inside_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs inside the mode, whoever calls it: torch leaves a mode while it works for it."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        within = any(isinstance(mode, GhostMode) for mode in torch.overrides._get_current_function_mode_stack())
        # what casts as autocast does calls torch with modes switched off
        with torch._C._EnableTorchFunction(), contextlib.nullcontext() if within else GhostMode():
            return function(*args, **kwargs)

    return inside


@contextlib.contextmanager
def hooks_in_mode() -> Iterator[None]:
    """Let hooks on saved tensors (activation checkpointing, offloading) see ghosts inside the block."""
    push = torch._C._autograd._push_saved_tensors_default_hooks
    torch._C._autograd._push_saved_tensors_default_hooks = lambda pack, unpack: push(
        inside_mode(pack), inside_mode(unpack)
    )
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks = push


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``repeat_interleave`` with repeats that are known: the size of the result is."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
    values = known(repeats) if isinstance(repeats, torch.Tensor) and repeats.is_meta else None
    if values is not None and kwargs.get("output_size") is None:
        total = int(values.sum()) if values.numel() > 1 else int(values) * args[0].size(kwargs.get("dim", 0))
        kwargs["output_size"] = total
    return _call(func, args, kwargs)


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs and place_of(args[0]).type == "cuda":
        return func(torch.empty(0, dtype=args[0].dtype)).replace("torch.", "torch.cuda.")
    return _call(func, args, kwargs)


def _show(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args[0].is_meta:
        return func(*args, **kwargs)
    return torch.Tensor.__repr__(args[0]).replace("device='meta'", f"device='{place_of(args[0])}'")


def _index(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> int:
    place = place_of(args[0])
    return -1 if place.index is None else place.index


def _same(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0]


_SPECIAL: dict[Any, Any] = {
    torch.device: lambda func, args, kwargs: func(*args, **kwargs),
    torch.Tensor.device.__get__: lambda _func, args, _kwargs: place_of(args[0]),
    torch.Tensor.is_cuda.__get__: lambda _func, args, _kwargs: place_of(args[0]).type == "cuda",
    torch.Tensor.is_cpu.__get__: lambda _func, args, _kwargs: place_of(args[0]).type == "cpu",
    torch.Tensor.is_meta.__get__: lambda _func, args, _kwargs: place_of(args[0]).type == "meta",
    torch.Tensor.get_device: _index,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: lambda _func, args, kwargs: _move(args[0], "cpu", (), kwargs),
    torch.as_tensor: _as_tensor,
    torch.asarray: _as_tensor,
    torch.Tensor.type: _type,
    torch.Tensor.repeat_interleave: _repeat,
    torch.repeat_interleave: _repeat,
    torch.Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _backward,
    torch.Tensor.data.__set__: _set_data,
    torch.addmm: _accumulate,
    torch.baddbmm: _accumulate,
    torch.Tensor.pin_memory: _same,
    torch.Tensor.is_pinned: lambda _func, _args, _kwargs: False,
    torch.Tensor.record_stream: lambda _func, _args, _kwargs: None,
    torch.Tensor.__repr__: _show,
    torch.Tensor.__format__: lambda func, args, kwargs: (
        _show(func, args, kwargs) if args[0].is_meta and known(args[0]) is None else _read(func, args, kwargs)
    ),
    **dict.fromkeys(
        (
            torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
            torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__complex__, torch.Tensor.__contains__,
            torch.Tensor.__array__, torch.Tensor.is_nonzero, torch.is_nonzero,
        ),
        _read,
    ),
}  # fmt: skip
"""What needs more than devices replaced: function -> handler ``(func, args, kwargs) -> result``."""

_ARBITRARY = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.rand, torch.randn, torch.rand_like, torch.randn_like,
    torch.normal, torch.Tensor.new_empty,
}  # fmt: skip
_PRESERVING = {*LIKE, torch.empty_like, torch.rand_like, torch.randn_like}


def ghost(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Make a ghost.

    Args:
        shape: sizes in elements.
        dtype: torch's name of the element type.
        stride: strides in elements.
        offset: storage offset in elements.
    """
    last = (
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else offset
    )
    with torch._C.DisableTorchFunction():  # inside the mode "meta" would be a place of its own
        storage = torch.empty(last + 1, dtype=getattr(torch, dtype), device="meta")
        return storage.as_strided(shape, stride, offset)
