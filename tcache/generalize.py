"""Propose the symbolic form of recorded launches: what varies becomes a name, what is shared becomes one name.

Every integer that a launch states (a tensor's sizes, strides and offset, a scalar) is a column over the launches of one
kernel. Equal columns get one name, constant ones stay numbers, a column that is the product of two others becomes an
expression. The cases written cover at least what was recorded: every row's values are among them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tcache.manifest.arguments import DTYPES
from tcache.manifest.expand import reads_as_a_range
from tcache.manifest.expr import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tcache.manifest.launches import RecordedLaunch

__all__ = ["Item", "Row", "classes", "flatten", "generalize"]

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_BYTES = {
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""Of the element types larger than a byte."""

_RESERVED = ("cdiv", "max", "min", "next_power_of_2", "true", "false", "null", "gpus", "shapes", "where")
"""What is no name in an expression, or is something else in a case."""
_LETTERS = ("M", "N", "K", "B", "H", "D", "S", "T", "C", "P", "Q", "R", "U", "V", "W", "X", "Y", "Z")

_FRESH = tuple(f"BLOCKS{number}" for number in range(1000))

Slot = tuple[str, ...]
"""Where a value stands: ``("x", "shape", "0")`` or ``("n",)``."""


@dataclass(frozen=True)
class Row:
    """One launch as named values.

    Attributes:
        structure: what must be equal for launches to share an item: kernel, arguments, ranks, layouts.
        values: slot -> value.
        meta: what the config and constants of the launch were, for recognising its grid.
        grid: in blocks.
        tuned: the meta-parameters of an autotuner's config, which even a constant grid may hang on.
    """

    structure: tuple[Any, ...]
    values: dict[Slot, Any]
    meta: dict[str, Any]
    grid: tuple[int, ...] | None
    tuned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """An item of a manifest.

    Attributes:
        kernel: ref.
        args: argument -> what stands in the manifest.
        grid: expressions.
        cases: name -> value or list of values; lists multiply out.
        notes: what was seen, one line a name.
    """

    kernel: str
    args: dict[str, Any]
    grid: list[Any]
    cases: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def flatten(launch: RecordedLaunch, names: Sequence[str]) -> Row | str:
    """Return a launch as a row, or why the manifest's language has no words for it.

    Args:
        launch: the recorded launch.
        names: the kernel's argument names, in order.
    """
    given = {**dict(zip(names, launch.args, strict=False)), **launch.kwargs}
    structure: list[Any] = [launch.kernel]
    values: dict[Slot, Any] = {}
    for name, value in given.items():
        if name not in names and name not in OPTIONS:
            return f"option {name}"
        if reads_as_a_range(value):
            return f"argument {name}: {value!r}, which reads as a range"
        if isinstance(value, dict) and "tensor" in value:
            made = _tensor(name, value, values)
            if isinstance(made, str):
                return made
            structure.append(made)
        elif isinstance(value, dict) and set(value) == {"float"}:
            structure.append((name, "scalar"))
            values[(name,)] = float(value["float"])
        elif (
            value is None
            or isinstance(value, (bool, float, str))
            or (isinstance(value, int) and -(2**63) < value < 2**63)
        ):
            structure.append((name, "scalar"))
            values[(name,)] = value
        else:
            return f"argument {name}: {next(iter(value), '') if isinstance(value, dict) else type(value).__name__}"
    grid = tuple(launch.grid) if launch.grid else None
    known = launch.specialization.constants if launch.specialization is not None else {}
    # a default is no name for a grid, and 1 is no block: the binder makes it a constant of any integer
    constants = {name: value for name, value in known.items() if name in given and value != 1}
    meta = {name: value for name, value in {**constants, **(launch.config or {})}.items()
            if type(value) is int and name not in OPTIONS}  # fmt: skip
    tuned = tuple(name for name in launch.config or {} if name in meta and name not in OPTIONS)
    return Row((*structure, len(grid or ())), values, meta, grid, tuned)


def _tensor(name: str, data: Mapping[str, Any], values: dict[Slot, Any]) -> tuple[Any, ...] | str:
    dtype, shape, stride = data["tensor"], list(data["shape"]), list(data["stride"])
    size = _BYTES.get(dtype, 1)
    address = data.get("address", 0)
    if dtype not in DTYPES or address % size or "storage" in data:
        return f"argument {name}: a tensor of dtype {dtype} that starts at byte {address} of 16, or of a large storage"
    values[name, "dtype"] = dtype
    for index, value in enumerate(shape):
        values[name, "shape", str(index)] = value
    strided = stride != _contiguous(shape)
    if strided:
        for index, value in enumerate(stride):
            values[name, "stride", str(index)] = value
    if address:
        values[name, "offset"] = address // size
    return name, "tensor", len(shape), strided, bool(address)


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return strides


def classes(values: Iterable[Any]) -> list[str]:
    """Return which classes of integers appear, as Triton's binder tells them apart."""
    found = set()
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            wide = not -(2**31) <= value < 2**31
            kind = "1" if value == 1 else "divisible by 16" if value % 16 == 0 else "other"
            found.add(f"64-bit {kind}" if wide else kind)
    return sorted(found)


def generalize(rows: Sequence[Row]) -> list[Item]:
    """Return one item for each structure, in the order in which they were first seen."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.structure, []).append(row)
    return [_item(structure, found) for structure, found in groups.items()]


def _item(structure: tuple[Any, ...], rows: list[Row]) -> Item:
    texts, symbols = _name(rows)
    args: dict[str, Any] = {}
    for part in structure[1:-1]:
        if part[1] == "tensor":
            name, _, rank, strided, offset = part
            spec: dict[str, Any] = {"shape": [texts[name, "shape", str(d)] for d in range(rank)]}
            spec["dtype"] = texts[name, "dtype"]
            if strided:
                spec["stride"] = [texts[name, "stride", str(d)] for d in range(rank)]
            if offset:
                spec["offset"] = texts[name, "offset"]
            args[name] = spec
        else:
            args[part[0]] = texts[part[0],]
    grid, extra = _grid(rows, symbols)
    columns = {**symbols, **extra}
    cases = _cases(columns, len(rows))
    notes = [_note(name, column) for name, column in columns.items()]
    if len({row.grid for row in rows}) == 1 and any(row.tuned for row in rows):
        notes.append(f"grid: seen once, as {list(rows[0].grid or ())} with {rows[0].meta}: check it before tuning")
    return Item(structure[0], args, grid, cases, notes)


def _note(name: str, column: list[Any]) -> str:
    values = (
        sorted(set(column)) if all(type(value) is int for value in column) else list(dict.fromkeys(map(repr, column)))
    )
    shown = ", ".join(map(str, values[:6])) + (", …" if len(values) > 6 else "")
    kinds = classes(column)
    return f"{name}: {len(values)} values ({shown})" + (f"; classes: {', '.join(kinds)}" if kinds else "")


def _key(column: list[Any]) -> tuple[Any, ...]:
    return tuple((type(value).__name__, repr(value)) for value in column)


def _name(rows: list[Row]) -> tuple[dict[Slot, Any], dict[str, list[Any]]]:
    """Return what stands in each slot (a literal, a name or an expression), and each name's column."""
    columns = {slot: [row.values[slot] for row in rows] for slot in rows[0].values}
    shared: dict[tuple[Any, ...], list[Slot]] = {}
    for slot, column in columns.items():
        shared.setdefault(_key(column), []).append(slot)
    taken = {slot[0] for slot in columns} | set(rows[0].meta) | set(_RESERVED)
    fresh = (name for name in itertools.chain(_LETTERS, (f"D{n}" for n in itertools.count())) if name not in taken)
    kinds = (name for name in ("dtype", *(f"dtype{n}" for n in range(1, len(columns) + 2))) if name not in taken)
    texts: dict[Slot, Any] = {}
    symbols: dict[str, list[Any]] = {}
    # scalars name what they share with sizes; sizes come before strides, so that strides become products of them
    for slots in sorted(shared.values(), key=lambda found: min(_rank(slot) for slot in found)):
        column = columns[slots[0]]
        if len(set(_key(column))) == 1:
            texts |= {slot: _literal(slot, column[0]) for slot in slots}
            continue
        scalar = next((slot[0] for slot in slots if len(slot) == 1 and slot[0] not in _RESERVED), None)
        product = _product(column, symbols) if scalar is None else None
        if product is None:
            product = scalar if scalar is not None else next(kinds if slots[0][-1] == "dtype" else fresh)
            symbols[product] = column
        texts |= dict.fromkeys(slots, product)
    return texts, symbols


def _rank(slot: Slot) -> int:
    return 0 if len(slot) == 1 else 1 + ("shape", "stride", "offset", "dtype").index(slot[1])


def _literal(slot: Slot, value: Any) -> Any:
    return {"value": value} if len(slot) == 1 and isinstance(value, str) else value


def _product(column: list[Any], symbols: dict[str, list[Any]]) -> str | None:
    """Return ``A * B`` or ``A * 8`` when it gives the column."""
    if not all(type(value) is int for value in column):
        return None
    numbers = {name: found for name, found in symbols.items() if all(map(_positive, found))}
    for name, found in numbers.items():
        factor = column[0] // found[0]
        if factor > 1 and all(value == base * factor for value, base in zip(column, found, strict=True)):
            return f"{name} * {factor}"
    for one, two in itertools.combinations(numbers, 2):
        if all(value == a * b for value, a, b in zip(column, numbers[one], numbers[two], strict=True)):
            return f"{one} * {two}"
    return None


def _grid(rows: list[Row], symbols: dict[str, list[Any]]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return an expression for each axis; an axis that none explains becomes a name of the cases."""
    if rows[0].grid is None:
        return [1], {}
    found: list[Any] = []
    extra: dict[str, list[Any]] = {}
    scopes = [{**{name: column[number] for name, column in symbols.items()}, **_scalars(row), **row.meta}
              for number, row in enumerate(rows)]  # fmt: skip
    usable = [name for name in scopes[0] if name not in _RESERVED]
    names = [name for name in usable if all(_positive(scope.get(name)) for scope in scopes)]
    for axis in range(len(rows[0].grid)):
        column = [row.grid[axis] for row in rows if row.grid is not None]
        constant = len(set(column)) == 1  # says nothing of where it comes from, unless a config is known to matter
        blocks = [name for name in names if all(name in (row.tuned if constant else row.meta) for row in rows)]
        sizes = [name for name in names if not any(name in row.meta for row in rows)]
        text: Any = None if constant and (column[0] == 1 or not blocks) else _explain(column, blocks, sizes, scopes)
        if text is None and not constant:
            text = next(name for name in (f"GRID{axis}", *_FRESH) if name not in scopes[0] and name not in extra)
            extra[text] = column
        found.append(column[0] if text is None else text)
    return found, extra


def _scalars(row: Row) -> dict[str, Any]:
    return {slot[0]: value for slot, value in row.values.items() if len(slot) == 1}


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _explain(column: list[int], blocks: list[str], sizes: list[str], scopes: list[dict[str, Any]]) -> str | None:
    parts = [f"cdiv({size}, {block})" for size in sizes for block in blocks]
    pairs = itertools.chain(
        (f"{one} * {two}" for one, two in itertools.combinations(sizes, 2)),
        (f"{one} * {two}" for one, two in itertools.product(parts, sizes)),
        (f"{one} * {two}" for one, two in itertools.combinations(parts, 2)),
    )
    for text in [*parts, *sizes, *itertools.islice(pairs, 5000)]:
        if all(evaluate(text, scope) == value for scope, value in zip(scopes, column, strict=True)):
            return text
    return None


def _cases(columns: dict[str, list[Any]], count: int) -> list[dict[str, Any]]:
    """Return the distinct rows of the columns, those merged that differ in one name only."""
    cases = [{name: [column[number]] for name, column in columns.items()} for number in range(count)]
    for name in columns:
        merged: dict[Any, dict[str, Any]] = {}
        for case in cases:
            rest = tuple(_key(values) for other, values in case.items() if other != name)
            into = merged.setdefault(rest, {**case, name: []})
            known = set(_key(into[name]))
            into[name] += [value for value in case[name] if _key([value])[0] not in known]
        cases = list(merged.values())
    for case in cases:
        for name, values in case.items():
            numbers = all(type(value) is int for value in values)
            case[name] = values[0] if len(values) == 1 else sorted(values) if numbers else values
    return cases
