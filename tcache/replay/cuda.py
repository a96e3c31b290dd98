# ruff: noqa: FBT003 - what always answers yes or no
"""``torch.cuda`` for a GPU that is not there: its functions answer from tcache's catalogue while a replay lasts.

Replaced are the functions that ask the driver and, below them, the names they go through, so that a function a
library imported earlier (``from torch.cuda import get_device_capability``) answers the same. Everything is put back.
"""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch

from tcache.replay.stand_ins import Capture, Event, Generator, Graph, Ranges, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tcache.keys.gpu import GPU

__all__ = ["Properties", "torch_cuda_for", "torch_cuda_lifted"]


class Properties(types.SimpleNamespace):
    """Answers like the object ``torch.cuda.get_device_properties`` returns; what the catalogue lacks is absent."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"_CudaDeviceProperties({shown})"


def _properties(gpu: GPU) -> Properties:
    facts = gpu.hardware
    major, minor = gpu.capability
    found: dict[str, Any] = {
        "name": gpu.name,
        "major": major,
        "minor": minor,
        "total_memory": facts.memory,
        "multi_processor_count": gpu.multiprocessors or None,
        "warp_size": gpu.warp_size,
        "shared_memory_per_block": 49152 if gpu.backend == "cuda" else gpu.max_shared_mem or None,
        "shared_memory_per_block_optin": gpu.max_shared_mem or None,
        "shared_memory_per_multiprocessor": (gpu.max_shared_mem + 1024 if gpu.backend == "cuda" else gpu.max_shared_mem)
        if gpu.max_shared_mem
        else None,  # CUDA reserves 1 KiB for each block
        "regs_per_multiprocessor": 65536 if gpu.backend == "cuda" else None,
        "max_threads_per_multi_processor": facts.threads_per_multiprocessor,
        "max_threads_per_block": 1024,
        "L2_cache_size": facts.l2_cache,
        "memory_bus_width": facts.bus_width,
        "memory_clock_rate": facts.memory_clock and facts.memory_clock * 1000,
        "clock_rate": facts.clock and facts.clock * 1000,
        "is_integrated": 0,
        "is_multi_gpu_board": 0,
        "gcnArchName": str(gpu.arch) if gpu.backend == "hip" else gpu.name,
    }
    return Properties(**{name: value for name, value in found.items() if value is not None})


class _Current:
    """The current device, as ``torch.cuda.set_device`` and ``with torch.cuda.device(…)`` change it."""

    def __init__(self) -> None:
        self.index = 0

    def get(self) -> int:
        return self.index

    def set(self, device: Any) -> None:
        index = _index(device)
        if index >= 0:
            self.index = index

    def exchange(self, index: int) -> int:
        before = self.index
        self.set(index)
        return before


def _index(device: Any) -> int:
    if device is None:
        return -1
    if isinstance(device, int):
        return device
    found = torch.device(device)
    return found.index if found.index is not None else -1


@contextlib.contextmanager
def _stream(_stream: Any = None) -> Iterator[None]:
    yield


def _replacements(gpu: GPU) -> list[tuple[Any, dict[str, Any]]]:
    properties = _properties(gpu)
    current = _Current()
    memory = gpu.hardware.memory or 0
    stream = Stream()
    generator = Generator("cuda")

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    functions = {
        "is_available": always(True), "is_initialized": always(True), "init": nothing, "_lazy_init": nothing,
        "_is_compiled": always(True), "_nvml_based_avail": always(False), "_initialized": True,
        "_lazy_call": nothing, "_queued_calls": [],
        "device_count": always(1), "_device_count_nvml": always(1), "_raw_device_count_nvml": always(1),
        "current_device": current.get, "set_device": current.set, "synchronize": nothing,
        "_exchange_device": current.exchange, "_maybe_exchange_device": current.exchange,
        "get_device_properties": always(properties), "_get_device_properties": always(properties),
        "get_device_capability": always(gpu.capability), "get_device_name": always(gpu.name),
        "is_bf16_supported": always(True), "is_tf32_supported": always(gpu.backend == "cuda"),
        "get_arch_list": always([gpu.torch_arch]), "can_device_access_peer": always(False),
        "current_stream": always(stream), "default_stream": always(stream), "stream": _stream, "set_stream": nothing,
        "StreamContext": _stream, "Stream": Stream, "ExternalStream": Stream, "Event": Event,
        "is_current_stream_capturing": always(False), "current_blas_handle": always(0),
        "mem_get_info": always((memory, memory)), "memory_allocated": always(0), "max_memory_allocated": always(0),
        "memory_reserved": always(0), "max_memory_reserved": always(0), "empty_cache": nothing, "ipc_collect": nothing,
        "reset_peak_memory_stats": nothing, "memory_stats": always({}), "utilization": always(0),
        "manual_seed": lambda seed: generator.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: generator.manual_seed(seed) and None, "seed": nothing, "seed_all": nothing,
        "initial_seed": generator.initial_seed, "get_rng_state": lambda *_a, **_k: generator.get_state(),
        "set_rng_state": lambda state, *_a, **_k: generator.set_state(state),
        "get_rng_state_all": always([]), "set_rng_state_all": nothing,
        "default_generators": (generator,),
        "CUDAGraph": Graph, "graph": Capture, "graph_pool_handle": always((0, 0)),
        "make_graphed_callables": lambda callables, *_a, **_k: callables,
    }  # fmt: skip
    below = {
        "_cuda_getDeviceCount": always(1), "_cuda_getDevice": current.get, "_cuda_setDevice": current.set,
        "_cuda_exchangeDevice": current.exchange, "_cuda_maybeExchangeDevice": current.exchange,
        "_cuda_synchronize": nothing, "_cuda_init": nothing, "_cuda_isInBadFork": always(False),
        "_cuda_getCurrentRawStream": always(0), "_cuda_isCurrentStreamCapturing": always(False),
        "_has_cuda": True,
    }  # fmt: skip
    version = {"hip": "7.0.0", "cuda": None} if gpu.backend == "hip" else {"cuda": torch.version.cuda or "13.0"}
    accelerator = {
        "is_available": always(True), "device_count": always(1), "current_device_index": current.get,
        "current_device_idx": current.get, "set_device_index": current.set, "set_device_idx": current.set,
        "current_accelerator": always(torch.device("cuda")), "current_stream": always(stream), "set_stream": nothing,
        "synchronize": nothing, "empty_cache": nothing, "get_device_capability": None,
    }  # fmt: skip
    return [
        (torch.cuda, functions),
        (torch._C, below),
        (torch.version, version),
        (torch.accelerator, {name: value for name, value in accelerator.items() if value is not None}),
        (torch, {"Generator": Generator}),
        (torch.cuda.nvtx, {"_nvtx": Ranges()}),
        (torch.backends.cuda, {"is_built": always(True)}),
        (getattr(torch.backends.cudnn, "m", torch.backends.cudnn), {"is_acceptable": always(False)}),
        (torch.Tensor, {"record_stream": nothing}),  # its parser takes no other stream than torch's own
    ]


_NEW = {"_C", "Tensor"}
"""What may lack the names: a torch built without CUDA has none of the functions below ``torch.cuda``."""


_ABSENT = object()
_replaced: list[list[tuple[Any, str, Any]]] = []
"""What is replaced now, the replay within another one last: ``(where, name, what it was)``."""


@contextlib.contextmanager
def torch_cuda_for(gpu: GPU) -> Iterator[None]:
    """Let ``torch.cuda`` and its kin answer for ``gpu`` inside the block."""
    undo: list[tuple[Any, str, Any]] = []
    _replaced.append(undo)
    try:
        for module, names in _replacements(gpu):
            may_add = module.__name__.rpartition(".")[2] in _NEW
            for name, value in names.items():
                before = module.__dict__.get(name, _ABSENT)
                if before is _ABSENT and not may_add:
                    continue
                undo.append((module, name, before))
                setattr(module, name, value)
        yield
    finally:
        _replaced.pop()
        _put(reversed(undo))


@contextlib.contextmanager
def torch_cuda_lifted() -> Iterator[None]:
    """Put back inside the block what replays have replaced, and afterwards what was in place before it."""
    undo = [row for rows in reversed(_replaced) for row in reversed(rows)]
    now = [(module, name, module.__dict__.get(name, _ABSENT)) for module, name, _ in undo]
    _put(undo)
    try:
        yield
    finally:
        _put(reversed(now))


def _put(values: Iterable[tuple[Any, str, Any]]) -> None:
    for module, name, value in values:
        if value is not _ABSENT:
            setattr(module, name, value)
        elif name in module.__dict__:
            delattr(module, name)
