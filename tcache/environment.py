"""What must match between the process that packed and the one that loads: facts, and a pure decision over them."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Accepted", "Environment", "Rejected", "compatible", "environment_fields", "libc", "library_tag"]


@dataclass(frozen=True)
class Accepted:
    """A bundle or file that may be used."""


@dataclass(frozen=True)
class Rejected:
    """A bundle or file that may not be used, and why.

    Attributes:
        reason: why, for a reader.
        kind: the same as one word: ``triton``, ``python``, ``platform``, ``libc``, ``variable``, ``bundle`` (the
            bundle as a whole is absent, foreign or corrupt), ``helper`` (it cannot be loaded from where it is) or
            ``damaged`` (one file is not what was packed).
    """

    reason: str
    kind: str = "damaged"


@dataclass(frozen=True)
class Environment:
    """What must match for a bundle's entries to be found and its native helpers to load.

    Attributes:
        triton: release, such as ``3.6.0``.
        python: tag of the interpreter's ABI, such as ``cpython-312``; each Python minor has its own ``libtriton``.
        platform: such as ``linux-x86_64``.
        libc: such as ``glibc 2.36``: what the native helpers were built against.
        variables: environment variables that are part of Triton's keys.
        ptxas: ``ptxas --version``'s release line, None where no CUDA target is packed. For the reader's eye.
        distribution: digest of the installed Triton, see :mod:`tcache._triton.distribution`; empty where unknown.
        computed: what that Triton computes from its own files for its keys, see :mod:`tcache._triton.spared`.
    """

    triton: str
    python: str
    platform: str
    libc: str
    variables: dict[str, str] = field(default_factory=dict)
    ptxas: str | None = None
    distribution: str = ""
    computed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def current(
        cls,
        triton: str,
        variables: dict[str, str],
        ptxas: str | None = None,
        distribution: str = "",
        computed: dict[str, str] | None = None,
    ) -> Environment:
        """Gather the facts of this process."""
        here = sysconfig.get_platform().replace(".", "_")
        return cls(triton, library_tag(), here, libc(), variables, ptxas, distribution, computed or {})

    @classmethod
    def parse(cls, row: Any) -> Environment:
        """Return the environment in the JSON object that :func:`environment_fields` wrote.

        Raises:
            TypeError: a field is missing, unknown or of another type.
        """
        found = cls(**row)
        texts = (
            found.triton,
            found.python,
            found.platform,
            found.libc,
            found.distribution,
            "" if found.ptxas is None else found.ptxas,
        )
        for name in ("variables", "computed"):
            if not isinstance(getattr(found, name), dict):
                raise TypeError(f"environment.{name} is no object")
        for text in (*texts, *found.variables, *found.variables.values(), *found.computed.values()):
            if not isinstance(text, str):
                raise TypeError(f"environment: {text!r} is no text")
        return found


def environment_fields(environment: Environment) -> dict[str, Any]:
    """Return an environment as the JSON fields of ``bundle.json``."""
    return asdict(environment)


def library_tag() -> str:
    """Return the interpreter's ABI tag, ``cpython-312``, as native helpers carry it in their names."""
    return f"{sys.implementation.name}-{sys.version_info.major}{sys.version_info.minor}"


def libc() -> str:
    """Return this process's C library, ``glibc 2.36``; ``unknown`` where nothing says it (musl)."""
    try:
        found = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        found = None
    return found or " ".join(platform.libc_ver()).strip() or "unknown"


def compatible(bundle: Environment, here: Environment) -> Accepted | Rejected:
    """Decide whether a bundle's entries can hit in this process.

    Of the C library only the family decides: what a native helper needs of it is read off the helper itself
    (:meth:`tcache.bundle.Bundle.helper`). ``ptxas`` is part of Triton's key and does not decide.
    """
    for kind, what, theirs, ours in (
        ("triton", "Triton", bundle.triton, here.triton),
        ("python", "Python", bundle.python, here.python),
        ("platform", "platform", bundle.platform, here.platform),
        ("libc", "C library", _family(bundle.libc), _family(here.libc)),
    ):
        if theirs != ours:
            return Rejected(f"packed for {what} {theirs}, this process has {ours}", kind)
    for name in sorted({*bundle.variables, *here.variables}):
        theirs, ours = bundle.variables.get(name, "unset"), here.variables.get(name, "unset")
        if theirs != ours:
            return Rejected(f"packed with {name} {theirs}, this process has {ours}", "variable")
    return Accepted()


def _family(text: str) -> str:
    return text.partition(" ")[0]
