"""Kernel refs: from ``package.module:function`` or ``path/to/file.py:function`` to the object."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tcache.errors import KernelError

__all__ = ["KernelRef", "forget_modules", "load", "module_of"]


@dataclass(frozen=True)
class KernelRef:
    """A reference to a kernel or wrapper.

    Attributes:
        module: dotted module name, or a path ending in ``.py``.
        attribute: the function's name in it, dotted for nested ones.
    """

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"

    @property
    def is_path(self) -> bool:
        return self.module.endswith(".py")

    @classmethod
    def parse(cls, text: str) -> KernelRef:
        """Parse a reference.

        Raises:
            KernelError: it has another form.
        """
        module, colon, attribute = text.rpartition(":")
        names = attribute.split(".")
        dotted = all(part.isidentifier() for part in module.split("."))
        if not colon or not all(name.isidentifier() for name in names) or not (module.endswith(".py") or dotted):
            raise KernelError(
                f"{text!r} is not a kernel ref: expected package.module:function or path/to/file.py:function"
            )
        return cls(module, attribute)


def load(ref: KernelRef, folder: Path) -> Any:
    """Import what a ref names.

    Args:
        ref: the reference; a path is relative to ``folder``.
        folder: the manifest's directory.

    Raises:
        KernelError: no such file, module or function, or its import failed; the message has the failing line.
    """
    found: Any = module_of(ref, folder)
    for name in ref.attribute.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, [n for n in vars(found) if not n.startswith("_")], n=1)
            hint = f"did you mean {close[0]!r}?" if close else None
            raise KernelError(f"{ref.module} has no function {name!r}", hint)
        found = getattr(found, name)
    return found


def module_of(ref: KernelRef, folder: Path) -> ModuleType:
    """Import the module that a ref leads into.

    Raises:
        KernelError: no such file or module, or its import failed.
    """
    return _file(folder / ref.module) if ref.is_path else _module(ref.module)


def forget_modules(names: set[str]) -> None:
    """Let modules that have to do with Triton be imported again.

    A package is forgotten as a whole when one of its modules holds something of Triton's, or something of a package
    that is forgotten. Others stay (torch's own dependencies would not survive being there twice), and so do packages
    with compiled parts, which load once only.

    Args:
        names: dotted names of modules.
    """
    packages: dict[str, set[str]] = {}
    fixed = {name.partition(".")[0] for name in names if _is_compiled(sys.modules.get(name))}
    for name in names:
        top = name.partition(".")[0]
        if top not in fixed | set(sys.stdlib_module_names):
            packages.setdefault(top, set()).update(_origins(sys.modules.get(name)))
    forgotten = {"triton"}
    while more := {top for top, origins in packages.items() if top not in forgotten and origins & forgotten}:
        forgotten |= more
    for name in names:
        if name.partition(".")[0] in forgotten & set(packages):
            module = sys.modules.pop(name, None)
            if module is not None and "torch" in sys.modules:
                from tcache.replay.operators import take_back

                take_back(module)
            for path in [path for path, loaded in _loaded.items() if loaded is module]:
                del _loaded[path]


def _origins(module: ModuleType | None) -> set[str]:
    """Return the top-level packages that a module's values come from."""
    found = set()
    for value in list(getattr(module, "__dict__", {}).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for text in (name, type(value).__module__):
            if isinstance(text, str):
                found.add(text.partition(".")[0])
    return found


def _is_compiled(module: ModuleType | None) -> bool:
    return str(getattr(module, "__file__", None) or "").endswith((".so", ".pyd"))


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise KernelError(f"no module named {name!r}", "install it, or give the path of its file") from error
        raise _failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _file(path: Path) -> ModuleType:
    """Import a file under the dotted name its packages give it, without touching ``sys.path``.

    So a directory called ``kernels`` next to the manifest never hides an installed package of that name, and the
    functions carry the module name they have when the project imports them itself.
    """
    if "\0" in str(path):
        raise KernelError(f"{str(path)!r}: no such kernel file", "kernel paths are relative to the manifest")
    path = path.resolve()
    if not path.is_file():
        raise KernelError(f"{path}: no such kernel file", "kernel paths are relative to the manifest")
    names = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    for depth in range(1, len(names)):
        package = folder.joinpath(*names[:depth])
        _spec_import(".".join(names[:depth]), package / "__init__.py", [str(package)])
    return _spec_import(".".join(names), path, None)


def _spec_import(name: str, path: Path, search: list[str] | None) -> ModuleType:
    if path in _loaded:
        return _loaded[path]
    present = sys.modules.get(name)
    if present is not None:
        if getattr(present, "__file__", None) and Path(str(present.__file__)).resolve() == path:
            return present
        if search is not None:
            raise KernelError(
                f"{path}: package {name!r} is already imported from {getattr(present, '__file__', 'elsewhere')}",
                "refer to the kernel as package.module:function, or rename the directory",
            )
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    if present is None:
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if present is None:
            sys.modules.pop(name, None)
        if isinstance(error, (Exception, SystemExit)):
            raise _failed(str(path), error) from error
        raise
    _loaded[path] = module
    return module


_loaded: dict[Path, ModuleType] = {}  # by file: two files of one name are two modules


def _failed(what: str, error: BaseException) -> KernelError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" at {error.filename}:{error.lineno}"
    text = str(error).splitlines()[0] if str(error) else ""
    return KernelError(f"importing {what} failed{where}: {type(error).__name__}: {text}", "make the file importable")
