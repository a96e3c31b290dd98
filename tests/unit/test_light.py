"""What must stay light, and the one door to upstream's internals."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tcache

PACKAGE = Path(tcache.__file__).parent
HEAVY = {"torch", "triton", "pydantic", "rich", "yaml", "numpy"}


def imported_by(code):
    probe = f"import sys\n{code}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(done.stdout.splitlines()[-1].split())


def test_import_is_light():
    assert not imported_by("import tcache") & (HEAVY | {"click", "filelock"})


def test_help_is_light():
    code = "from tcache.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not imported_by(code) & HEAVY


def test_the_launch_path_imports_no_tools():
    assert not imported_by("import tcache\ntcache.autotune") & {"click", "pydantic", "yaml", "rich", "filelock"}


def test_bundles_below_other_kernels_load_nothing_of_the_autotuner():
    """What a service pays that only names the cache manager: the index answers tcache's own kernels alone."""
    code = (
        "import tcache.overlay\n"
        "own = ('autotuner', 'prebaked', '_triton.specialize', '_triton.launcher', 'recording', 'preloading')\n"
        "assert not [name for name in own if f'tcache.{name}' in sys.modules]"
    )
    imported_by(code)


def test_public_names():
    assert tcache.__all__ == [
        "CacheMiss",
        "TcacheError",
        "__version__",
        "activate",
        "adopt",
        "autotune",
        "preload",
        "record",
        "stats",
    ]
    for name in tcache.__all__:
        assert getattr(tcache, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tcache.nothing  # noqa: B018


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_only_the_door_imports_triton():
    for path in PACKAGE.rglob("*.py"):
        if "_triton" not in path.parts:
            assert not [name for name in imports_of(path) if name.split(".")[0] == "triton"], path


LAYERS = [
    ["cli"],
    ["verify", "pack", "diff"],
    ["proof"],
    ["warmup", "project", "supervise", "tuneworker", "generalize", "bench"],
    ["resolve"],
    ["replay"],
    ["adopting", "decorate", "preloading", "recording"],
    ["autotuner"],
    ["prebaked", "tuning"],
    ["lookup"],
    ["compile"],
    ["worker"],
    ["overlay", "capture"],
    ["explain"],
    ["active", "decide"],
    ["contend", "journal", "counters", "isolation", "snippet", "differences", "standin"],
    ["archives"],
    ["layout", "unpacking"],
    ["bundle"],
    ["head"],
    ["index", "environment", "discover"],
    ["manifest"],
    ["store"],
    ["scan"],
    ["entries"],
    ["keys"],
    ["_triton"],
    ["rows"],
    ["_fs", "_binary", "forking"],
    ["errors"],
    ["naming", "startup", "_site"],
]


def test_modules_import_only_from_lower_layers():
    """Later lines are lower. Two functions may reach up, inside their bodies: the CLI's and `activate`'s."""
    height = {name: -number for number, names in enumerate(LAYERS) for name in names}
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own not in height:
            assert own in ("__init__", "__main__"), f"{path}: in no layer"
            continue
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        for node in top:
            parts = node.module.split(".")
            if parts[0] == "tcache" and len(parts) > 1 and parts[1] != own:
                assert height[parts[1]] < height[own], f"{path}: imports {node.module} from a higher layer"


def test_no_unsafe_calls():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                generated = path.name == "generate.py" and node.func.id == "exec"  # says why in its head
                assert generated or node.func.id not in ("eval", "exec", "compile"), path
        assert "pickle" not in set(imports_of(path)), path
