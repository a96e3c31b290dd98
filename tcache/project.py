"""Settings of a project: the ``[tool.tcache]`` table of the nearest ``pyproject.toml``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from tcache.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Project", "find_project", "project_root"]


class Project(BaseModel):
    """``[tool.tcache]``.

    Attributes:
        store: directory of the project's best configs, relative to ``pyproject.toml``.
        gpu_aliases: GPU name -> the name whose best configs it shall use.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    store: Path | None = None
    gpu_aliases: dict[StrictStr, StrictStr] = Field(default={}, alias="gpu-aliases")


def find_project(start: Path) -> Project:
    """Return the settings of the project that ``start`` lies in, empty ones outside any.

    Raises:
        UsageError: the table has an unknown key or a wrong type, or the file is no TOML.
    """
    for folder, table in _tables(start):
        path = folder / "pyproject.toml"
        try:
            project = Project.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"{path}: [tool.tcache] {where}: {first['msg'].lower()}") from error
        return project.model_copy(update={"store": folder / project.store}) if project.store else project
    return Project()


def project_root(start: Path) -> Path | None:
    """Return the directory of the project that ``start`` lies in, None outside any.

    That is the nearest one whose ``pyproject.toml`` has a ``[tool.tcache]`` table, else the nearest with a
    ``pyproject.toml`` or a ``.git``.
    """
    for folder, _ in _tables(start):
        return folder
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "pyproject.toml").is_file() or (folder / ".git").exists():
            return folder
    return None


def _tables(start: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the directories upwards of ``start`` that have a ``[tool.tcache]`` table, and the table."""
    for folder in (start.resolve(), *start.resolve().parents):
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text("utf-8")).get("tool", {}).get("tcache")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UsageError(f"{path}: not TOML: {error}") from error
        if table is not None:
            yield folder, table
