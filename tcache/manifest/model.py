"""Pydantic models of a shape manifest: what people write, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, StrictStr, Tag, model_validator
from pydantic_core import PydanticCustomError

from tcache.manifest.arguments import Argument, Expressions, Scalar, Strict, rejoined

__all__ = ["VERSION", "CallItem", "Case", "Item", "KernelItem", "LaunchesItem", "Manifest", "ShapeSet"]

VERSION = 1

Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
Path = Annotated[StrictStr, Field(min_length=1, max_length=1000)]
Patterns = Annotated[
    list[Annotated[StrictStr, Field(min_length=1, max_length=200)]],
    Field(min_length=1, description="GPU names, or globs such as NVIDIA H*; the cases are for these only"),
]


def _several(value: Any) -> Any:
    """Let one text stand for a list of one."""
    return [value] if isinstance(value, str) else value


Conditions = Annotated[
    list[Annotated[StrictStr, Field(min_length=1, max_length=1000)]],
    Field(min_length=1, json_schema_extra={"x-single": True}),
    BeforeValidator(lambda value: rejoined(_several(value))),
]
Names = Annotated[list[Name], Field(min_length=1, json_schema_extra={"x-single": True}), BeforeValidator(_several)]
Paths = Annotated[list[Path], Field(min_length=1, json_schema_extra={"x-single": True}), BeforeValidator(_several)]
Choice = Annotated[
    Union[Scalar, Annotated[list[Scalar], Field(min_length=1, max_length=100_000)]],
    Field(description="a value, a list of values (lists multiply out), or a range such as 1..8 or 16..4096 by *2"),
]


class Case(Strict):
    """One case: values by name. Lists multiply out, the last name varying fastest."""

    model_config = ConfigDict(
        extra="allow", frozen=True, json_schema_extra={"propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}}
    )
    __pydantic_extra__: dict[str, Choice]

    shapes: Annotated[
        Union[Names, None], Field(description="named shape sets to take values from, one row after the other")
    ] = None
    where: Annotated[
        Union[Conditions, None],
        Field(description="conditions over the case's names; combinations that fail are dropped"),
    ] = None
    gpus: Union[Patterns, None] = None

    @property
    def choices(self) -> dict[str, Any]:
        """The case's own names and what they may be."""
        return dict(self.__pydantic_extra__ or {})


Rows = Annotated[
    list[Case], Field(min_length=1), BeforeValidator(lambda value: [value] if type(value) is dict else value)
]
ShapeSet = Annotated[
    Rows,
    Field(json_schema_extra={"x-single": True}, description="cases that several kernels share"),
]


class _Replayed(Strict):
    args: Annotated[dict[Name, Argument], Field(description="arguments by name")]
    cases: Annotated[list[Case], Field(min_length=1, description="what to replay")]
    where: Annotated[
        Union[Conditions, None], Field(description="conditions over names; combinations that fail are dropped")
    ] = None
    gpus: Union[Patterns, None] = None


class CallItem(_Replayed):
    """Launches made by a Python wrapper: strides, grid and heuristics come from the code itself."""

    call: Annotated[StrictStr, Field(description="package.module:function or path/to/file.py:function")]


class KernelItem(_Replayed):
    """One launch, spelled out."""

    kernel: Annotated[StrictStr, Field(description="package.module:function or path/to/file.py:function")]
    grid: Annotated[
        Expressions, Field(min_length=1, max_length=3, description="grid over the case's names and meta-parameters")
    ]


class LaunchesItem(Strict):
    """Launches that ``tcache record`` saw."""

    launches: Annotated[Path, Field(description="file of recorded launches, relative to the manifest")]
    gpus: Union[Patterns, None] = None


_ITEMS: dict[str, Any] = {"call": CallItem, "kernel": KernelItem, "launches": LaunchesItem}


def _kind_of_item(value: Any) -> Union[str, None]:
    for kind, model in _ITEMS.items():
        if isinstance(value, model):
            return f"<{kind}>"
    if isinstance(value, dict):
        kinds = [name for name in _ITEMS if name in value]
        return f"<{kinds[0]}>" if len(kinds) == 1 else None
    return None


Item = Annotated[
    Union[
        Annotated[CallItem, Tag("<call>")],
        Annotated[KernelItem, Tag("<kernel>")],
        Annotated[LaunchesItem, Tag("<launches>")],
    ],
    Discriminator(
        _kind_of_item,
        custom_error_type="item",
        custom_error_message="expected a mapping with exactly one of 'call', 'kernel' and 'launches'",
    ),
]


def _plain_integer(value: Any) -> Any:
    """Keep ``true`` and ``1.0`` from passing for 1."""
    return value if type(value) is int else str(value)


class Manifest(Strict):
    """A shape manifest: which launches to replay."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"anyOf": [{"required": [key]} for key in ("kernels", "include", "shapes")]},
    )

    version: Annotated[Literal[1], BeforeValidator(_plain_integer), Field(description="version of this format")]
    include: Annotated[
        Union[Paths, None], Field(description="further manifests, relative to this one; each counts once")
    ] = None
    gpus: Annotated[
        Union[Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1)], None],
        Field(description="GPUs by their drivers' names; the command line overrides"),
    ] = None
    shapes: Annotated[
        Union[dict[Name, ShapeSet], None], Field(description="named shape sets, for the shapes: of a case")
    ] = None
    kernels: Annotated[Union[Annotated[list[Item], Field(min_length=1)], None], Field(description="what to replay")] = (
        None
    )

    @model_validator(mode="after")
    def _something(self) -> Manifest:
        """A manifest has kernels, or is there to be included."""
        if self.kernels is None and self.include is None and self.shapes is None:
            raise PydanticCustomError("no_kernels", "key 'kernels' is missing")
        return self
