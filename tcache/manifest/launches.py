"""Reading a recording: the model of one line, and the whole file as items of a manifest."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from tcache.errors import ManifestError
from tcache.rows import SCHEMA, fold, read_rows

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RecordedLaunch", "Recording", "is_recording", "load_recording"]

_log = logging.getLogger("tcache")


class Specialization(BaseModel):
    """What Triton's binder made of the arguments; config parameters of an autotuner left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    signature: dict[StrictStr, StrictStr]
    constants: dict[StrictStr, Any]
    attributes: dict[StrictStr, list[StrictStr]]


class CapturedFile(BaseModel):
    """One file of a captured entry."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: StrictInt
    sha256: StrictStr


class Facts(BaseModel):
    """What the name of a captured entry depends on, see :func:`tcache.explain.facts_of`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kernel: StrictStr
    target: StrictStr
    signature: dict[StrictStr, StrictStr]
    constants: dict[StrictStr, Any]
    attributes: dict[StrictStr, list[StrictStr]]
    options: dict[StrictStr, Any]
    source: StrictStr
    line: StrictInt
    text: StrictStr


class Captured(BaseModel):
    """An entry that was copied beside the recording, see :mod:`tcache.capture`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry: Annotated[str, Field(pattern=r"^[A-Z2-7]{52}$")]
    build: StrictStr = ""
    arguments: list[StrictStr]
    facts: Facts
    files: dict[Annotated[str, Field(pattern=r"^[^/\\\x00]+\.(json|cubin|hsaco)$")], CapturedFile]

    @model_validator(mode="after")
    def _of_one_kernel(self) -> Captured:
        if sorted(self.arguments) != sorted(self.facts.signature):
            raise ValueError("arguments are others than those of the signature")
        return self


class RecordedLaunch(BaseModel):
    """One launch of a recorded program.

    Attributes:
        kernel: ref of the object that was launched; a path is relative to the recording.
        args, kwargs: what was passed, described as :mod:`tcache._triton.values` says.
        grid: in blocks, as it was launched.
        gpus: names of the GPUs it was seen on.
        shape: shape key, None without an autotuner.
        specialization, options: what the binder made of it; None for a launch that missed before it was bound.
        config: what an autotuner's config added when the launch was seen.
        count: how often it was launched, where counts were asked for.
        miss: why it missed in a frozen service.
        problem: why it cannot be replayed.
        source: identity of the kernel's source and of what it reads, see :mod:`tcache.keys.source`.
        triton: the release it was recorded under.
        captured: the entry, of a kernel that others compile and launch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = Field(alias="schema")
    id: StrictStr
    kernel: StrictStr
    args: list[Any] = []
    kwargs: dict[StrictStr, Any] = {}
    grid: Union[list[StrictInt], None] = None
    gpus: list[StrictStr] = []
    shape: Union[StrictStr, None] = None
    specialization: Union[Specialization, None] = None
    options: Union[dict[StrictStr, Union[StrictBool, StrictInt, StrictFloat, StrictStr, None]], None] = None
    config: Union[dict[StrictStr, Any], None] = None
    count: Union[StrictInt, None] = None
    miss: Union[StrictStr, None] = None
    problem: Union[StrictStr, None] = None
    source: Union[StrictStr, None] = None
    triton: StrictStr = ""
    captured: Union[Captured, None] = None


@dataclass(frozen=True)
class Recording:
    """A recording, checked.

    Attributes:
        path: where it was read from.
        launches: ``(file:line:column, launch)`` in the order of the file.
    """

    path: Path
    launches: tuple[tuple[str, RecordedLaunch], ...]

    def unreplayable(self) -> list[str]:
        """Return one line for each launch that cannot be replayed, with the reason."""
        return [
            f"{where}: {launch.kernel} is not replayed: {launch.problem}"
            for where, launch in self.launches
            if launch.problem is not None
        ]


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording and not a manifest: JSON objects, one a line."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError:
        return False
    return start.startswith(b'{"') and b'"schema"' in start


def load_recording(path: Path) -> Recording:
    """Read and check a recording.

    A line that is cut off, as a killed process may leave it, is skipped with a warning.

    Raises:
        ManifestError: it cannot be read, has another schema, or no launch is in it; the message has file and line.
    """
    try:
        rows, torn = read_rows(path)
    except OSError as error:
        hint = "record one: tcache record -o FILE -- python serve.py"
        raise ManifestError(str(path), f"recording cannot be read: {error.strerror}", hint) from error
    for number, row in rows:
        if row.get("schema") != SCHEMA:
            raise ManifestError(
                f"{path}:{number}:1",
                f"no line of a recording: schema is {row.get('schema')!r}, expected {SCHEMA}",
                "record it again with this release of tcache",
            )
    if torn and not rows:
        raise ManifestError(f"{path}:{torn[0]}:1", "no recording: expected one JSON object a line")
    if torn:
        _log.warning("tcache: %s: %d cut-off lines are skipped, the first is line %d", path, len(torn), torn[0])
    found = []
    for number, row in fold(rows):
        try:
            found.append((f"{path}:{number}:1", RecordedLaunch.model_validate(row)))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(step) for step in first["loc"])
            raise ManifestError(
                f"{path}:{number}:1", f"{at}: {first['msg'][0].lower()}{first['msg'][1:]}", "record it again"
            ) from error
    if not found:
        raise ManifestError(str(path), "the recording has no launch in it", "record a program that launches kernels")
    return Recording(path, tuple(found))
