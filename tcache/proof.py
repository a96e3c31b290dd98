"""What the fresh process of :mod:`tcache.verify` does: replay cases through the very code a service runs.

Every launch goes two ways. Triton's: its own binder and key, through the overlay to the bundle. And the index's, where
the bundle says that a launch may be answered so: through :mod:`tcache.prebaked` to the end, on a driver that launches
nothing. Both must lead to the same entry.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcache._triton.cache import compile_events
from tcache._triton.distribution import distribution
from tcache._triton.kernels import Heuristics, jit_of, through_decorators
from tcache._triton.load import forget_kernels
from tcache._triton.native import helper_sources
from tcache._triton.probe import compilation_of
from tcache._triton.specialize import specialize, unusual
from tcache.active import active
from tcache.adopting import adopt
from tcache.autotuner import Autotuner
from tcache.differences import differences
from tcache.environment import Rejected
from tcache.errors import BundleError, CacheMiss, KernelError, TcacheError
from tcache.explain import facts_of
from tcache.keys.config import config_key
from tcache.keys.gpu import GPU
from tcache.keys.source import source_identity
from tcache.lookup import named_arguments, shape_of
from tcache.manifest import load_manifest
from tcache.prebaked import not_usable, prebaked
from tcache.replay import launches, machine

if TYPE_CHECKING:
    from tcache.bundle import Bundle, Index
    from tcache.replay import Launch

__all__ = ["Proof", "child"]


@dataclass
class Proof:
    """What the replay for one GPU found.

    Attributes:
        launches: launches replayed.
        hits: those that found their best config, their entry and their native helpers in the bundle, on every way.
        direct: names of the entries that launches were led to by the index alone.
        misses: ``{"where", "launch", "why"}`` of the others.
        notes: what a reader should know.
        replayed: what was read, as rows of ``ref``, ``shape``, ``config`` and ``entry``.
    """

    launches: int = 0
    hits: int = 0
    direct: list[str] = field(default_factory=list)
    misses: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replayed: list[dict[str, Any]] = field(default_factory=list)


def child() -> None:
    """Replay what standard input asks for and print a :class:`Proof`."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what kernel files print is no answer
    answer: dict[str, Any]
    try:
        answer = asdict(_replay(request))
    except TcacheError as error:
        answer = {"error": error.message, "hint": error.hint}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _replay(request: dict[str, Any]) -> Proof:
    gpu = GPU(**request["gpu"])
    settings = active()
    if not settings.bundles:
        reason = settings.skipped[0].reason
        raise BundleError(
            f"the bundle cannot serve this process: {reason}", "verify with the Triton and Python it was packed for"
        )
    proof = Proof()
    witness = _Witness(settings.bundles[0], proof)
    adopted: set[str] = set()
    compiled: list[str] = []
    with (
        machine(gpu, launches=True),
        compile_events(lambda name, hit: None if hit else compiled.append(name)),
    ):
        for manifest in request["manifests"]:
            for case in load_manifest(Path(manifest)).cases(gpu.name):
                for launch in launches(case):
                    proof.launches += 1
                    with contextlib.suppress(KernelError):  # nothing autotuned, or not by triton.autotune
                        adopted |= {*adopt(launch.kernel)} if _served(launch.kernel) is None else set()
                    why = witness.examine(launch)
                    if why is None and compiled:
                        why = f"compiled {', '.join(compiled)}"
                    compiled.clear()
                    if why is None:
                        proof.hits += 1
                    else:
                        proof.misses.append({"where": launch.where, "launch": str(case), "why": why})
    if adopted:
        names = ", ".join(sorted(adopted)[:3]) + (", …" if len(adopted) > 3 else "")
        proof.notes.append(f"{len(adopted)} kernels are tuned by others and hit after tcache.adopt only: {names}")
    return proof


def _served(kernel: Any) -> Any:
    """Return the kernel's autotuner if its winners come from the bundle without ``tcache.adopt``, else None."""
    while isinstance(kernel, Heuristics):
        kernel = kernel.fn
    return kernel if isinstance(kernel, Autotuner) else None


class _Choice:
    """Follows the config that a launch has just used, and notes the shape key it was chosen by."""

    shape: str | None = None

    def __call__(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        self.shape = str(shape_of(autotuner, named_arguments(autotuner, args, kwargs)))
        return [autotuner.best_config]


class _Witness:
    """Compares what launches do with what a bundle says.

    Args:
        bundle: the bundle.
        proof: where to note what was read.
    """

    def __init__(self, bundle: Bundle, proof: Proof) -> None:
        self._bundle = bundle
        self._proof = proof
        self._entries = bundle.entries
        self._seen: set[tuple[str | None, ...]] = set()
        self._direct: set[str] = set()
        self._described: dict[str, str | None] = {}
        self._index: Index | None = None
        with contextlib.suppress(BundleError):  # reported as damaged, and a service does without it
            self._index = bundle.index()
        self._answers = not_usable(bundle, distribution())
        if self._answers is not None:
            proof.notes.append(f"the index answers no launch, Triton's way was proven alone: {self._answers}")

    def examine(self, launch: Launch) -> str | None:
        """Go through one launch on every way that a service may take; return why it missed, None for a hit."""
        try:
            forget_kernels(jit_of(launch.kernel))
            kernel = launch.kernel.run(*launch.args, grid=(1, 1, 1), warmup=True, **launch.kwargs)
            entry = _entry_of(kernel)
            if entry not in self._entries:
                return f"entry {entry} did not come from the bundle"
            return self._helpers_problem(kernel) or self._index_problem(launch, kernel, entry)
        except CacheMiss as miss:
            return str(miss)
        except TcacheError as error:
            return error.message
        except Exception as error:
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

    def _helpers_problem(self, kernel: Any) -> str | None:
        for source in helper_sources([kernel], self._bundle.hip_library):
            helper = self._bundle.helper(source=source.digest)
            if helper is None:
                return f"native helper {source.name} (source {source.digest[:12]}) is not packed"
            if isinstance(helper, Rejected):
                return helper.reason
        return None

    def _index_problem(self, launch: Launch, kernel: Any, entry: str) -> str | None:
        choice = _Choice()
        ((function, kwargs, config),) = through_decorators(launch.kernel, launch.args, launch.kwargs, choice)
        key = None if config is None else config_key(config)
        row = (launch.ref, choice.shape, key, entry)
        if row not in self._seen:
            self._seen.add(row)
            self._proof.replayed.append(dict(zip(("ref", "shape", "config", "entry"), row, strict=True)))
        if self._index is None:
            return None
        if entry not in self._index:
            return f"index.json does not describe entry {entry}"
        facts = self._index.fact(entry)
        if entry not in self._described:
            self._described[entry] = _misdescribed(facts, function, launch.args, kwargs)
        problem = self._described[entry]
        if problem is not None:
            return f"index.json describes entry {entry} as another: {problem}"
        if facts.get("direct") is not True or self._answers is not None:
            return None
        return self._direct_problem(launch, function, kwargs, config, entry)

    def _direct_problem(
        self, launch: Launch, function: Any, kwargs: dict[str, Any], config: Any, entry: str
    ) -> str | None:
        """Launch through the index; return how that differs from Triton's way."""
        packed = prebaked()
        done = None if packed is None else packed.launch(function, launch.args, kwargs, (1, 1, 1))
        if done is None:
            assert self._index is not None
            why = _unanswered(function, launch.args, kwargs, self._index.fact(entry))
            return f"index.json says that it answers for entry {entry}, and does not: {why}"
        if _entry_of(done[0]) != entry:
            return f"index.json answers with entry {_entry_of(done[0])}, Triton's own key is {entry}"
        tuner = _served(launch.kernel)
        if tuner is not None:
            again = launch.kernel.run(*launch.args, grid=(1, 1, 1), **launch.kwargs)
            if _entry_of(again) != entry:
                return f"a launch takes entry {_entry_of(again)}, Triton's own key is {entry}"
            if again is not done[0] and type(tuner) is Autotuner and config is not None and config.pre_hook is None:
                return f"a launch does not take entry {entry} through index.json"
        if entry not in self._direct:
            self._direct.add(entry)
            self._proof.direct.append(entry)
        return None


def _entry_of(kernel: Any) -> str:
    return str(Path(next(iter(kernel.metadata_group.values()))).parent.name)


def _misdescribed(facts: dict[str, Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the fields in which an entry's facts are not those of the launch that reads it."""
    try:
        found = differences(facts_of(compilation_of(function, args, kwargs)), facts)
    except (KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(row.text for row in found) or None


def _unanswered(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], facts: dict[str, Any]) -> str:
    """Say why the index does not answer a launch whose entry's row says so."""
    problem = unusual()
    if problem is not None:
        return problem
    if function.pre_run_hooks:
        return "the kernel has hooks that run before each launch"
    made = specialize(function, args, kwargs)
    if made is None:
        return "an argument, or a compile option, is of a kind that only Triton specializes"
    if facts["source"] != source_identity(function):
        return "the source identity is another"
    found = differences({**facts, **made.facts()}, facts)
    return "; ".join(row.text for row in found) or "its row is not found by the launch's specialization"
