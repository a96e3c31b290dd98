from __future__ import annotations

import functools

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from tcache.errors import UnknownGPU, UsageError
from tcache.keys import GPU, ShapeKey, Target, catalogue, config_key, config_options, find_gpu, ranked, space_identity

dtypes = st.sampled_from(["float32", "bfloat16", "int8"])
name = st.from_regex(r"[a-z]{1,4}", fullmatch=True)
shape_keys = st.builds(
    lambda values, kinds: ShapeKey(tuple(values.items()), tuple(kinds.items())),
    st.dictionaries(name, st.integers() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5), max_size=3),
    st.dictionaries(name, dtypes, max_size=3),
)


@given(shape_keys)
def test_shape_key_round_trip(key):
    assert ShapeKey.parse(str(key)) == key


def test_shape_key_of_a_launch():
    import torch

    x = torch.empty(3, dtype=torch.bfloat16)
    key = ShapeKey.of(["n", "absent", "flag"], {"x": x, "n": 4096, "flag": True, "other": 3})
    assert str(key) == "n=4096 flag=true | x=torch.bfloat16"


def test_shape_keys_do_not_depend_on_the_order_of_names_but_on_types():
    one = ShapeKey((("M", 1), ("N", 2)), (("a", "float32"),))
    assert one == ShapeKey((("N", 2), ("M", 1)), (("a", "float32"),))
    assert hash(one) == hash(ShapeKey((("N", 2), ("M", 1)), (("a", "float32"),)))
    assert one != ShapeKey((("M", True), ("N", 2)), (("a", "float32"),))
    assert one != ShapeKey((("M", 1.0), ("N", 2)), (("a", "float32"),))


def nearest(wanted, known):
    return next(iter(ranked(wanted, known)), None)


def key(m, dtype="float32", flag=True):
    return ShapeKey((("M", m), ("flag", flag)), (("a", dtype),))


def test_nearest_is_by_logarithm_and_keeps_categories():
    known = [key(16), key(1024), key(4096), key(4096, "bfloat16"), key(3000, flag=False)]
    assert nearest(key(3000), known) == key(4096)
    assert nearest(key(20), known) == key(16)
    assert nearest(key(3000, "bfloat16"), known) == key(4096, "bfloat16")
    assert nearest(key(3000, "float16"), known) is None
    assert nearest(key(2048), [key(4096), key(1024)]) == key(1024)  # a tie goes to the smaller text


def test_config_key_is_canonical():
    config = triton.Config({"b": 2, "a": 1}, num_warps=8, num_stages=2)
    assert config_key(config) == "a=1 b=2 | num_warps=8 num_stages=2 num_ctas=1"
    assert config_options(config_key(config)) == ({"a": 1, "b": 2}, {"num_warps": 8, "num_stages": 2, "num_ctas": 1})
    assert config_key(triton.Config({}, maxnreg=64)) == "| num_warps=4 num_stages=3 num_ctas=1 maxnreg=64"
    assert config_options("| num_warps=4") == ({}, {"num_warps": 4})


def test_configs_that_differ_in_their_hook_are_two():
    def hook(_):
        pass

    assert config_key(triton.Config({}, pre_hook=hook)) != config_key(triton.Config({}))


def _named_hook(_):
    pass


class _Hook:
    def __init__(self, size):
        self.size, self.me = size, self

    def __call__(self, _):
        pass


def _made(size):
    return lambda kwargs: kwargs.update(size=size)


def test_hooks_of_one_name_are_told_apart():
    def keys(*hooks):
        return [config_key(triton.Config({}, pre_hook=hook)) for hook in hooks]

    assert keys(_named_hook)[0].endswith('pre_hook="_named_hook"')
    different = [
        lambda kwargs: kwargs.update(a=1),
        lambda kwargs: kwargs.update(a=2),
        lambda kwargs: kwargs.clear(),
        lambda kwargs, size=3: kwargs.update(a=size),
        _made(4),
        _made(5),
        functools.partial(_named_hook, 6),
        functools.partial(_named_hook, 7),
        _Hook(8),
        _Hook(9),
        _Hook(10).__call__,
    ]
    found = keys(*different)
    assert len(set(found)) == len(different)
    assert keys(_made(4), _Hook(8), functools.partial(_named_hook, 6)) == [found[4], found[8], found[6]]


def test_space_identity_ignores_order():
    assert space_identity(["a=1 |", "a=2 |"]) == space_identity(["a=2 |", "a=1 |"])
    assert space_identity(["a=1 |"]) != space_identity(["a=2 |"])


@pytest.mark.parametrize("text", ["cuda:90:32", "cuda:100:32", "hip:gfx942:64"])
def test_targets_round_trip(text):
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:90", "cuda:gfx942:64", "hip:90:32", "cuda:90:33", "cuda:090:32", "rocm:1:64"]
)
def test_malformed_targets(text):
    with pytest.raises(UsageError, match="backend:arch:warp_size"):
        Target.parse(text)


def test_catalogue_rows_are_sound():
    for gpu in catalogue().values():
        assert Target.parse(str(gpu.target)) == gpu.target
        assert gpu.multiprocessors > 0
        assert gpu.max_shared_mem >= 64 * 1024
    assert len({gpu.slug for gpu in catalogue().values()}) == len(catalogue())


def test_find_gpu():
    assert find_gpu("NVIDIA H200").target == Target("cuda", 90, 32)
    with pytest.raises(UnknownGPU, match="'NVIDIA H200'") as error:
        find_gpu("nvidia h2000")
    assert "--target" in error.value.hint
    assert find_gpu("My GPU", Target("cuda", 90, 32)).name == "My GPU"
    assert find_gpu("My GPU", known={"My GPU": GPU("My GPU", "cuda", 89, 32, 7)}).multiprocessors == 7
    with pytest.raises(UsageError, match="has target"):
        find_gpu("NVIDIA H200", Target("cuda", 80, 32))
