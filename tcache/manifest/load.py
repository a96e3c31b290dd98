"""A manifest with what it includes: read, checked and multiplied out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tcache.errors import ManifestError
from tcache.manifest.check import check_manifest
from tcache.manifest.complaints import complaints, shown
from tcache.manifest.expand import Row, ShapeSets, combinations, matches, rows_of
from tcache.manifest.expr import ExpressionError
from tcache.manifest.model import CallItem, KernelItem, LaunchesItem, Manifest
from tcache.manifest.reading import Document, read_document
from tcache.manifest.uses import names_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Case", "LoadedManifest", "examine", "load_manifest"]

MOST_FILES = 100
"""Manifests that one may include, directly or through others."""


KINDS = ("call", "kernel", "launches")
"""Keys that say what an item is."""


@dataclass(frozen=True)
class Case:
    """One case of one manifest item, multiplied out.

    Attributes:
        item: the item it belongs to; recorded launches are one case with an empty scope.
        scope: name -> value.
        where: ``file:line:column`` of the case in the manifest.
        folder: the manifest's directory, which kernel paths are relative to.
        ref_where: ``file:line:column`` of the item's kernel, wrapper or file.
        gpus: patterns of GPU names, one of each of which must match.
    """

    item: CallItem | KernelItem | LaunchesItem
    scope: dict[str, Any]
    where: str
    folder: Path
    ref_where: str = ""
    gpus: tuple[tuple[str, ...], ...] = ()

    @property
    def ref(self) -> str:
        """The ref as the manifest writes it; for recorded launches, their file."""
        return str(next(getattr(self.item, kind) for kind in KINDS if hasattr(self.item, kind)))

    def runs_on(self, gpu: str) -> bool:
        """Return whether the case is for a GPU of that name."""
        return matches(self.gpus, gpu)

    def __str__(self) -> str:
        return f"{self.ref} {' '.join(f'{name}={value}' for name, value in self.scope.items())}".strip()


class LoadedManifest:
    """A checked manifest and the positions of its parts.

    Args:
        document: its file.
        model: its content.
        includes: the manifests it includes, each once, in order.
    """

    def __init__(self, document: Document, model: Manifest, includes: list[LoadedManifest]) -> None:
        self.document = document
        self.model = model
        self.includes = includes
        self.path = document.path
        self.where = document.where
        self.sets = ShapeSets({})
        parts = {id(part): part for include in includes for part in include._everything}
        self._everything: list[LoadedManifest] = [*parts.values(), self]

    def everything(self) -> list[LoadedManifest]:
        """Return this manifest and all it includes, directly or through others: each once, included ones first."""
        return list(self._everything)

    def files(self) -> list[Path]:
        """Every file the manifest consists of: manifests and recorded launches, itself last."""
        found: dict[Path, None] = {}
        for part in self.everything():
            for item in part.model.kernels or []:
                if isinstance(item, LaunchesItem):
                    found[part.path.parent / item.launches] = None
            found[part.path] = None
        return list(found)

    @property
    def gpus(self) -> list[str]:
        """The GPUs it names; where it names none, those of the manifests it includes."""
        if self.model.gpus is not None:
            return list(self.model.gpus)
        return list(dict.fromkeys(name for include in self.includes for name in include.gpus))

    @property
    def gpus_where(self) -> str:
        """``file:line:column`` of :attr:`gpus`."""
        named = [part for part in reversed(self.everything()) if part.model.gpus is not None]
        return (named[0] if named else self).where("gpus")

    def rows(self, number: int) -> Iterator[tuple[int, Row]]:
        """Yield the rows of an item with the positions of the cases they come from: shared names it has no use for
        are left out, and what is equal then counts once.
        """
        item = (self.model.kernels or [])[number]
        if isinstance(item, LaunchesItem):
            return
        used = names_of(item)
        seen = set()
        for position, case in enumerate(item.cases):
            for row in rows_of(case, self.where("kernels", number, "cases", position), self.sets):
                kept = row.keeping(used | names_of(*row.conditions))
                key = (repr(sorted(kept.choices.items(), key=str)), kept.conditions, kept.gpus)
                if case.shapes is None or key not in seen:
                    seen.add(key)
                    yield position, kept

    def cases(self, gpu: str | None = None) -> Iterator[Case]:
        """Yield every case in the order of the files, included ones first.

        Args:
            gpu: only those for a GPU of this name.

        Raises:
            ManifestError: a condition cannot be evaluated for one of the combinations.
        """
        for part in self.everything():
            for case in part._own_cases():
                if gpu is None or case.runs_on(gpu):
                    yield case

    def _own_cases(self) -> Iterator[Case]:
        for number, item in enumerate(self.model.kernels or []):
            at = ("kernels", number)
            ref = self.where(*at, next(kind for kind in KINDS if hasattr(item, kind)))
            folder = self.path.parent
            gpus = (tuple(item.gpus),) if item.gpus else ()
            if isinstance(item, LaunchesItem):
                yield Case(item, {}, ref, folder, ref, gpus)
                continue
            conditions = tuple((text, self.where(*at, "where")) for text in item.where or [])
            for _, row in self.rows(number):
                try:
                    for scope in combinations(row, conditions):
                        yield Case(item, scope, row.where, folder, ref, gpus + row.gpus)
                except ExpressionError as error:
                    raise ManifestError(error.where or row.where, f"where: {error}") from error


@dataclass
class _Reader:
    """One reading of a manifest with everything it includes.

    Attributes:
        problems: everything found wrong.
        read: what was read, by resolved path; None for what could not be.
        open: the chain of includes that is being read.
    """

    problems: list[ManifestError] = field(default_factory=list)
    read: dict[Path, LoadedManifest | None] = field(default_factory=dict)
    open: list[Path] = field(default_factory=list)

    def manifest(self, path: Path, where: str | None = None) -> LoadedManifest | None:
        """Read one file; ``where`` is the include it comes from."""
        try:
            own = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a NUL, before Python 3.13
            problem = "a path cannot hold a NUL character" if "\0" in str(path) else str(error)
            self.problems.append(ManifestError(where or f"{str(path)!a}", f"{str(path)!a}: cannot be read: {problem}"))
            return None
        if own in self.open:
            chain = " -> ".join(each.name for each in [*self.open[self.open.index(own) :], own])
            self.problems.append(ManifestError(where or str(path), f"manifests include each other: {chain}"))
            return None
        if own not in self.read:
            if len(self.read) > MOST_FILES:
                self.problems.append(
                    ManifestError(where or str(path), f"more than {MOST_FILES} manifests are included")
                )
                return None
            self.read[own] = None
            self.open.append(own)
            self.read[own] = self._file(path, where)
            self.open.pop()
        return self.read[own]

    def _file(self, path: Path, where: str | None) -> LoadedManifest | None:
        try:
            document = read_document(path)
        except ManifestError as error:
            if where is not None and error.where == str(path):  # the file itself, not something in it
                error = ManifestError(where, f"{path}: {error.problem}", "included paths are relative to the manifest")
            self.problems.append(error)
            return None
        if not isinstance(document.data, dict):
            empty = "the manifest is empty" if document.data is None else f"found {shown(document.data)}"
            self.problems.append(
                ManifestError(document.where(), f"{empty}: expected a mapping with 'version: 1' and 'kernels:'")
            )
            return None
        try:
            model = Manifest.model_validate(document.data)
        except ValidationError as error:
            self.problems += complaints(document, error)
            return None
        includes = [
            self.manifest(path.parent / name, document.where("include", number))
            for number, name in enumerate(model.include or [])
        ]
        if None in includes:
            return None
        found = LoadedManifest(document, model, [each for each in includes if each is not None])
        self.problems += check_manifest(found)
        return found


def examine(path: Path) -> tuple[LoadedManifest | None, list[ManifestError]]:
    """Read and check a manifest, and return it with everything that is wrong with it.

    Args:
        path: the file.

    Returns:
        The manifest, None where it cannot be used at all, and the problems; it is sound if there are none.
    """
    reader = _Reader()
    found = reader.manifest(path)
    return found, reader.problems


def load_manifest(path: Path) -> LoadedManifest:
    """Read and check a manifest.

    Raises:
        ManifestError: it cannot be read, is no YAML, or breaks the model; the message has file, line and column. It is
            the first problem; :func:`examine` returns all.
    """
    found, problems = examine(path)
    if problems or found is None:
        raise problems[0]
    return found
