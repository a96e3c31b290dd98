"""From a kernel object to a kernel ref: the inverse of importing one. Standard library only.

A module installed in a ``site-packages`` directory is named by its dotted name. A module of the project is named by
its file, relative to a folder, so that nobody has to put the project on ``sys.path`` to find it again.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["dotted_name", "found_again", "module_named", "module_of", "ref_of", "values_in"]

_MAINS = ("__main__", "__mp_main__")


def dotted_name(path: Path) -> str:
    """Return the module name that a file's packages (directories with ``__init__.py``) give it."""
    path = path.resolve()
    names = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names)


def module_of(function: Any) -> str:
    """Return the name of a function's module; of a script the name that importing its file would give.

    The same script is ``__main__`` when it serves, ``__mp_main__`` in a spawned worker and ``serve`` when a tool
    imports it: one kernel, one identity.
    """
    name = str(function.__module__)
    path = getattr(sys.modules.get(name), "__file__", None)
    return _real_name(name, Path(path)) if path else name


def module_named(name: str) -> ModuleType:
    """Return the module of a name, importing it if need be: the running script under the name it has for tools.

    Importing a script again would run it again, and its kernels there are not those that it launches.
    """
    for main in _MAINS:
        module = sys.modules.get(main)
        path = getattr(module, "__file__", None)
        if module is not None and path and _real_name(main, Path(path)) == name:
            return module
    return sys.modules.get(name) or importlib.import_module(name)


def values_in(module: Any) -> list[Any]:
    """Return what a module, or what stands for one in ``sys.modules``, holds, without asking it: one that loads lazily
    would then load.
    """
    try:
        return list(object.__getattribute__(module, "__dict__").values())
    except AttributeError:
        return []


def ref_of(kernel: Any, function: Any, folder: Path) -> tuple[str, str | None]:
    """Return the ref of a kernel object, and why it cannot be found again under it (None when it can).

    Args:
        kernel: the object that was launched: a jit function, perhaps under autotuners and heuristics; or a function or
            class among its arguments.
        function: the Python function below it, or the class.
        folder: what a file's path shall be relative to.
    """
    module = sys.modules.get(str(function.__module__)) or _hidden(function)
    attribute = _attribute(module, kernel, function)
    code = getattr(function, "__code__", None)
    path = str(getattr(module, "__file__", None) or getattr(code, "co_filename", ""))
    where = _module_ref(str(function.__module__), path, folder)
    if isinstance(module, SimpleNamespace):
        where = _relative(Path(path), folder)
    if attribute is None:
        reason = (
            "it was made inside a function" if "<locals>" in function.__qualname__ else "no module has it as a name"
        )
        return f"{where}:{function.__qualname__}", f"the kernel cannot be imported: {reason}"
    if not os.path.isfile(path):
        return f"{where}:{attribute}", "the kernel cannot be imported: its module has no file"
    return f"{where}:{attribute}", None


def found_again(kernel: Any, function: Any) -> str | None:
    """Return the dotted name, in its function's module, under which a kernel, function or class is found again.

    Args:
        kernel, function: see :func:`ref_of`.
    """
    return _attribute(sys.modules.get(str(function.__module__)), kernel, function)


def _module_ref(name: str, path: str, folder: Path) -> str:
    file = Path(path)
    known = _real_name(name, file)
    if not file.is_file() or file.suffix != ".py" or _installed(file) or dotted_name(file) != known:
        return known
    return _relative(file, folder)


def _relative(file: Path, folder: Path) -> str:
    return Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()


def _hidden(function: Any) -> SimpleNamespace | None:
    """Return the module of a function as far as it is one that ``sys.modules`` lacks: generated, and loaded by path."""
    names = getattr(function, "__globals__", {})
    file = names.get("__file__")
    known = isinstance(file, str) and file.endswith(".py") and os.path.isfile(file)
    return SimpleNamespace(**names) if known and names.get("__name__") == function.__module__ else None


def _real_name(name: str, file: Path) -> str:
    if name not in _MAINS:
        return name
    spec = getattr(sys.modules.get(name), "__spec__", None)
    # python -m package.module has a spec, python file.py has none
    return str(spec.name) if spec is not None and spec.name not in _MAINS else dotted_name(file)


def _installed(file: Path) -> bool:
    """Return whether a file belongs to an installed distribution: its top package lies beside ``*.dist-info``."""
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    if any(part in ("site-packages", "dist-packages") for part in folder.parts):
        return True
    if folder not in _installs:
        _installs[folder] = any(folder.glob("*.dist-info"))  # pip install --target
    return _installs[folder]


_installs: dict[Path, bool] = {}


def _attribute(module: Any, kernel: Any, function: Any) -> str | None:
    """Return under which dotted name a module has ``kernel``, or has something that wraps it (``name.fn``)."""
    for name in () if module is None else (str(function.__qualname__), *vars(module)):
        value = module
        for part in name.split("."):
            value = getattr(value, part, None) if part.isidentifier() else None
        if value is None:
            continue
        path = name
        for _ in range(8):  # decorators: autotune over heuristics over jit
            if value is kernel:
                return str(path)
            value, path = getattr(value, "__dict__", {}).get("fn"), f"{path}.fn"
            if value is None:
                break
    return None
