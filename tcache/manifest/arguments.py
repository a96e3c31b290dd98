"""Pydantic models of a manifest's arguments: what one argument of a wrapper or kernel may be."""

from __future__ import annotations

import itertools
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

from tcache.manifest.reading import starts

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "TAGS",
    "Argument",
    "Constant",
    "Constexpr",
    "DType",
    "Descriptor",
    "Expressions",
    "ListArgument",
    "Scalar",
    "Strict",
    "Tensor",
    "TupleArgument",
    "rejoined",
]

DTYPES = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "uint8": 1,
}
"""torch's names of the element types a tensor argument may have, and their bytes.

They are what torch has of ``type_canonicalisation_dict`` in ``triton/_utils.py``, the same in Triton 3.6 to 3.9.
"""

LAYOUTS = {"channels_last": 4, "channels_last_3d": 5, "transposed": 2}
"""Layouts by name, and the dimensions they need (``transposed``: at least)."""

Expression = Annotated[
    Union[StrictInt, Annotated[StrictStr, Field(min_length=1, max_length=1000)]],
    Field(description="an integer, or an expression over the case's names such as cdiv(M, 16)"),
]


def rejoined(value: Any) -> Any:
    """Undo YAML's reading of ``[cdiv(n, BLOCK)]`` as two items: join items until the parentheses are balanced."""
    if not isinstance(value, list):
        return value
    begun = [*starts(value), len(value)]
    parts = [value[start:end] for start, end in itertools.pairwise(begun)]
    return [part[0] if len(part) == 1 else ", ".join(map(str, part)) for part in parts]


Expressions = Annotated[
    list[Expression], Field(max_length=64, json_schema_extra={"x-rejoined": True}), BeforeValidator(rejoined)
]
DTypeName = Annotated[
    StrictStr,
    Field(
        description="element type, or the name of the case that says it",
        json_schema_extra={"anyOf": [{"enum": list(DTYPES)}, {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}]},
    ),
]
Scalar = Union[StrictBool, StrictInt, StrictFloat, StrictStr, None]


class Strict(BaseModel):
    """No unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tensor(Strict):
    """A tensor argument."""

    shape: Annotated[Expressions, Field(description="sizes; [] is a tensor of one element without dimensions")]
    dtype: DTypeName
    stride: Annotated[
        Union[Expressions, None],
        Field(description="elements between neighbours, by dimension; 0 expands; contiguous when left out"),
    ] = None
    layout: Annotated[
        Union[Literal["channels_last", "channels_last_3d", "transposed"], None],
        Field(description="strides by name, in place of stride"),
    ] = None
    offset: Annotated[
        Expression,
        Field(description="elements from the start of an aligned storage: how to ask for an unaligned pointer"),
    ] = 0


class Constant(Strict):
    """A literal that is no expression: ``{value: relu}`` is the string."""

    value: Annotated[Scalar, Field(description="the literal: a string, number, boolean or null")]


class DType(Strict):
    """An element type as an argument: torch's for a wrapper, Triton's for a kernel."""

    dtype: DTypeName


class TupleArgument(Strict):
    """A tuple of arguments; they may nest."""

    items: Annotated[list[Argument], Field(alias="tuple", max_length=256, description="its members, as arguments")]


class ListArgument(Strict):
    """A list of arguments: a wrapper may take one, kernels take tuples."""

    items: Annotated[list[Argument], Field(alias="list", max_length=256, description="its members, as arguments")]


class Constexpr(Strict):
    """``tl.constexpr(…)``: makes a value part of the kernel where the kernel itself does not ask for that."""

    constexpr: Annotated[Argument, Field(description="the value: anything but a tensor")]


class Descriptor(Strict):
    """A tensor descriptor (TMA): ``TensorDescriptor`` over a tensor of its own."""

    descriptor: Annotated[Tensor, Field(description="the tensor it describes")]
    block: Annotated[Expressions, Field(min_length=1, max_length=5, description="block shape, powers of two")]
    padding: Annotated[Literal["zero", "nan"], Field(description="what reads outside the tensor give")] = "zero"


TAGS: dict[str, Any] = {
    "<constant>": Constant,
    "<constexpr>": Constexpr,
    "<descriptor>": Descriptor,
    "<dtype>": DType,
    "<list>": ListArgument,
    "<tensor>": Tensor,
    "<tuple>": TupleArgument,
}
"""Tags of the union; they stand in <> so that an error's path cannot confuse them with keys of the document."""

_KEYS = {
    "value": "<constant>", "constexpr": "<constexpr>", "descriptor": "<descriptor>", "list": "<list>",
    "tuple": "<tuple>",
}  # fmt: skip


def _kind(value: Any) -> Union[str, None]:
    for tag, model in TAGS.items():
        if isinstance(value, model):
            return tag
    if isinstance(value, dict):
        named = [tag for key, tag in _KEYS.items() if key in value and "shape" not in value]
        if named:
            return named[0]
        return "<dtype>" if list(value) == ["dtype"] else "<tensor>"
    return None if isinstance(value, list) else "<scalar>"


Argument = Annotated[
    Union[
        Annotated[Tensor, Tag("<tensor>")],
        Annotated[Constant, Tag("<constant>")],
        Annotated[DType, Tag("<dtype>")],
        Annotated[TupleArgument, Tag("<tuple>")],
        Annotated[ListArgument, Tag("<list>")],
        Annotated[Constexpr, Tag("<constexpr>")],
        Annotated[Descriptor, Tag("<descriptor>")],
        Annotated[Scalar, Tag("<scalar>")],
    ],
    Discriminator(
        _kind,
        custom_error_type="argument",
        custom_error_message="expected a tensor, a scalar or an expression; lists multiply out in cases, "
        "and for a tuple write {tuple: […]}",
    ),
]

for _model in (TupleArgument, ListArgument, Constexpr):
    _model.model_rebuild()
