"""A minimal autotuner with a persistent cache, as kernel libraries write it for themselves.

After FlexGEMM's persistent autotuner: winners in a JSON file by the text of the key; looked up in ``run`` on every
launch by the values of the key arguments and the dtypes, then launched through ``fn.run``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import triton
from triton.runtime.autotuner import Autotuner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class PersistentAutotuner(Autotuner):
    path: Path
    winners: dict[str, Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        every = {**self.nargs, **kwargs}
        given = {name: value for name, value in every.items() if name in self.arg_names}
        key = [given[name] for name in self.keys if name in given]
        key += [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
        key = tuple(key)
        if key not in self.cache:
            known = self.winners.get(str(key))
            if known is None:
                timings = {config: self._bench(*args, config=config, **kwargs) for config in self.configs}
                best = min(timings, key=timings.get)
                self.winners[str(key)] = {**best.kwargs, "num_warps": best.num_warps, "num_stages": best.num_stages}
                self.path.write_text(json.dumps(self.winners))
                known = self.winners[str(key)]
            options = {name: value for name, value in known.items() if name not in ("num_warps", "num_stages")}
            self.cache[key] = triton.Config(options, num_warps=known["num_warps"], num_stages=known["num_stages"])
        config = self.cache[key]
        self.best_config = config
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result


def persistent_autotune(
    path: Path, configs: list[Any], key: list[str], do_bench: Callable[..., Any] | None = None
) -> Callable[[Any], PersistentAutotuner]:
    """Decorate a jit function; winners are kept in ``path``."""

    def decorator(fn: Any) -> PersistentAutotuner:
        tuner = PersistentAutotuner(fn, fn.arg_names, configs, key, None, None, do_bench=do_bench)
        tuner.path = path
        tuner.winners = json.loads(path.read_text()) if path.exists() else {}
        return tuner

    return decorator
