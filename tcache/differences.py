"""The fields in which a launch differs from a packed entry: a pure comparison of two entries' facts."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Difference", "differences"]


class Difference(NamedTuple):
    """One field in which a launch differs from a packed entry.

    Attributes:
        reason: which, as one of the words of :class:`~tcache.errors.CacheMiss`.
        text: both values, for a reader.
    """

    reason: str
    text: str


def differences(wanted: dict[str, Any], packed: dict[str, Any]) -> list[Difference]:
    """Return the fields in which a launch differs from a packed entry, the most telling first."""
    found = _source_differences(wanted, packed)
    if wanted["target"] != packed["target"]:
        found.append(Difference("target", f"target: {wanted['target']}, packed {packed['target']}"))
    names = [*wanted["signature"], *packed["signature"], *wanted["constants"], *packed["constants"]]
    for name in dict.fromkeys([*names, *wanted["attributes"], *packed["attributes"]]):
        found += _argument_differences(name, wanted, packed)
    ours, theirs = wanted["options"], packed["options"]
    found += [
        Difference("option", f"option {name}: {ours.get(name, 'none')}, packed {theirs.get(name, 'none')}")
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    return found


def _source_differences(wanted: dict[str, Any], packed: dict[str, Any]) -> list[Difference]:
    if wanted["source"] != packed["source"]:
        text = "source: the kernel, or something it calls or reads, was edited after packing"
        return [Difference("source", text)]
    if wanted["line"] != packed["line"]:
        text = f"line: the kernel starts at line {wanted['line']}, packed at line {packed['line']}"
        return [Difference("line", text)]
    if wanted["text"] != packed["text"]:
        text = "text: formatting or comments changed, or a function it calls moved to another line"
        return [Difference("text", text)]
    return []


def _argument_differences(name: str, wanted: dict[str, Any], packed: dict[str, Any]) -> list[Difference]:
    ours, theirs = _argument(name, wanted), _argument(name, packed)
    if ours == theirs:
        return []
    if ours.one != theirs.one and "none" not in (ours.kind, theirs.kind):
        return [Difference("one", f"argument {name}: {ours.shown}, packed {theirs.shown}")]
    found = []
    if ours.kind != theirs.kind:
        reason = "argument"
        if ours.pointer and theirs.pointer:
            reason = "dtype"
        elif ours.integer and theirs.integer:
            reason = "integer"
        found.append(Difference(reason, f"signature {name}: {ours.shown}, packed {theirs.shown}"))
    elif ours.constant != theirs.constant:
        found.append(Difference("constexpr", f"constant {name}: {ours.shown}, packed {theirs.shown}"))
    if ours.attributes != theirs.attributes and ours.kind != "constexpr" and theirs.kind != "constexpr":
        word = "divisibility" if ours.integer else "alignment"
        mine, other = (" ".join(side.attributes) or "not divisible by 16" for side in (ours, theirs))
        found.append(Difference(word, f"{word} {name}: {mine}, packed {other}"))
    return found


_ONE = "equal to 1"  # see tcache._triton.kernels.ONE


class _Argument(NamedTuple):
    kind: str
    constant: Any
    attributes: tuple[str, ...]

    @property
    def pointer(self) -> bool:
        return self.kind.startswith("*")

    @property
    def integer(self) -> bool:
        return self.kind[:1] in ("i", "u") and self.kind[1:].isdigit() and self.kind not in ("i1", "u1")

    @property
    def one(self) -> bool:
        """Whether an integer that is 1 was compiled in; Triton shows it as a constexpr of that value. Of a parameter
        with a type it only tells that it is 1.
        """
        return _ONE in self.attributes or (
            self.kind == "constexpr" and type(self.constant) is int and self.constant == 1
        )

    @property
    def shown(self) -> str:
        if self.kind != "constexpr":
            return f"{self.kind} {_ONE}" if self.one else self.kind
        return f"{self.constant} (compiled in)" if self.one else str(self.constant)


def _argument(name: str, facts: dict[str, Any]) -> _Argument:
    kind = facts["signature"].get(name, "constexpr" if name in facts["constants"] else "none")
    return _Argument(kind, facts["constants"].get(name), tuple(facts["attributes"].get(name, ())))
