"""The exception tree: every refusal is a :class:`TcacheError` that says what to do next."""

from __future__ import annotations

__all__ = [
    "BundleError",
    "CacheMiss",
    "CompilerMissing",
    "GPUMissing",
    "KernelError",
    "ManifestError",
    "MissingEntries",
    "NothingLeft",
    "OutputError",
    "StoreError",
    "TcacheError",
    "UnknownGPU",
    "UnsupportedTriton",
    "UnsupportedValue",
    "UsageError",
]


class TcacheError(Exception):
    """Root of tcache's exceptions.

    Args:
        message: one line saying what is wrong, with file and line where one applies.
        hint: one line saying what to do next; the CLI prints it as ``hint: …``.

    Attributes:
        exit_code: what the command line exits with (2: bad input, 1: an honest negative result).
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(TcacheError):
    """A command line or setting that cannot be honoured."""


class ManifestError(TcacheError):
    """A shape manifest that does not say what tcache needs.

    Args:
        where: ``file:line:column`` of the offending text, or the file alone.
        problem: what was found and what was expected.
    """

    def __init__(self, where: str, problem: str, hint: str | None = None) -> None:
        super().__init__(f"{where}: {problem}", hint)
        self.where = where
        self.problem = problem


class KernelError(TcacheError):
    """A kernel reference that does not lead to a kernel, or a wrapper that cannot be replayed."""


class NothingLeft(TcacheError, ValueError):
    """Pruning left no config of an autotuner; a ``ValueError`` too, which is what Triton's autotuner ends in."""


class UnknownGPU(TcacheError):
    """A GPU name that neither the catalogue nor the store knows."""


class UnsupportedTriton(TcacheError):
    """The installed Triton is missing, or is a release whose keys tcache does not know."""


class UnsupportedValue(TcacheError):
    """A value that has no canonical text, so it cannot be part of a persistent key."""


class StoreError(TcacheError):
    """A store file that is corrupt, foreign or cannot be written."""


class BundleError(TcacheError):
    """A bundle that is corrupt, foreign or incomplete."""


class MissingEntries(BundleError):
    """Entries that are to be packed and are not in the Triton cache.

    Args:
        missing: one line for each: kernel, shape key, config, entry.
        total: how many entries are wanted.

    Attributes:
        details: the first of them, and how many more there are.
    """

    def __init__(self, missing: list[str], total: int, hint: str) -> None:
        shown = missing[:20]
        more = [f"… and {len(missing) - len(shown)} more"] if len(missing) > len(shown) else []
        super().__init__(f"{len(missing)} of {total} entries are not in the Triton cache", hint)
        self.details = (*shown, *more)


class OutputError(TcacheError):
    """An output that exists already or cannot be written."""


class CompilerMissing(TcacheError):
    """Native helpers have to be built, and there is no C compiler."""


class GPUMissing(TcacheError):
    """Something needs a GPU, and this process has none."""


class CacheMiss(TcacheError):
    """A launch that would tune or compile in a mode that forbids it.

    Args:
        message: what missed and why, on one line.
        kernel: the kernel's qualified name, where known.
        details: further lines: specialization, nearest entry, the fields that differ.
        hint: what to do next.
        reasons: the same as words for programs, most telling first. No best config: ``untuned``, ``stale``,
            ``capturing``. The nearest entry differs: ``source``, ``line``, ``text``, ``target``, ``dtype``,
            ``integer`` (width), ``one`` (an integer is 1, or was), ``divisibility`` (of an integer by 16),
            ``alignment`` (of a pointer to 16 bytes), ``constexpr``, ``argument`` (None or of another kind),
            ``option``, ``build`` (nothing that tcache knows). No such entry: ``kernel``. A bundle or file was not
            used: ``triton``, ``python``, ``platform``, ``libc``, ``variable`` (of the environment), ``bundle``,
            ``damaged``. A native helper is missing: ``helper``.
        entry: name of the entry that was asked for.
        nearest: name of the nearest packed entry.
        manifest: YAML lines that would cover the launch, for the list ``kernels:`` of a shape manifest; empty where
            the launch cannot be spelled out.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        kernel: str | None = None,
        details: tuple[str, ...] = (),
        hint: str | None = None,
        reasons: tuple[str, ...] = (),
        entry: str | None = None,
        nearest: str | None = None,
        manifest: str = "",
    ) -> None:
        super().__init__(message, hint)
        self.kernel = kernel
        self.details = details
        self.reasons = reasons
        self.entry = entry
        self.nearest = nearest
        self.manifest = manifest

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in self.details)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)
