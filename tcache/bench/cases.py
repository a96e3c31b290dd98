"""One case of a ``call:`` item, measured: its result checked, the wrapper timed against torch, kernels described."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tcache._triton.kernels import interpreting
from tcache._triton.launched import launched_kernels
from tcache.active import active
from tcache.autotuner import Autotuner
from tcache.bench.agreement import Agreement, compare, tensors_of
from tcache.bench.peaks import peak_of
from tcache.bench.precision import float32_products
from tcache.bench.roofline import Quantiles
from tcache.bench.timing import Plan, interleave
from tcache.compile import one_line
from tcache.decide import Best
from tcache.errors import GPUMissing, ManifestError, TcacheError
from tcache.keys.config import config_key
from tcache.lookup import current_gpu, lookup
from tcache.manifest import Descriptor, ListArgument, Tensor, TupleArgument
from tcache.replay.arguments import describe
from tcache.replay.companions import call_companion, companion, real_arguments
from tcache.replay.launches import load_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tcache._triton.launched import Launched
    from tcache.bench.machine import Machine
    from tcache.manifest import Case

__all__ = ["Measured", "Options", "Timed", "dtype_of", "measure_case"]

SETS = 4
"""Most sets of random inputs that the timed calls go through."""


@dataclass(frozen=True)
class Options:
    """What is measured of each case.

    Attributes:
        plan: how much.
        compiled: whether ``torch.compile`` of the torch function is timed, too.
        more: further alternatives, timed in turns with the others: given a case and one set of its arguments, returns
            calls by name.
    """

    plan: Plan = field(default_factory=Plan)
    compiled: bool = True
    more: Callable[[Case, dict[str, Any]], dict[str, Callable[[], Any]]] | None = None


@dataclass(frozen=True)
class Timed:
    """The times of one alternative.

    Attributes:
        ms: percentiles in milliseconds.
        host_ms: median of the milliseconds that the host took to make a call.
        gpu_only: whether ``ms`` is the GPU's time alone, see :mod:`tcache.bench.timing`.
        error: why there are no times.
    """

    ms: Quantiles | None = None
    host_ms: float | None = None
    gpu_only: bool = False
    error: str | None = None


@dataclass
class Measured:
    """What became of a case.

    Attributes:
        case: as messages show it.
        where: ``file:line:column`` in the manifest.
        kernel: the wrapper's name.
        shape: the case's values by name.
        dtype: of the case's first tensor of numbers.
        peak: the matmul peak it is measured against.
        flops, moved: operations and least bytes by the wrapper's formulas.
        agreement: how the result compares with ``against``; None where there is no reference.
        against: what the result was compared with: ``reference`` or ``torch``.
        times: ``tcache``, ``torch`` and ``compiled``.
        torch_is: name of the function that ``torch`` stands for.
        launches: the kernels launched: resources, config, and how the config was chosen.
        error: why the case failed, or its result is wrong.
    """

    case: str
    where: str
    kernel: str
    shape: dict[str, Any]
    dtype: str | None
    peak: str
    flops: int | None = None
    moved: int | None = None
    agreement: Agreement | None = None
    against: str | None = None
    times: dict[str, Timed] = field(default_factory=dict)
    torch_is: str | None = None
    launches: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def of(cls, case: Case) -> Measured:
        """Return a case of which nothing is known yet."""
        dtype = dtype_of(case)
        name = case.ref.rpartition(":")[2]
        return cls(str(case), case.where, name, dict(case.scope), dtype, peak_of(dtype))


def dtype_of(case: Case) -> str | None:
    """Return the dtype of a case's first tensor of numbers, floating or int8: activations come first, by custom."""

    def specs(values: Any) -> Iterator[Any]:
        for value in values:
            if isinstance(value, (TupleArgument, ListArgument)):
                yield from specs(value.items)
            elif isinstance(value, Descriptor):
                yield value.descriptor
            elif isinstance(value, Tensor):
                yield value

    for spec in specs(getattr(case.item, "args", {}).values()):
        dtype = str(case.scope.get(spec.dtype, spec.dtype))
        if "float" in dtype or dtype == "int8":
            return dtype
    return None


def measure_case(case: Case, machine: Machine, options: Options) -> Measured:
    """Measure a case; what goes wrong is told in the result.

    Raises:
        GPUMissing: the GPU faulted and is beyond use; the message says at which case.
    """
    found = Measured.of(case)
    try:
        _Bench(case, machine, options, found).run()
    except Exception as error:
        text = error.message if isinstance(error, TcacheError) else one_line(error)
        found.error = text.removeprefix(f"{case.where}: ")
        if machine.is_faulted():
            raise GPUMissing(
                f"{case}: the GPU faulted: {found.error}", "the cases after it were not run: leave it out with --case"
            ) from error
    gc.collect()
    machine.release_memory()
    return found


class _Bench:
    """The steps of measuring one case; each writes into ``found``."""

    def __init__(self, case: Case, machine: Machine, options: Options, found: Measured) -> None:
        self._case, self._machine, self._options, self._found = case, machine, options, found
        self._wrapper = load_target(case)

    def run(self) -> None:
        given = self._inputs(0)
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(given))
        self._found.flops = call_companion(self._case, self._wrapper, "flops", given)
        self._found.moved = call_companion(self._case, self._wrapper, "bytes", given)
        result = self._first(given)
        self._check(result, given)
        del result
        count = max(1, min(SETS, int(0.4 * self._machine.free_bytes() / max(1, 3 * size))))
        sets = [given, *(self._inputs(number) for number in range(1, count))]
        self._time(sets)

    def _inputs(self, seed: int) -> dict[str, Any]:
        """Make the case's arguments: the same for one seed, also what ``f_inputs`` draws from torch's generator."""
        import torch

        torch.manual_seed(seed)
        return real_arguments(self._case, self._wrapper, self._machine.device)

    def _first(self, given: dict[str, Any]) -> Any:
        """Launch once and note what was launched. A result of None means that the arguments were written."""
        with launched_kernels() as noted:
            try:
                result = self._wrapper(**given)
                self._machine.synchronize()
            except TcacheError:
                raise
            except (TypeError, ValueError) as error:
                raise ManifestError(
                    self._case.where, f"{self._case.ref} refused {describe(self._case)}: {one_line(error)}"
                ) from error
        self._found.launches = [_described(launch) for launch in noted.found]
        return given if result is None else result

    def _check(self, result: Any, given: dict[str, Any]) -> None:
        """Compare the first result with the reference's, made from the same inputs anew: a wrapper may write them."""
        tolerance = call_companion(self._case, self._wrapper, "tolerance", given)
        for kind in ("reference", "torch"):
            if companion(self._case, self._wrapper, kind) is None:
                continue
            same = self._inputs(0)
            try:
                with float32_products(tf32=False) if kind == "reference" else contextlib.nullcontext():
                    wanted = call_companion(self._case, self._wrapper, kind, same)
            except Exception as error:
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                continue  # a reference in float32 may be many times as large: torch's own function stands in
            agreement = compare(result, same if wanted is None else wanted, tolerance)
            self._found.agreement, self._found.against = agreement, kind
            if agreement.problem is not None:
                self._found.error = f"wrong result: {agreement.problem}"
            return

    def _time(self, sets: list[dict[str, Any]]) -> None:
        """Time the wrapper and what it is compared with; of an alternative that fails, the reason is noted."""
        functions: dict[str, Callable[..., Any]] = {"tcache": self._wrapper}
        others = (companion(self._case, self._wrapper, kind) for kind in ("torch", "reference"))
        torch_function = next(filter(None, others), None)
        if torch_function is not None:
            self._found.torch_is = getattr(torch_function, "__name__", None)
            functions["torch"] = torch_function
            if self._options.compiled:
                functions["compiled"] = torch_function
        makers: dict[str, Callable[[], list[Callable[[], Any]]]] = {
            name: partial(_calls, function, sets, compiled=name == "compiled") for name, function in functions.items()
        }
        if self._options.more is not None:
            more = [self._options.more(self._case, given) for given in sets]
            makers |= {name: partial(list, [calls[name] for calls in more]) for name in more[0]}
        live: dict[str, list[Callable[[], Any]]] = {}
        for name, make in makers.items():
            try:
                calls = make()
                for _ in range(2):  # compiles, chooses algorithms, loads modules
                    calls[0]()
                self._machine.synchronize()
            except Exception as error:
                if name == "tcache" or self._machine.is_faulted():
                    raise
                self._found.times[name] = Timed(error=one_line(error))
                continue
            live[name] = calls
        series = interleave(list(live.values()), self._machine.clock, self._options.plan)
        for name, one in zip(live, series, strict=True):
            host = Quantiles.of([sample.host_ms for sample in one.samples]).median
            self._found.times[name] = Timed(Quantiles.of(one.times()), host, one.ahead)


def _calls(function: Callable[..., Any], sets: list[dict[str, Any]], *, compiled: bool) -> list[Callable[[], Any]]:
    chosen = _compiled(function) if compiled else function
    return [partial(chosen, **given) for given in sets]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.compile`` of a function for the sizes it is called with, forgetting what was compiled before."""
    import torch

    torch.compiler.reset()
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def _described(launch: Launched) -> dict[str, Any]:
    """Describe a launch: resources, the winning config, and how it came to be chosen.

    ``chosen``: ``tuned`` for this very shape, of the ``nearest`` tuned shape, the ``first`` of the list, the ``only``
    one; ``triton`` for an autotuner that is not tcache's; None without an autotuner.
    """
    tuner = launch.tuner
    config = getattr(tuner, "best_config", None)
    return {
        **launch.facts(),
        "config": None if config is None else config_key(config),
        "chosen": None if tuner is None else _how(tuner, launch),
    }


def _how(tuner: Any, launch: Launched) -> str:
    if not isinstance(tuner, Autotuner):
        return "triton"
    if len(tuner.configs) == 1:
        return "only"
    if interpreting():
        return "first"
    known = lookup(tuner, launch.args, {**launch.kwargs, "grid": launch.grid}, current_gpu(), active().stores)
    if isinstance(known.verdict, Best):
        return "tuned"
    return "nearest" if known.near else "first"
