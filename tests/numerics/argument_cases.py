"""Every wrapper of the library with arguments that it takes, and what is wrong for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tcache.replay import KernelRef, load

ROOT = Path(__file__).parents[2]
WRAPPERS = load(KernelRef.parse("kernels/__init__.py:WRAPPERS"), ROOT)
MODULE_OF = {wrapper: module for module, wrappers in WRAPPERS.items() for wrapper in wrappers}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MATRICES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
I32, I64 = torch.int32, torch.int64


def wrapper(name):
    return load(KernelRef.parse(f"kernels/{MODULE_OF[name]}.py:{name}"), ROOT)


@dataclass
class Tensor:
    """A tensor that a wrapper takes.

    ``dtypes`` are those documented, ``like`` says that another argument has its dtype, ``fixed`` are the dimensions
    whose size other arguments fix. ``laid`` is what must be contiguous: all, the last dimension, nothing.
    """

    good: torch.Tensor
    dtypes: tuple[torch.dtype, ...] = FLOATS
    like: bool = False
    fixed: tuple[int, ...] = ()
    laid: str = "any"
    rank: bool = True
    optional: bool = False
    number: bool = False
    written: bool = False


@dataclass
class Number:
    good: float
    least: float | None = None
    optional: bool = False


@dataclass
class Integer:
    good: int
    outside: tuple[int, ...] = ()
    optional: bool = False


@dataclass
class Flag:
    good: bool | None = True
    optional: bool = False


@dataclass
class Choice:
    good: Any
    bad: tuple[Any, ...] = ()


def calls(device: str) -> dict[str, dict[str, Any]]:
    """Return, for every wrapper, its arguments in order."""

    def floats(*shape, dtype=torch.float32):
        return torch.randn(*shape, device=device).to(dtype)

    def whole(*shape, most=1, dtype=I32):
        return torch.randint(0, most, shape, device=device, dtype=dtype)

    x, vector = floats(4, 16), floats(16)
    head, keys = floats(1, 2, 5, 16), floats(1, 1, 5, 16)
    a, b = floats(3, 16, dtype=torch.float16), floats(16, 8, dtype=torch.float16)
    pages = floats(4, 16, 1, 16)
    neighbours = torch.full((5, 27), -1, device=device, dtype=I32)
    neighbours[:, 13] = torch.arange(5, device=device)
    order = torch.arange(5, device=device, dtype=I32)
    masks = torch.full((5,), 1 << 13, device=device)
    o, lse = wrapper("attention_forward")(head, keys, keys)
    rstd, eps = floats(4).abs(), Number(1e-5)
    qkv = {"q": Tensor(head, like=True, fixed=(0, 3), laid="last"), **{
        name: Tensor(keys, like=True, fixed=(0, 3), laid="last") for name in ("k", "v")
    }}  # fmt: skip
    attention = {**qkv, "causal": Flag(), "scale": Number(0.3, least=0, optional=True)}
    matrices = {"a": Tensor(a, MATRICES, like=True, fixed=(1,)), "b": Tensor(b, MATRICES, like=True, fixed=(0,))}
    rows = {"x": Tensor(x, rank=False)}
    weight = Tensor(vector, fixed=(0,), laid="all", optional=True)
    bias = Tensor(vector, fixed=(0,), laid="all", optional=True)
    norm_gradient = {
        "dy": Tensor(x, like=True, fixed=(0, 1), rank=False),
        "x": Tensor(x, like=True, fixed=(0, 1), rank=False),
    }
    norm_gradient["weight"] = weight
    statistic = Tensor(rstd, (torch.float32,), fixed=(0,), laid="all")
    conv = {
        "weight": Tensor(floats(27, 16, 8), like=True, fixed=(0, 1)),
        "neighbours": Tensor(neighbours, (I32,), fixed=(0, 1), laid="all"),
        "order": Tensor(order, (I32,), fixed=(0,), laid="all"),
        "masks": Tensor(masks, (I64,), fixed=(0,), laid="all"),
    }
    quantised = Tensor(whole(4, 16, most=100, dtype=torch.int8), (torch.int8, torch.float8_e4m3fn))
    block = Integer(16, (0, 8, 17, 24, 2048), optional=True)
    blocks = Tensor(floats(4, 1).abs(), (torch.float32,), fixed=(0, 1), laid="all", optional=True)
    found = {
        "align": {"experts": Tensor(whole(4, 2, most=3), (I32,), laid="all"), "count": Integer(3, (0, -1, 1025))},
        "attention": attention,
        "attention_forward": attention,
        "attention_backward": {
            "do": Tensor(head, like=True, fixed=(0, 1, 2, 3)), **qkv,
            "o": Tensor(o, like=True, fixed=(0, 1, 2, 3)),
            "lse": Tensor(lse, (torch.float32,), fixed=(0, 1, 2), laid="all"),
            "causal": Flag(), "scale": Number(0.3, least=0, optional=True),
        },
        "decode_attention": {
            "q": Tensor(floats(2, 2, 16), like=True, fixed=(0, 2), laid="last"),
            **{name: Tensor(pages, like=True, fixed=(0, 1, 2, 3), laid="last") for name in ("k_cache", "v_cache")},
            "block_table": Tensor(whole(2, 2, most=4), (I32,), fixed=(0,), laid="last"),
            "lengths": Tensor(whole(2, most=32) + 1, (I32,), fixed=(0,)),
            "scale": Number(0.3, least=0, optional=True),
        },
        "dequant_matmul": {
            "a": Tensor(a, (torch.bfloat16, torch.float16), fixed=(1,)),
            "w": Tensor(whole(16, 8, most=100, dtype=torch.int8), (torch.int8, torch.float8_e4m3fn), fixed=(0, 1)),
            "scale": Tensor(floats(8).abs(), (torch.float32,), fixed=(0,), laid="all"),
        },
        "affine_relu": {"x": Tensor(x, fixed=(1,), rank=False),
                        "a": Tensor(vector, fixed=(0,), laid="all", number=True),
                        "b": Tensor(floats(16), fixed=(0,), laid="all", number=True)},
        "affine_relu_": {"x": Tensor(x, fixed=(1,), rank=False, written=True),
                         "a": Tensor(vector, fixed=(0,), laid="all", number=True), "b": Number(0.5)},
        "grouped_gemm": {
            "x": Tensor(floats(5, 16, dtype=torch.float16), like=True, fixed=(1,)),
            "w": Tensor(floats(2, 16, 8, dtype=torch.float16), like=True, fixed=(0, 1)),
            "offsets": Tensor(torch.tensor([0, 2, 5], device=device), (I32, I64), fixed=(0,), laid="all"),
            "tma": Flag(good=False, optional=True),
        },
        "layernorm": {**rows, "weight": weight, "bias": bias, "eps": eps, "deterministic": Flag()},
        "layernorm_forward": {**rows, "weight": weight, "bias": bias, "eps": eps},
        "layernorm_backward": {**norm_gradient, "mean": Tensor(floats(4), (torch.float32,), fixed=(0,), laid="all"),
                               "rstd": statistic, "has_bias": Flag(), "deterministic": Flag()},
        "linear": {"x": Tensor(a, FLOATS, like=True, fixed=(1,), rank=False),
                   "weight": Tensor(floats(8, 16, dtype=torch.float16), FLOATS, like=True, fixed=(0, 1)),
                   "bias": Tensor(floats(8, dtype=torch.float16), like=True, fixed=(0,), optional=True)},
        "matmul": matrices,
        "matmul_decode": matrices,
        "matmul_persistent": {**matrices, "tma": Flag(good=False, optional=True)},
        "route": {"logits": Tensor(floats(4, 6)), "k": Integer(2, (0, -1, 7)),
                  "scoring": Choice("softmax", ("tanh", None, 1, ["softmax"])), "renormalise": Flag(),
                  "bias": Tensor(floats(6), fixed=(0,), laid="all", optional=True)},
        "moe_mlp": {"x": Tensor(floats(4, 16), like=True, fixed=(0, 1)), "logits": Tensor(floats(4, 3), fixed=(0, 1)),
                    "gate_up": Tensor(floats(3, 8, 16), like=True, fixed=(0, 1, 2)),
                    "down": Tensor(floats(3, 16, 4), like=True, fixed=(0, 1, 2)), "k": Integer(2, (0, 4))},
        "combine": {"y": Tensor(floats(8, 16), laid="all"),
                    "position": Tensor(whole(4, 2, most=8), (I32,), fixed=(0, 1), laid="all"),
                    "weights": Tensor(floats(4, 2), fixed=(0, 1), laid="all")},
        "gather": {"x": Tensor(x, fixed=(0,)), "order": Tensor(whole(8, most=8), (I32,), fixed=(0,), laid="all"),
                   "k": Integer(2, (0, -1, 3))},
        "silu_gate": {"x": Tensor(x, laid="all", fixed=(1,))},
        "dequantize": {"q": quantised, "scale": Tensor(floats(4, 1).abs(), (torch.float32,), fixed=(0, 1), laid="all"),
                       "block": block, "dtype": Choice(torch.float16, (torch.int8, torch.float64, None, "half", 1))},
        "quantize_fp8": {"x": Tensor(x), "block": block, "scale": blocks},
        "quantize_int8": {"x": Tensor(x),
                          "scale": Tensor(floats(4).abs(), (torch.float32,), fixed=(0,), laid="all", optional=True)},
        "rmsnorm": {**rows, "weight": weight, "eps": eps, "deterministic": Flag()},
        "rmsnorm_forward": {**rows, "weight": weight, "eps": eps},
        "rmsnorm_backward": {**norm_gradient, "rstd": statistic, "deterministic": Flag()},
        "softmax": rows,
        "sparse_conv": {"features": Tensor(floats(5, 16), like=True, fixed=(0, 1), laid="last"), **conv},
        "sparse_conv_features_gradient": {
            "gradient": Tensor(floats(5, 8), like=True, fixed=(0, 1), laid="last"), **conv,
        },
        "sparse_conv_weight_gradient": {"features": Tensor(floats(5, 16), like=True, fixed=(0,), laid="last"),
                                        "gradient": Tensor(floats(5, 8), like=True, fixed=(0,), laid="last"),
                                        "neighbours": Tensor(neighbours, (I32,), fixed=(0,), laid="all")},
        "axpy": {"a": Number(2.0), "x": Tensor(vector, like=True, fixed=(0,), laid="all"),
                 "y": Tensor(vector, like=True, fixed=(0,), laid="all")},
        "fill_map": {"neighbours": Tensor(whole(9, 5), (I32,), written=True)},
        "neighbour_map": {"coordinates": Tensor(whole(6, 3, most=50), INTEGERS), "size": Integer(3, (0, -1, 2))},
        "sort_rows": {"neighbours": Tensor(neighbours, (I32,))},
    }  # fmt: skip
    found["sparse_conv_features_gradient"]["weight"] = Tensor(floats(27, 16, 8), like=True, fixed=(0, 2))
    return found


def values(arguments):
    return {name: each.good for name, each in arguments.items()}


def other_dtypes(dtypes):
    """Return the dtypes that are none of these; some of them have no kernels in torch, not even to be filled."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    apart = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4, torch.complex32}  # deprecated
    return sorted(every - apart - set(dtypes), key=str)


def of_dtype(good, dtype):
    return torch.empty_strided(good.shape, good.stride(), dtype=dtype, device=good.device)


def bad_tensors(each):
    good = each.good
    numbers = [10**400] if each.number else [128.0, 3]
    for value in [*([] if each.optional else [None]), *numbers, [1.0, 2.0], "x", True]:
        yield f"{value!r}", value
    for dtype in other_dtypes(each.dtypes):
        yield str(dtype), of_dtype(good, dtype)
    for dtype in [dtype for dtype in each.dtypes if each.like and dtype != good.dtype][:1]:
        yield f"{dtype} unlike the others", of_dtype(good, dtype)
    if each.rank:
        yield "a dimension more", good[None]
        yield "a dimension fewer", good[0]
    yield "no dimension", good.flatten()[0]
    for dimension in each.fixed:
        shape = [size + (at == dimension) for at, size in enumerate(good.shape)]
        yield f"dimension {dimension} longer", torch.empty(shape, dtype=good.dtype, device=good.device)
    spread = good.repeat_interleave(2, -1)[..., ::2]
    if each.laid != "any" and good.shape[-1] > 1:
        yield "not contiguous", spread
    yield "sparse", good.to_sparse()
    yield "without memory", good.to("meta")


def bad(name, each):
    """Yield what is wrong for an argument, with a name for it."""
    if isinstance(each, Tensor):
        yield from bad_tensors(each)
        return
    if isinstance(each, Choice):
        yield from ((repr(value), value) for value in each.bad)
        return
    for value in [*([] if each.optional else [None]), "x", [1], torch.tensor(1)]:
        yield f"{value!r}", value
    if isinstance(each, Number):
        yield from ((repr(value), value) for value in (1j, True))
        yield from (("beyond floats", value) for value in (10**400, -(10**400)))
        if each.least is not None:
            yield from ((repr(value), value) for value in (each.least, -1.0, float("nan"), float("inf")))
    if isinstance(each, Integer):
        yield from ((repr(value), value) for value in (1.0, True, *each.outside))
    if isinstance(each, Flag):
        yield from ((repr(value), value) for value in (2, -1, 0.0))
