"""What pydantic cannot see: names, expressions, element types, sizes, shape sets. No kernel is imported."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tcache.errors import ManifestError
from tcache.manifest.arguments import DTYPES, LAYOUTS, Constexpr, Descriptor, ListArgument, Tensor, TupleArgument
from tcache.manifest.complaints import cut_hint, shown, unknown_dtype
from tcache.manifest.expand import LARGEST, ShapeSets, TooMany, combinations, count, rows_of, values
from tcache.manifest.expr import LARGEST as LARGEST_INT
from tcache.manifest.expr import SMALLEST as SMALLEST_INT
from tcache.manifest.expr import ExpressionError, close_names, evaluate, listed, names, unbound
from tcache.manifest.grammar import WORDS
from tcache.manifest.model import LaunchesItem
from tcache.manifest.reading import KEY
from tcache.manifest.uses import names_of, slots

if TYPE_CHECKING:
    from tcache.manifest.expand import Row
    from tcache.manifest.load import LoadedManifest
    from tcache.manifest.model import CallItem, KernelItem
    from tcache.manifest.model import Case as WrittenCase
    from tcache.manifest.reading import At

__all__ = ["check_manifest"]

MOST = 100
"""Problems of one manifest after which no more are looked for."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)


def check_manifest(manifest: LoadedManifest) -> list[ManifestError]:
    """Return what is wrong with a manifest whose includes have been checked, and give it its shape sets."""
    check = _Check(manifest)
    check.shape_sets()
    if not check.problems:
        check.size()
    if not check.problems:
        for number, item in enumerate(manifest.model.kernels or []):
            if not isinstance(item, LaunchesItem):
                check.item(number, item)
    return check.problems


class _Check:
    def __init__(self, manifest: LoadedManifest) -> None:
        self.manifest = manifest
        self.problems: list[ManifestError] = []
        self._said: set[tuple[str, str]] = set()

    def say(self, at: At | str, problem: str, hint: str | None = None) -> None:
        where = at if isinstance(at, str) else self.manifest.where(*at)
        if not self.full and (where, problem) not in self._said:
            self._said.add((where, problem))
            self.problems.append(ManifestError(where, problem, hint))

    @property
    def full(self) -> bool:
        """Whether there are so many problems that no more are looked for."""
        return len(self.problems) >= MOST

    def shape_sets(self) -> None:
        """Gather the sets in sight, and check every case as written: names, values, ranges, sets referred to."""
        cases: dict[str, list[tuple[WrittenCase, str]]] = {}
        places: dict[str, str] = {}
        for part in self.manifest.everything():
            for name, written in (part.model.shapes or {}).items():
                place = part.where("shapes", name, KEY)
                if name in places:
                    self.say(
                        place, f"shape set {name!r} is defined twice: also at {places[name]}", "rename one of them"
                    )
                places[name] = place
                single = part.document.marks.get(("shapes", name, 0)) is None
                cases[name] = [
                    (case, part.where("shapes", name, *(() if single else (index,))))
                    for index, case in enumerate(written)
                ]
        sets = self.manifest.sets = ShapeSets(cases)
        for name, written in (self.manifest.model.shapes or {}).items():
            for index, case in enumerate(written):
                at: At = ("shapes", name, index)
                self.case(at if at in self.manifest.document.marks else at[:-1], case, sets)
        for number, item in enumerate(self.manifest.model.kernels or []):
            if not isinstance(item, LaunchesItem):
                for position, case in enumerate(item.cases):
                    self.case(("kernels", number, "cases", position), case, sets)

    def case(self, at: At, case: WrittenCase, sets: ShapeSets) -> None:
        """Check one case as written."""
        for name, choice in case.choices.items():
            if not _NAME.fullmatch(name) or name in WORDS:
                problem = f"{name!r} is no name: expected letters, digits and _, no word of expressions"
                self.say((*at, name, KEY), problem, cut_hint(name))
            for index, value in enumerate(choice if isinstance(choice, list) else [choice]):
                place = (*at, name, index) if isinstance(choice, list) else (*at, name)
                if type(value) is int and not SMALLEST_INT <= value <= LARGEST_INT:
                    self.say(place, f"{name} is larger than 64 bits: expected an integer from -2**63 to 2**64 - 1")
                try:
                    size = count(value)
                except ExpressionError as error:
                    self.say(place, f"{name}: {error}")
                    continue
                if size > LARGEST:
                    self.say(place, f"{name}: {value!r} holds {size:,} values: at most {LARGEST:,} cases are allowed")
        for index, text in enumerate(case.where or []):
            self.condition((*at, "where", index), text)
        for index, name in enumerate(case.shapes or []):
            if name not in sets.names:
                close = close_names(name, sets.names)
                known = listed(sets.names) if sets.names else "none is defined"
                hint = f"did you mean {close[0]!r}?" if close else "define it under 'shapes:', here or in an include"
                self.say((*at, "shapes", index), f"unknown shape set {name!r}: expected one of {known}", hint)
        if not case.choices and case.shapes is None and "shapes" in at[:1]:
            self.say(at, "the case says nothing: expected names with values")

    def condition(self, at: At, text: str) -> None:
        try:
            names(text)
        except ExpressionError as error:
            self.say(at, f"where: {error}")

    def size(self) -> None:
        """Check how much everything multiplies out to, before anything is."""
        total = 0
        own = self.manifest
        for name in own.model.shapes or {}:
            try:
                own.sets.rows(name)
            except ExpressionError as error:
                self.say(("shapes", name, KEY), str(error), "split it up" if isinstance(error, TooMany) else None)
        for part in own.everything():
            for number, item in enumerate(part.model.kernels or []):
                for position, case in enumerate([] if isinstance(item, LaunchesItem) else item.cases):
                    where = part.where("kernels", number, "cases", position)
                    try:
                        total += sum(row.size for row in rows_of(case, where, part.sets))
                        if total > LARGEST:
                            raise TooMany
                    except ExpressionError as error:
                        self.say(where, str(error), "split the manifest up" if isinstance(error, TooMany) else None)
                        return

    def item(self, number: int, item: CallItem | KernelItem) -> None:
        """Check one item against every case."""
        at: At = ("kernels", number)
        for index, text in enumerate(item.where or []):
            self.condition((*at, "where", index), text)
        for name, argument in item.args.items():
            self.structure((*at, "args", name), argument)
        for place, kind, text in slots(item):
            self.syntax((*at, *place), kind, text)
        if self.problems:
            return
        conditions = tuple(
            (text, self.manifest.where(*at, "where", index)) for index, text in enumerate(item.where or [])
        )
        kept = False
        for _, row in self.manifest.rows(number):
            try:
                sample = next(combinations(row, conditions), None)
            except ExpressionError as error:
                self.say(error.where or row.where, f"where: {error}")
                return
            if sample is not None:
                kept = True
                self.row(at, item, row, sample)
        used = names_of(item)
        for position, case in enumerate(item.cases):
            self.unused((*at, "cases", position), case, used | names_of(*(case.where or [])), item)
        if not kept:
            self.say((*at, "where" if item.where else "cases"), "where drops every case: expected one that is left")

    def unused(self, at: At, case: WrittenCase, used: set[str], item: CallItem | KernelItem) -> None:
        every = "argument, grid or where" if hasattr(item, "grid") else "argument or where"
        for name in case.choices:
            if name not in used and not self.full:
                close = close_names(name, used - case.choices.keys())
                hint = f"did you mean {close[0]!r}?" if close else f"remove {name}, or use it"
                self.say((*at, name, KEY), f"no {every} uses {name!r} (used: {listed(used)})", hint)
        for name in case.shapes or []:
            shared = {each for row in self.manifest.sets.rows(name) for each in row.choices}
            if not shared & used:
                self.say((*at, "shapes"), f"no {every} uses a name of shape set {name!r}: {listed(shared)}")

    def structure(self, at: At, argument: Any) -> None:
        """Check what needs no names."""
        if isinstance(argument, Tensor):
            self.tensor(at, argument)
        elif isinstance(argument, (TupleArgument, ListArgument)):
            key = "tuple" if isinstance(argument, TupleArgument) else "list"
            for index, member in enumerate(argument.items):
                self.structure((*at, key, index), member)
        elif isinstance(argument, Constexpr):
            if isinstance(argument.constexpr, (Tensor, Descriptor)):
                self.say((*at, "constexpr"), "a tensor cannot be a constexpr: expected a value known when compiling")
            self.structure((*at, "constexpr"), argument.constexpr)
        elif isinstance(argument, Descriptor):
            self.structure((*at, "descriptor"), argument.descriptor)
            if len(argument.block) != len(argument.descriptor.shape):
                dims = len(argument.descriptor.shape)
                self.say(
                    (*at, "block"), f"block has {len(argument.block)} sizes, expected one for each of {dims} dimensions"
                )

    def tensor(self, at: At, tensor: Tensor) -> None:
        dims = len(tensor.shape)
        if tensor.stride is not None and len(tensor.stride) != dims:
            self.say((*at, "stride"), f"{len(tensor.stride)} strides for {dims} dimensions")
        if tensor.layout is not None:
            need = LAYOUTS[tensor.layout]
            if tensor.stride is not None:
                self.say((*at, "layout"), "both stride and layout are given: expected one of them")
            if dims < need or (dims != need and tensor.layout != "transposed"):
                least = "at least " if tensor.layout == "transposed" else ""
                self.say((*at, "layout"), f"{tensor.layout} needs {least}{need} dimensions, found {dims}")

    def syntax(self, at: At, kind: str, text: Any) -> None:
        if kind != "dtype":
            try:
                names(text)
            except ExpressionError as error:
                self.say(at, str(error))

    def row(self, at: At, item: CallItem | KernelItem, row: Row, sample: dict[str, Any]) -> None:
        """Check every expression and element type for one row: all names, and the first combination's values."""
        for place, kind, text in slots(item):
            if kind == "dtype":
                for dtype in values(row.choices[text]) if text in row.choices else [text]:
                    if dtype not in DTYPES:
                        problem = unknown_dtype(self.manifest.where(*at, *place), dtype)
                        self.say(problem.where, problem.problem, problem.hint)
                continue
            try:
                for name in sorted(names(text)) if kind != "grid" else []:
                    if name not in sample:
                        raise ExpressionError(unbound(name, sample))
                value = evaluate(text, sample) if kind != "grid" else 1
            except ExpressionError as error:
                self.say((*at, *place), str(error))
                continue
            if kind == "size" and (type(value) is not int or value < 0):
                found = f"{text!r} is {shown(value)}" if isinstance(text, str) else f"found {shown(value)}"
                self.say((*at, *place), f"{found}: expected an integer of at least 0")
