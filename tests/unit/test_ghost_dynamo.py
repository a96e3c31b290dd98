"""``torch._dynamo`` imported during a replay, by whoever needs it: it sees the real torch, and nothing stays behind.

Each program runs in a process of its own, where nothing has imported dynamo before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

HEAD = """\
import sys, types
import torch
from tcache.keys import find_gpu
from tcache.replay import machine

H200, MI300X = find_gpu("NVIDIA H200"), find_gpu("AMD Instinct MI300X")
finders, cuda, below = list(sys.meta_path), dict(vars(torch.cuda)), dict(vars(torch._C))

def absent():
    assert "torch._dynamo" not in sys.modules

def backend(graph, inputs):
    generated.append(1)
    return graph.forward

generated = []
"""

TAIL = """
def nothing_left():
    assert sys.meta_path == finders
    assert {name: value for name, value in vars(torch.cuda).items() if name in cuda} == cuda
    assert {name: value for name, value in vars(torch._C).items() if name in below} == below
    assert torch.overrides._get_current_function_mode_stack() == []
    spared = [name for name, value in vars(torch._refs).items() if plain(value)]
    assert not spared
    found = sys.modules.get("torch._dynamo")
    if found is None:
        return
    assert found.__spec__.loader is found.__loader__
    assert type(found.__loader__).__module__ == "_frozen_importlib_external"
    assert sys.modules["torch._dynamo.eval_frame"]._stance.stance == "default"
    filed = sys.modules["torch._dynamo.trace_rules"].get_torch_obj_rule_map()
    for name in ("current_stream", "current_device", "get_device_properties", "is_available"):
        assert getattr(torch.cuda, name) is cuda[name]
        assert cuda[name] in filed, name
    assert not [value for value in filed if fake(value)]
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch._dynamo", "torch._inductor")):
            for key, value in list(vars(module).items()):
                held = value.values() if type(value) is dict else value if type(value) in (set, list, tuple) else ()
                held = list(vars(value).values()) if isinstance(value, type) else list(held)
                for each in (value, *held):
                    assert not fake(getattr(each, "__func__", each)), (name, key)

def plain(function):
    below = getattr(function, "__wrapped__", None)
    return below is not None and (vars(below).get("__dynamo_disable") is below or plain(below))

def fake(value):
    return isinstance(value, (type, types.FunctionType)) and str(value.__module__).startswith("tcache.")

nothing_left()
generated.clear()
assert torch.equal(torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3)), torch.full((3,), 2.0))
assert generated, "after the replay functions are compiled as ever"
"""

PROGRAMS = {
    "nobody": """
        with machine(H200):
            x = torch.randn(8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            y = torch.nn.functional.layer_norm(x @ x.t(), (8,)).float().softmax(-1).exp()
            y = torch.cat([y + y, y / 2]).cumsum(0).sum()
            y.backward()
            assert x.grad.is_cuda
            assert torch.where(x > 0, x, 3.0).shape == (8, 16)
        absent()
        with machine(H200):
            torch.empty(2, device="cuda") + 1
            import torch._dynamo
            assert (torch.empty(2, device="cuda") * 2).is_cuda
    """,
    "torch.compile in a function": """
        with machine(H200):
            seen = []

            def wrapper(x):
                @torch.compile(fullgraph=True, backend=backend)
                def inner(value):
                    seen.append(value.is_cuda)
                    return value * 2
                return inner(x)

            absent()
            assert wrapper(torch.empty(3, device="cuda")).is_cuda
            assert wrapper(torch.empty(4, device="cuda")).is_cuda
            assert seen == [True, True] and not generated
            assert torch.cuda.get_device_name() == "NVIDIA H200"
            assert torch.empty(2, device="cuda").is_cuda
    """,
    "torch.compile in a module that the replay imports": """
        import importlib, pathlib, tempfile, textwrap
        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "late.py").write_text(textwrap.dedent('''
            import torch
            seen = []
            @torch.compile
            def double(x):
                seen.append(x.is_cuda)
                return x * 2
            @torch.compiler.disable
            def never(x):
                return torch.cuda.get_device_capability()
        '''))
        sys.path.insert(0, folder)
        with machine(H200):
            absent()
            late = importlib.import_module("late")
            assert late.double(torch.empty(3, device="cuda")).is_cuda
            assert late.never(None) == (9, 0)
            assert late.seen == [True]
        sys.path.remove(folder)
    """,
    "a meta kernel": """
        with torch.library._scoped_library("late", "DEF") as library:
            library.define("twice(Tensor x) -> Tensor")

            def meta(x):
                import torch._dynamo
                import torch._dynamo.trace_rules
                return torch.empty_like(x)

            library.impl("twice", meta, "Meta")
            with machine(H200):
                absent()
                assert torch.ops.late.twice(torch.empty(3, device="cuda")).is_cuda
                assert torch.cuda.current_device() == 0
    """,
    "under a mode, on another device": """
        with machine(H200):
            with torch.device("cuda"):
                absent()
                import torch._dynamo
                assert torch.empty(2).is_cuda
            assert torch.cuda.get_device_name() == "NVIDIA H200"
    """,
    "in a machine within another": """
        with machine(H200):
            torch.empty(2, device="cuda")
            with machine(MI300X):
                torch.empty(2, device="cuda") + 1
            torch.empty(2, device="cuda") + 1
            with machine(MI300X):
                absent()
                function = torch.compile(lambda x: (x * 2, torch.cuda.get_device_name()), backend=backend)
                assert function(torch.empty(2, device="cuda"))[1] == "AMD Instinct MI300X"
                assert torch.version.hip
            assert function(torch.empty(2, device="cuda"))[1] == "NVIDIA H200"
            assert not torch.version.hip
        assert not generated
    """,
    "for the second GPU of a run": """
        for gpu in (H200, MI300X, H200):
            with machine(gpu):
                x = torch.empty(2, device="cuda")
                if gpu is MI300X:
                    absent()
                    import torch._dynamo
                if "torch._dynamo" in sys.modules:
                    assert torch.compile(lambda x: x * 2, backend=backend)(x).is_cuda
                assert torch.cuda.get_device_name() == gpu.name
        assert not generated
    """,
    "before the replay": """
        import torch._dynamo
        for _ in range(2):
            with machine(H200), machine(MI300X):
                assert torch.compile(lambda x: x * 2, backend=backend)(torch.empty(2, device="cuda")).is_cuda
                assert sys.meta_path == finders
        assert not generated
    """,
    "in vain": """
        class Blocked:
            def find_spec(self, name, path, target=None):
                if name == "torch._dynamo.config":
                    raise ImportError("not now")

        with machine(H200):
            sys.meta_path.insert(0, Blocked())
            try:
                import torch._dynamo
            except ImportError:
                pass
            else:
                raise AssertionError
            assert torch.cuda.get_device_name() == "NVIDIA H200"
            assert torch.empty(2, device="cuda").is_cuda
            del sys.meta_path[0]
        import torch._dynamo
    """,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_dynamo_is_imported(program):
    text = HEAD + textwrap.dedent(PROGRAMS[program]) + TAIL
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
