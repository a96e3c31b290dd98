"""Triton's own autotune records: ``<kernel>.autotune.json``, which ``cache_results=True`` and
``TRITON_CACHE_AUTOTUNING=1`` read. Their names are taken from Triton, never built by hand.

Source: ``Autotuner.check_disk_cache`` in ``triton/runtime/autotuner.py``, equal in 3.6 to 3.9: the name covers
Triton, the backend, the kernel, the environment, the tuning key and every config, so any edit retunes everything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tcache._triton.probe import _Asked, _manager, _Name

__all__ = ["AutotuneRecord", "autotune_record"]


@dataclass(frozen=True)
class AutotuneRecord:
    """One record.

    Attributes:
        entry, file: directory in the Triton cache and name in it.
        text: its JSON.
        asked_for: whether the kernel itself says ``cache_results=True``; else Triton reads the record only with
            ``TRITON_CACHE_AUTOTUNING=1``.
    """

    entry: str
    file: str
    text: str
    asked_for: bool


class _File(_Name):
    """Notes the file that is asked for, too."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._key = key

    def get_file(self, filename: str) -> str | None:
        raise _Asked((self._key, filename))


class _Stop:
    """Stands in for what an autotuner launches."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def run(self, *_: Any, **__: Any) -> None:
        raise _Asked(None)


def autotune_record(
    autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], config: Any, timing: tuple[float, float, float]
) -> AutotuneRecord | str:
    """Return the record with which upstream's autotuner launches ``config`` for these arguments, or why there is none.

    Runs upstream's own ``run`` up to where it asks its cache, under the driver that is active.

    Args:
        autotuner: upstream's ``Autotuner``.
        args: positional arguments of the launch.
        kwargs: keyword arguments of the launch, without ``grid``.
        config: the winner, one of the autotuner's configs.
        timing: its median, p20 and p80 in milliseconds.
    """
    keys: list[Any] = []

    def check(tuning_key: Any, configs: list[Any], bench: Any) -> bool:
        if any(one.pre_hook for one in configs):
            raise _Asked("a config has a pre_hook, and upstream keeps no record then")
        keys.append(list(tuning_key))
        type(autotuner).check_disk_cache(autotuner, tuning_key, configs, bench)
        raise AssertionError("upstream did not ask its cache")

    fn, cache, results, asked_for = autotuner.fn, autotuner.cache, autotuner.cache_results, autotuner.cache_results
    autotuner.fn, autotuner.cache, autotuner.cache_results = _Stop(fn), {}, True
    autotuner.check_disk_cache = check
    try:
        with _manager(_File):
            autotuner.run(*args, grid=(1, 1, 1), warmup=True, **kwargs)
    except _Asked as asked:
        payload = asked.payload
    finally:
        autotuner.fn, autotuner.cache, autotuner.cache_results = fn, cache, results
        del autotuner.check_disk_cache
    if payload is None:
        return "one config is left after pruning, which upstream takes without a record"
    if isinstance(payload, str):
        return payload
    # upstream's order: quantiles 0.5, 0.2, 0.8
    data = {"key": keys[0], "configs_timings": [[vars(config), list(timing)]]}
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        return f"upstream's record cannot hold it: {error}"
    return AutotuneRecord(payload[0], payload[1], text, bool(asked_for))
