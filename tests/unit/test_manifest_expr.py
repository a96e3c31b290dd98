"""The expression language: what it computes, what it refuses, and that nothing gets it to do anything else."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcache.manifest.expr import LARGEST, SMALLEST, ExpressionError, evaluate, holds, names
from tcache.manifest.grammar import DEEPEST, LONGEST, parse

SCOPE = {"M": 17, "n": 3, "dtype": "float32", "flag": True, "none": None, "x": 0.5, "big": 2**63}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(M + 7) // 8", 3),
        ("cdiv(M, 8)", 3),
        ("cdiv(-7, 2)", -3),
        ("next_power_of_2(M)", 32),
        ("next_power_of_2(1)", 1),
        ("min(M, 4) + max(1, 2, 3)", 7),
        ("-M % 5", 3),
        ("--M", 17),
        ("- -+M", 17),
        ("10 - 3 - 2", 5),
        ("7 // 2 * 2", 6),
        ("1 / 4", 0.25),
        ("M * x", 8.5),
        (5, 5),
        (None, None),
        (True, True),
        ("2.5", 2.5),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("'relu'", "relu"),
        ('"a b"', "a b"),
        ("dtype", "float32"),
        ("none", None),
        ("true", True),
        ("null", None),
        ("  M\n", 17),
        ("18446744073709551615", LARGEST),
        ("-9223372036854775808", SMALLEST),
        ("big + big - 1 - 0", None),
        ("+".join("1" * 500), 500),
    ],
)
def test_values(text, value):
    if text == "big + big - 1 - 0":  # every step has to fit
        with pytest.raises(ExpressionError, match="larger than 64 bits"):
            evaluate(text, SCOPE)
        return
    found = evaluate(text, SCOPE)
    assert found == value
    assert type(found) is type(value)


def test_floats_may_be_infinite_or_none_at_all():
    assert evaluate(math.inf, {}) == math.inf
    assert math.isnan(evaluate(math.nan, {}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("M > n", True),
        ("1 <= n < 3", False),
        ("n == 3 == 3.0", True),
        ("M != 17 or n >= 3 and flag", True),
        ("not n < 3", True),
        ("not not flag", True),
        ("n in [1, 2, 3]", True),
        ("n not in [1, M]", True),
        ("dtype in ['float16', 'float32',]", True),
        ("'float' in dtype", True),
        ("n < 3 and 1 // 0 > 0", False),
        ("flag or 1 // 0 > 0", True),
        ("(M - 1) % 16 == 0", True),
    ],
)
def test_conditions(text, value):
    assert holds(text, SCOPE) is value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an expression: it ends too early at character 1"),
        ("n +", "'n +' is not an expression: it ends too early at character 4"),
        ("(n", "it ends too early at character 3"),
        ("n)", "found ')' at character 2"),
        ("n n", "found 'n' at character 3"),
        ("n.real", "found '.' at character 2"),
        ("n[0]", "found '[' at character 2"),
        ("9**9**9", "found '*' at character 3"),
        ("1 if 2 else 3", "found 'if' at character 3"),
        ("lambda: 1", "found ':' at character 7"),
        ("n := 1", "found ':' at character 3"),
        ("f'{n}'", "found \"'{n}'\" at character 2"),
        ("'\\x41'", 'found "\'" at character 1'),
        ("0x10", "found '0' at character 1"),
        ("1_000", "found '1' at character 1"),
        ("٣", "found '٣' at character 1"),
        ("n ** 2", "found '*' at character 4"),
        ("n << 2", "found '<' at character 4"),
        ("~n", "found '~' at character 1"),
        ("cdiv(n, , 2)", "found ',' at character 9"),
        ("__import__('os')", "unknown function '__import__'"),
        ("exec(n)", "unknown function 'exec' in 'exec(n)': expected one of cdiv, max, min, next_power_of_2"),
        ("cdiv(n)", "'cdiv(n)': cdiv takes 2 arguments, found 1"),
        ("cdiv(a=1)", "found '=' at character 7"),
        ("cdiv(n, 0)", "division by zero in 'cdiv(n, 0)'"),
        ("n % 0", "division by zero"),
        ("n / 0", "division by zero"),
        ("m", "name 'm' is not bound by the case; did you mean 'M'?"),
        ("zzz", "name 'zzz' is not bound by the case (bound: M, big, dtype, flag, n, none, x)"),
        ("dtype + 1", "computes with 'float32', which is not a number"),
        ("flag + 1", "computes with True, which is not a number"),
        ("none * 2", "computes with None, which is not a number"),
        ("n and flag", "takes 3 for a condition"),
        ("not n", "takes 3 for a condition"),
        ("[1, 2]", "'[1, 2]' is a list: lists stand only after 'in'"),
        ("n in 3", "argument of type 'int' is not"),
        ("n < dtype", "'<' not supported between"),
        ("18446744073709551616", "larger than 64 bits"),
        ("-9223372036854775809", "larger than 64 bits"),
        ("big * 4", "larger than 64 bits"),
        ("next_power_of_2(big + 1)", None),
        ("next_power_of_2(1e300)", "larger than 64 bits"),
        ("next_power_of_2(1e999)", "cannot convert float infinity to integer"),
        ("1" * (LONGEST + 1), f"expression of {LONGEST + 1} characters, at most {LONGEST} are allowed"),
        ("(" * 500 + "1" + ")" * 499, f"nested too deeply: at most {DEEPEST} levels are allowed"),
        ("[" * 500, "nested too deeply"),
        ("max(" * 100 + "1" + ")" * 100, "nested too deeply"),
    ],
)
def test_refusals(text, message):
    if message is None:
        message = "larger than 64 bits"
    with pytest.raises(ExpressionError) as error:
        evaluate(text, SCOPE)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_condition_has_to_be_one():
    with pytest.raises(ExpressionError, match=r"'n' is 3: expected a condition, such as M < N"):
        holds("n", SCOPE)


def test_names():
    assert names("cdiv(M, BLOCK) + min(n, 'a' in b) * true") == {"M", "BLOCK", "n", "b"}
    assert names(7) == set()


def test_the_deepest_expression_there_may_be_evaluates():
    inner = "n"
    for _ in range(DEEPEST - 3):
        inner = f"-n * 1 - ({inner})"
    assert isinstance(evaluate(f"not (-({inner}) < 3) and flag", SCOPE), bool)
    with pytest.raises(ExpressionError, match="nested too deeply"):
        evaluate(f"not (-(({inner})) < 3) and flag", SCOPE)


SIGNS = [
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "<",
    "<=",
    "==",
    "!=",
    "in",
    "not in",
    "and",
    "or",
    "(",
    ")",
    "[",
    "]",
    ",",
    "not",
]
WORDS = ["n", "M", "big", "dtype", "flag", "none", "cdiv", "min", "max", "next_power_of_2", "__class__", "eval", "'a'"]
NUMBERS = ["0", "1", "7", "0.5", "1e300", "18446744073709551615", "99999999999999999999"]
PIECES = st.lists(st.sampled_from(SIGNS + WORDS + NUMBERS), max_size=60).map(" ".join)


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=120) | PIECES | st.from_regex(r"[nM0-9+*/%(), <>=\[\]-]{1,60}", fullmatch=True))
def test_no_expression_does_anything_but_compute(text):
    begin = time.process_time()
    try:
        value = evaluate(text, SCOPE)
    except ExpressionError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert value is None or isinstance(value, (bool, int, float, str))
        if isinstance(value, int):
            assert SMALLEST <= value <= LARGEST
        assert names(text) <= SCOPE.keys()
    assert time.process_time() - begin < 1


def reference(tree):
    """A tree of numbers and operators as text with every parenthesis written, and as Python computes it."""
    if isinstance(tree, int):
        return (f"({tree})" if tree < 0 else str(tree)), tree
    sign, left, right = tree
    (left_text, left_value), (right_text, right_value) = reference(left), reference(right)
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "//": int.__floordiv__, "%": int.__mod__}[sign]
    return f"({left_text} {sign} {right_text})", compute(left_value, right_value)


TREES = st.recursive(
    st.integers(-20, 20),
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_arithmetic_is_pythons(tree):
    try:
        text, value = reference(tree)
    except ZeroDivisionError:
        return
    if not SMALLEST <= value <= LARGEST or text.count("(") > 15:
        return
    try:
        assert evaluate(text, {}) == value
    except ExpressionError as error:
        assert "larger than 64 bits" in str(error)  # noqa: PT017 - a step on the way
    # without parentheses precedence decides, as in Python
    flat = text.replace("(", "").replace(")", "").replace("--", "- -")
    try:
        parsed = evaluate(flat, {})
    except ExpressionError:
        return
    assert parsed == pythons(flat)


def pythons(text):
    import ast
    import operator

    signs = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
             ast.Mod: operator.mod}  # fmt: skip

    def walk(node):
        if isinstance(node, ast.BinOp):
            return signs[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp):
            return -walk(node.operand)
        return node.value

    return walk(ast.parse(text, mode="eval").body)


def test_parsing_is_not_quadratic():
    begin = time.process_time()
    for text in (
        "-" * LONGEST,
        "not " * (LONGEST // 4),
        "n<" * (LONGEST // 2),
        " " * LONGEST,
        "'" * LONGEST,
        "1" * LONGEST,
    ):
        try:
            parse(text)
        except ExpressionError:
            continue
    assert time.process_time() - begin < 1
