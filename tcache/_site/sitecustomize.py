"""Put before ``PYTHONPATH`` by ``tcache record``: arms the recorder, then runs the ``sitecustomize`` that it hides."""

import importlib.machinery
import importlib.util
import os
import sys


def _arm() -> None:
    try:
        from tcache.startup import arm
    except ImportError:
        # another environment's interpreter: record with the tcache installed there
        print(f"tcache: {sys.executable} is not recorded: tcache is not installed there", file=sys.stderr)  # noqa: T201
    else:
        arm()


def _chain() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("TCACHE_RECORD"):
    _arm()
_chain()
