"""Objects of ``torch.cuda`` for a GPU that is not there: streams, events, generators, graphs, ranges."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Capture", "Event", "Generator", "Graph", "Ranges", "Stream"]


class Stream:
    """A stream of a GPU that is not there: everything on it is done."""

    def __init__(self, device: Any = None, priority: int = 0, stream_ptr: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0) if device is None else torch.device(device)
        self.device_index = self.device.index or 0
        self.cuda_stream = self.stream_id = stream_ptr
        self.priority = priority
        self.native_handle = stream_ptr

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Nothing is running."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is running."""

    def wait_event(self, event: Any) -> None:
        """Nothing is running."""

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream and other.device == self.device

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        """Streams do not matter to a replay."""


class Event:
    """An event on such a stream: recorded and past at once."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_GENERATOR)


_REAL_GENERATOR = torch.Generator


class Generator(_REAL_GENERATOR, metaclass=_GeneratorType):  # type: ignore[misc, valid-type]
    """A CPU generator that claims the device it was asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:  # noqa: ARG004
        return _REAL_GENERATOR.__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        found = torch.device(device)
        self._claimed = torch.device("cuda", found.index or 0) if found.type == "cuda" else found
        self._philox: list[int] = [0, 0]

    @property
    def device(self) -> torch.device:
        return self._claimed

    def manual_seed(self, seed: int) -> Any:
        super().manual_seed(seed)
        self._philox = [seed, 0]
        return self

    def seed(self) -> int:
        self._philox = [super().seed(), 0]
        return self._philox[0]

    def initial_seed(self) -> int:
        return self._philox[0] if self._on_gpu() else int(super().initial_seed())

    def get_offset(self) -> int:
        return self._philox[1] if self._on_gpu() else int(super().get_offset())

    def set_offset(self, offset: int) -> Any:
        if not self._on_gpu():
            return super().set_offset(offset)
        self._philox[1] = offset
        return self

    def get_state(self) -> Any:
        """Seed and offset, 8 bytes each, on a GPU. Source: ``CUDAGeneratorImpl::get_state`` in ATen."""
        if not self._on_gpu():
            return super().get_state()
        words = [word - (1 << 64) if word >= 1 << 63 else word for word in self._philox]
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    def set_state(self, state: Any) -> Any:
        if not self._on_gpu():
            return super().set_state(state)
        self._philox = [int(word) for word in state.view(torch.int64)]
        return self

    def _on_gpu(self) -> bool:
        return bool(self._claimed.type == "cuda")


class Graph:
    """A CUDA graph: what is launched while it is captured is seen as it is launched, and replaying launches nothing."""

    def __init__(self, keep_graph: bool = False) -> None:
        """Keep nothing."""

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        if name in (
            "capture_begin",
            "capture_end",
            "instantiate",
            "replay",
            "reset",
            "enable_debug_mode",
            "debug_dump",
        ):
            return lambda *_args, **_kwargs: None
        raise AttributeError(name)


class Capture:
    """``torch.cuda.graph(…)``: launches inside the block are made as they are."""

    def __init__(self, cuda_graph: Any, *_args: Any, **_kwargs: Any) -> None:
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        """Nothing is captured."""

    def __exit__(self, *_: object) -> None:
        """Nothing was captured."""


class Ranges:
    """NVTX, which a torch built without CUDA lacks: ranges that nobody looks at."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args: 0
