"""Reading a manifest: YAML with positions, so that every error names file, line and column."""

from __future__ import annotations

import difflib
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from tcache.errors import ManifestError
from tcache.manifest.expr import ExpressionError, evaluate, names, unbound
from tcache.manifest.launches import RecordedLaunch, Recording, load_recording
from tcache.manifest.model import DTYPES, CallItem, Constant, KernelItem, LaunchesItem, Manifest, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Case", "LoadedManifest", "load_manifest"]

LARGEST = 100_000
"""Most cases one manifest may multiply out to."""

Path_ = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One case of one manifest item, multiplied out.

    Attributes:
        item: the item it belongs to.
        scope: name -> value.
        where: ``file:line:column`` of the case in the manifest.
        folder: the manifest's directory, which kernel paths are relative to.
        ref_where: ``file:line:column`` of the item's kernel or wrapper.
    """

    item: CallItem | KernelItem | RecordedLaunch
    scope: dict[str, Any]
    where: str
    folder: Path
    ref_where: str = ""

    @property
    def ref(self) -> str:
        return self.item.call if isinstance(self.item, CallItem) else self.item.kernel

    def __str__(self) -> str:
        return f"{self.ref} {' '.join(f'{name}={value}' for name, value in self.scope.items())}".strip()


class LoadedManifest:
    """A checked manifest and the positions of its parts.

    Args:
        path: where it was read from.
        model: its content.
        marks: position of every node, by path of keys and indices.
    """

    def __init__(self, path: Path, model: Manifest, marks: dict[Path_, tuple[int, int]]) -> None:
        self.path = path
        self.model = model
        self._marks = marks
        self._recordings: dict[int, Recording] = {}

    def read_recordings(self) -> None:
        """Read the recordings that the manifest names.

        Raises:
            ManifestError: one cannot be read; the message has its line, or the manifest's where there is no such file.
        """
        for number, item in enumerate(self.model.kernels):
            if isinstance(item, LaunchesItem):
                path = self.path.parent / item.launches
                if not path.is_file():
                    where = self.where("kernels", number, "launches")
                    raise ManifestError(where, f"{path}: no such recording", "paths are relative to the manifest")
                self._recordings[number] = load_recording(path)

    def unreplayable(self) -> list[str]:
        """Return one line for each recorded launch that cannot be replayed, with the reason."""
        return [line for recording in self._recordings.values() for line in recording.unreplayable()]

    def where(self, *path: Any) -> str:
        """Return ``file:line:column`` of the node at ``path``, or of the closest node around it."""
        return _where(self.path, self._marks, path)

    def cases(self) -> Iterator[Case]:
        """Yield every case in the order of the file; lists multiply out, the last varying fastest."""
        for number, item in enumerate(self.model.kernels):
            if isinstance(item, LaunchesItem):
                recording = self._recordings[number]
                for where, row in recording.launches:
                    if row.problem is None:
                        yield Case(row, {}, where, recording.path.parent, where)
                continue
            ref = self.where("kernels", number, "call" if isinstance(item, CallItem) else "kernel")
            for position, case in enumerate(item.cases):
                choices = [value if isinstance(value, list) else [value] for value in case.values()]
                where = self.where("kernels", number, "cases", position)
                for values in itertools.product(*choices):
                    yield Case(item, dict(zip(case, values, strict=True)), where, self.path.parent, ref)


def load_manifest(path: Path) -> LoadedManifest:
    """Read and check a manifest.

    Raises:
        ManifestError: it cannot be read, is no YAML, or breaks the model; the message has file, line and column.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "expected UTF-8 text"
        raise ManifestError(str(path), f"cannot be read: {reason}", "give the path of a shape manifest") from error
    if text.startswith('{"') and '"schema"' in text:  # a recording is a manifest by itself
        return _of_recording(path)
    marks: dict[Path_, tuple[int, int]] = {}
    data = _parse(path, text, marks)
    if data is None:
        raise ManifestError(f"{path}:1:1", "the manifest is empty: expected 'version: 1' and 'kernels:'")
    try:
        model = Manifest.model_validate(data)
    except ValidationError as error:
        raise _first(path, marks, error) from error
    manifest = LoadedManifest(path, model, marks)
    _check_size(manifest)
    _check_items(manifest)
    manifest.read_recordings()
    return manifest


def _of_recording(path: Path) -> LoadedManifest:
    recording = load_recording(path)
    gpus = sorted({gpu for _, row in recording.launches for gpu in row.gpus})
    manifest = LoadedManifest(
        path, Manifest(version=1, gpus=gpus or None, kernels=[LaunchesItem(launches=path.name)]), {}
    )
    manifest.read_recordings()
    return manifest


def _parse(path: Path, text: str, marks: dict[Path_, tuple[int, int]]) -> Any:
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # characters that YAML does not allow
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        raise ManifestError(f"{path}:{line}:1", f"not YAML: {getattr(error, 'reason', error)}") from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _mark(path, node, (), marks, set())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else f"{path}:1:1"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ManifestError(where, f"not YAML: {problem}") from error
    except (ValueError, RecursionError) as error:  # a date or number YAML cannot make, endless nesting
        raise ManifestError(f"{path}:1:1", f"not YAML: {error}") from error
    finally:
        loader.dispose()


def _mark(path: Path, node: yaml.Node, at: Path_, marks: dict[Path_, tuple[int, int]], open_: set[int]) -> None:
    """Note the position of every node; refuse duplicate keys and aliases, which YAML would accept silently."""
    where = (node.start_mark.line + 1, node.start_mark.column + 1)
    if id(node) in open_:
        raise ManifestError(f"{path}:{where[0]}:{where[1]}", "aliases (*name) are not supported: write the value out")
    open_.add(id(node))
    marks[at] = where
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (key.start_mark.line + 1, key.start_mark.column + 1)
            if not isinstance(key, yaml.ScalarNode):
                raise ManifestError(f"{path}:{place[0]}:{place[1]}", "a key must be a plain name")
            if (*at, key.value) in marks:
                raise ManifestError(f"{path}:{place[0]}:{place[1]}", f"key {key.value!r} stands twice")
            _mark(path, value, (*at, key.value), marks, open_)
            marks[(*at, key.value, _KEY)] = place
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _mark(path, value, (*at, index), marks, open_)


_KEY = object()


def _where(path: Path, marks: dict[Path_, tuple[int, int]], at: Path_) -> str:
    while at not in marks and at:
        at = at[:-1]
    line, column = marks.get(at, (1, 1))
    return f"{path}:{line}:{column}"


def _first(path: Path, marks: dict[Path_, tuple[int, int]], error: ValidationError) -> ManifestError:
    """Turn the first of pydantic's complaints into one line."""
    every = error.errors()
    # a misspelt key is both unknown and missing: the first says more
    found = next((row for row in every if row["type"] == "extra_forbidden"), every[0])
    # pydantic adds the names of union members to a path; they are no part of the document
    at: Path_ = ()
    for step in found["loc"]:
        if (*at, step) in marks:
            at = (*at, step)
    last = found["loc"][-1] if found["loc"] else None
    kind, context = found["type"], found.get("ctx", {})
    hint = None
    if kind == "extra_forbidden":
        allowed = _allowed(found["loc"])
        close = difflib.get_close_matches(str(last), allowed, n=1)
        problem = f"unknown key {last!r}: expected one of {', '.join(allowed)}"
        hint = f"did you mean {close[0]!r}?" if close else None
        at = (*at, _KEY) if (*at, _KEY) in marks else at
    elif kind == "missing":
        problem = f"key {last!r} is missing"
    elif kind == "too_short":
        problem = f"{last or 'the manifest'} is empty: expected at least {context.get('min_length', 1)} item"
    else:
        shown = repr(found.get("input"))
        message = found["msg"][0].lower() + found["msg"][1:]
        if len(at) > 3 and at[2] == "cases" and kind.endswith("_type"):
            message = "expected a number, a string, a boolean, null, or a list of these"
        problem = f"{'.'.join(map(str, at)) or 'the manifest'}: {message}, found {shown[:60]}"
    return ManifestError(_where(path, marks, at), problem, hint)


def _allowed(loc: tuple[Any, ...]) -> list[str]:
    models = {
        "<call>": CallItem,
        "<kernel>": KernelItem,
        "<launches>": LaunchesItem,
        "<tensor>": Tensor,
        "<constant>": Constant,
    }
    model: Any = Manifest
    for step in loc[:-1]:
        model = models.get(step, model)
    return sorted(model.model_fields)


def _check_size(manifest: LoadedManifest) -> None:
    total = 0
    for number, item in enumerate(manifest.model.kernels):
        for position, case in enumerate([] if isinstance(item, LaunchesItem) else item.cases):
            total += math.prod(len(value) if isinstance(value, list) else 1 for value in case.values())
            if total > LARGEST:
                where = manifest.where("kernels", number, "cases", position)
                raise ManifestError(where, f"the manifest multiplies out to more than {LARGEST:,} cases", "split it up")


def _check_items(manifest: LoadedManifest) -> None:
    """Check every expression and dtype against the names of every case, without importing a kernel."""
    for number, item in enumerate(manifest.model.kernels):
        if isinstance(item, LaunchesItem):
            continue
        for position, case in enumerate(item.cases):
            for name, value in case.items():
                if value == []:
                    where = manifest.where("kernels", number, "cases", position, name)
                    raise ManifestError(where, f"{name} is an empty list: expected at least one value")
            sample = {name: value[0] if isinstance(value, list) else value for name, value in case.items()}
            _check_args(manifest, number, item, sample, case)


def _check_args(
    manifest: LoadedManifest, number: int, item: CallItem | KernelItem, sample: dict[str, Any], case: dict[str, Any]
) -> None:
    for name, argument in item.args.items():
        at = ("kernels", number, "args", name)
        if isinstance(argument, str):
            _check_expression(manifest, at, argument, sample)
        elif isinstance(argument, Tensor):
            for index, size in enumerate(argument.shape):
                _check_expression(manifest, (*at, "shape", index), size, sample)
            for index, size in enumerate(argument.stride or []):
                _check_expression(manifest, (*at, "stride", index), size, sample)
            _check_expression(manifest, (*at, "offset"), argument.offset, sample)
            if argument.stride is not None and len(argument.stride) != len(argument.shape):
                raise ManifestError(
                    manifest.where(*at, "stride"),
                    f"{len(argument.stride)} strides for {len(argument.shape)} dimensions",
                )
            for dtype in _choices(argument.dtype, case):
                if dtype not in DTYPES:
                    raise _unknown_dtype(manifest.where(*at, "dtype"), dtype)
    if isinstance(item, KernelItem):
        for index, size in enumerate(item.grid):
            try:
                names(str(size))
            except ExpressionError as error:
                raise ManifestError(manifest.where("kernels", number, "grid", index), str(error)) from error


def _choices(dtype: str, case: dict[str, Any]) -> list[Any]:
    if dtype not in case:
        return [dtype]
    value = case[dtype]
    return value if isinstance(value, list) else [value]


def _unknown_dtype(where: str, dtype: Any) -> ManifestError:
    close = difflib.get_close_matches(str(dtype), DTYPES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else None
    return ManifestError(where, f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}", hint)


def _check_expression(manifest: LoadedManifest, at: Path_, text: str | int, sample: dict[str, Any]) -> None:
    try:
        for name in names(str(text)):
            if name not in sample:
                raise ExpressionError(unbound(name, sample))
        evaluate(text, sample)
    except ExpressionError as error:
        raise ManifestError(manifest.where(*at), str(error)) from error
