"""Pydantic models of a shape manifest: what people write, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
)

__all__ = ["DTYPES", "CallItem", "Constant", "Item", "KernelItem", "LaunchesItem", "Manifest", "Tensor"]

DTYPES = (
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
)
"""torch's names of the element types a tensor argument may have."""

Expression = Annotated[
    Union[StrictInt, StrictStr], Field(description="an integer or an expression over the case's names")
]


def _rejoin(value: Any) -> Any:
    """Undo YAML's reading of ``[cdiv(n, BLOCK)]`` as two items: join items until the parentheses are balanced."""
    if not isinstance(value, list):
        return value
    joined: list[Any] = []
    for item in value:
        if joined and isinstance(joined[-1], str) and joined[-1].count("(") > joined[-1].count(")"):
            joined[-1] = f"{joined[-1]}, {item}"
        else:
            joined.append(item)
    return joined


Expressions = Annotated[list[Expression], BeforeValidator(_rejoin)]
Scalar = Union[StrictBool, StrictInt, StrictFloat, StrictStr, None]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tensor(_Model):
    """A tensor argument.

    ``stride`` is in elements (contiguous when left out). ``offset``, in elements, is where the tensor starts in its
    storage: the storage is aligned, so an offset is how a manifest asks for an unaligned pointer.
    """

    shape: Expressions
    dtype: StrictStr
    stride: Union[Expressions, None] = None
    offset: Expression = 0


class Constant(_Model):
    """A literal argument that is no expression: ``{value: relu}`` is the string."""

    value: Scalar


# Tags of the unions stand in <> so that an error's path cannot confuse them with keys of the document.
def _kind_of_argument(value: Any) -> str:
    if isinstance(value, (Tensor, Constant)):
        return f"<{type(value).__name__.lower()}>"
    if isinstance(value, dict):
        return "<constant>" if "value" in value else "<tensor>"
    return "<scalar>"


Argument = Annotated[
    Union[
        Annotated[Tensor, Tag("<tensor>")], Annotated[Constant, Tag("<constant>")], Annotated[Scalar, Tag("<scalar>")]
    ],
    Discriminator(_kind_of_argument),
]
Case = dict[StrictStr, Union[Scalar, list[Scalar]]]


class _ItemModel(_Model):
    args: dict[StrictStr, Argument]
    cases: Annotated[list[Case], Field(min_length=1)]


class CallItem(_ItemModel):
    """Launches made by a Python wrapper: strides, grid and heuristics come from the code itself."""

    call: StrictStr


class KernelItem(_ItemModel):
    """One launch, spelled out."""

    kernel: StrictStr
    grid: Annotated[Expressions, Field(min_length=1, max_length=3)]


class LaunchesItem(_Model):
    """The launches of a recording; its path is relative to the manifest."""

    launches: StrictStr


def _kind_of_item(value: Any) -> Union[str, None]:
    if isinstance(value, LaunchesItem):
        return "<launches>"
    if isinstance(value, (CallItem, KernelItem)):
        return "<call>" if isinstance(value, CallItem) else "<kernel>"
    if isinstance(value, dict):
        kinds = [name for name in ("call", "kernel", "launches") if name in value]
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


class Manifest(_Model):
    """A shape manifest: which launches to replay."""

    version: Annotated[Literal[1], BeforeValidator(_plain_integer)]
    gpus: Annotated[list[StrictStr], Field(min_length=1)] | None = None
    kernels: Annotated[list[Item], Field(min_length=1)]
