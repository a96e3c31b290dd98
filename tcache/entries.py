"""The format of a store file: timings, entries, and the record of one kernel on one GPU."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tcache.errors import StoreError
from tcache.keys.gpu import GPU
from tcache.keys.shape import ShapeKey

__all__ = ["BETWEEN", "CLOSE", "OPEN", "REPAIR", "SCHEMA", "Entry", "Kernel", "Record", "Timing", "join", "quoted"]

SCHEMA = 1


@dataclass(frozen=True)
class Timing:
    """What benchmarking one config gave.

    Attributes:
        median, p20, p80: milliseconds per launch; None when the config failed.
        reps: launches timed; None where the benchmark did not say.
        failed: why the config cannot run, else None.
        extra: fields this version does not know, kept on rewrite.
    """

    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    reps: int | None = None
    failed: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def quantiles(self) -> list[float]:
        """``[median, p20, p80]`` as Triton's benchmarks answer, infinite for a config that failed."""
        if self.median is None:
            return [float("inf")] * 3
        return [self.median if value is None else value for value in (self.median, self.p20, self.p80)]

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Timing:
        times: dict[str, Any] = {name: data.get(f"{name}_ms") for name in ("median", "p20", "p80")}
        for name, value in times.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"{name}_ms is {value!r}, expected a number")
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}_ms is {value!r}, expected a time")
        rest = {k: v for k, v in data.items() if k not in ("median_ms", "p20_ms", "p80_ms", "reps", "failed")}
        return cls(**times, reps=data.get("reps"), failed=data.get("failed"), extra=rest)

    def plain(self) -> dict[str, Any]:
        times = {"median_ms": self.median, "p20_ms": self.p20, "p80_ms": self.p80}
        found: dict[str, Any] = {name: _rounded(value) for name, value in times.items() if value is not None}
        if self.reps is not None:
            found["reps"] = self.reps
        if self.failed is not None:
            found["failed"] = self.failed
        return {**self.extra, **found}


@dataclass(frozen=True)
class Entry:
    """What is known for one shape key.

    Attributes:
        shape: the shape key.
        config: config key of the winner; None while no config has run.
        timings: config key -> timing, for every config tried.
        source: identity of the kernel's source when tuned.
        space: identity of the config space once every config of it was tried, else None.
        triton: Triton release used for tuning.
        tuned: when, ISO 8601 in UTC.
        tied: configs that the benchmark could not tell from the winner, the winner among them.
        extra: fields this version does not know, kept on rewrite.
    """

    shape: ShapeKey
    config: str | None
    timings: dict[str, Timing]
    source: str
    space: str | None
    triton: str
    tuned: str
    tied: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, shape: str, data: dict[str, Any]) -> Entry:
        timings = {key: Timing.parse(timing) for key, timing in data["timings"].items()}
        text = {name: data[name] for name in ("source", "triton", "tuned")}
        optional = {name: "" if data.get(name) is None else data[name] for name in ("config", "space")}
        for name, value in {**text, **optional}.items():
            if not isinstance(value, str):
                raise ValueError(f"{name} is {value!r}, expected text")
        known = {"config", "timings", "source", "space", "tied", "triton", "tuned", "median_ms", "p20_ms", "p80_ms"}
        rest = {k: v for k, v in data.items() if k not in known}
        return cls(
            ShapeKey.parse(shape),
            data.get("config"),
            timings,
            space=data.get("space"),
            tied=tuple(data.get("tied", ())),
            extra=rest,
            **text,
        )

    def plain(self) -> dict[str, Any]:
        best = self.timings.get(self.config or "", Timing()).plain()
        return {
            **self.extra,
            "config": self.config,
            **{name: best[name] for name in ("median_ms", "p20_ms", "p80_ms") if name in best},
            "source": self.source,
            "space": self.space,
            "timings": {key: self.timings[key].plain() for key in sorted(self.timings)},
            "triton": self.triton,
            "tuned": self.tuned,
            **({"tied": sorted(self.tied)} if self.tied else {}),
        }

    def text(self) -> str:
        """Return what stands between the braces of the entry in its file, one line per timing."""
        plain = self.plain()
        timings = plain.pop("timings")
        lines = [f"      {quoted(name)}: {quoted(plain[name])}," for name in sorted(plain)]
        lines.append('      "timings": {')
        if timings:
            lines.append(",\n".join(f"        {quoted(key)}: {quoted(value)}" for key, value in timings.items()))
        return "\n".join([*lines, "      }"])

    def keeping(self, old: Entry | None) -> Entry:
        """Return this entry with the unknown fields of the one it replaces."""
        return replace(self, extra=old.extra) if old is not None and not self.extra else self


@dataclass(frozen=True)
class Kernel:
    """Which kernel a record belongs to.

    Attributes:
        module, qualname: where Python found the function when it was tuned.
        key: names of the autotune key arguments.
    """

    module: str
    qualname: str
    key: tuple[str, ...]

    @property
    def id(self) -> str:
        """The store's file name without its ending."""
        return re.sub(r"[^\w.-]", "_", f"{self.module}.{self.qualname}")

    @property
    def ref(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Record:
    """One store file: all entries of a kernel on a GPU."""

    gpu: GPU
    kernel: Kernel
    entries: dict[ShapeKey, Entry]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, path: Path) -> Record:
        """Parse a store file.

        Raises:
            StoreError: the text is no JSON, has another schema, or lacks a field.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise StoreError(f"{path}: corrupt store file, nested too deeply", REPAIR) from error
        except ValueError as error:
            line = getattr(error, "lineno", None)
            where = f"{path}:{line}:{error.colno}" if isinstance(error, json.JSONDecodeError) else str(path)
            raise StoreError(f"{where}: corrupt store file, expected JSON: {error}", REPAIR) from error
        if not isinstance(data, dict) or "schema" not in data:
            raise StoreError(f"{path}: not a tcache store file: no 'schema' field", REPAIR)
        if data["schema"] != SCHEMA:
            raise StoreError(
                f"{path}: store schema {data['schema']!r}, expected {SCHEMA}",
                "use the tcache release that wrote it, or move the file away and tune again",
            )
        try:
            head = data["kernel"]
            module, qualname = head["ref"].split(":")
            entries = [Entry.parse(shape, entry) for shape, entry in data["entries"].items()]
            rest = {k: v for k, v in data.items() if k not in ("schema", "gpu", "kernel", "entries")}
            rest["kernel"] = {k: v for k, v in head.items() if k not in ("ref", "key")}
            gpu = GPU.parse({name: data["gpu"][name] for name in GPU("", "", 0, 0, 0).identity()})
            return cls(
                gpu, Kernel(module, qualname, tuple(head["key"])), {entry.shape: entry for entry in entries}, rest
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise StoreError(f"{path}: corrupt store file: {what}", REPAIR) from error

    def text(self) -> str:
        """Return the file's text: sorted, one line per timing, so that diffs and merges stay small."""
        parts = {quoted(str(entry.shape)): entry.text() for entry in self.entries.values()}
        return join(self.head(), parts)

    def head(self) -> dict[str, Any]:
        """Return what stands before the entries."""
        return {
            "schema": SCHEMA,
            **{k: v for k, v in self.extra.items() if k != "kernel"},
            "gpu": self.gpu.identity(),
            "kernel": {**self.extra.get("kernel", {}), "ref": self.kernel.ref, "key": list(self.kernel.key)},
        }


def join(head: dict[str, Any], parts: dict[str, str]) -> str:
    """Return a store file's text from its head and the text of each entry by its quoted shape key."""
    lines = ["{\n", *(f"  {quoted(name)}: {quoted(value)},\n" for name, value in head.items()), OPEN]
    ordered = sorted(parts, key=_natural)
    body = BETWEEN.join(f"    {name}: {{\n{parts[name]}" for name in ordered)
    return "".join([*lines, body, CLOSE if parts else CLOSE.removeprefix("\n    }\n")])


OPEN, BETWEEN, CLOSE = '  "entries": {\n', "\n    },\n", "\n    }\n  }\n}\n"
"""What stands before the first entry, between two, and after the last."""

REPAIR = "restore it from version control, or move it away and tune again"


def quoted(value: Any) -> str:
    """Return a value's JSON as store files write it."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


@functools.lru_cache(65536)
def _natural(text: str) -> list[Any]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text) if part]
