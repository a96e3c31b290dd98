"""Config keys: one point of the tuning space as text, and the identity of the space."""

from __future__ import annotations

import functools
import inspect
import json
import types
from typing import TYPE_CHECKING, Any

from tcache._fs import sha256_bytes
from tcache.keys._text import decode_groups, encode_groups

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["config_key", "config_options", "space_identity"]

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def config_key(config: Any) -> str:
    """Return the canonical text of a ``triton.Config``: ``BLOCK=64 | num_warps=4 num_stages=3 num_ctas=1``.

    Meta-parameters are sorted by name, options that are None are left out, and a config's own pre_hook is named,
    since two configs that differ only in it are two configs. A hook that shares its name with others (a lambda, a
    function made by a function, an object) is also described by its constants, defaults and closure values.

    Raises:
        UnsupportedValue: a meta-parameter has no canonical text.
    """
    options = [(name, getattr(config, name, None)) for name in _OPTIONS]
    options = [(name, value) for name, value in options if value is not None]
    if config.pre_hook is not None:
        options.append(("pre_hook", _hook_text(config.pre_hook)))
    return encode_groups([sorted(config.kwargs.items()), options])


_HOOKS: dict[int, tuple[Any, str]] = {}
"""Hooks described before: what they count or collect while they are called must not change their description."""


def _hook_text(hook: Any) -> str:
    name = str(getattr(hook, "__qualname__", type(hook).__qualname__))
    if isinstance(hook, types.FunctionType) and "<" not in name:
        return name
    if id(hook) not in _HOOKS:
        payload = json.dumps(_hook_parts(hook, 0), sort_keys=True)
        _HOOKS[id(hook)] = hook, f"{name}#{sha256_bytes(payload.encode())[:8]}"  # kept alive: the id stays its own
    return _HOOKS[id(hook)][1]


def _hook_parts(value: Any, depth: int) -> Any:
    """Describe what distinguishes a hook from others of its name; nothing in it depends on the process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _DEEPEST:
        return type(value).__qualname__

    def each(items: Iterable[Any]) -> list[Any]:
        return [_hook_parts(item, depth + 1) for item in items]

    if isinstance(value, tuple):
        return each(value)
    if isinstance(value, (list, set, bytearray)):
        return type(value).__qualname__  # what is in it may be what hooks collected
    if isinstance(value, dict):
        return {str(name): _hook_parts(item, depth + 1) for name, item in value.items()}
    if isinstance(value, functools.partial):
        return ["partial", *each((value.func, value.args, value.keywords))]
    if isinstance(value, types.MethodType):
        return ["method", *each((value.__func__, value.__self__))]
    if isinstance(value, types.FunctionType):
        cells = inspect.getclosurevars(value).nonlocals  # leaves out what is not bound yet
        return [value.__qualname__, *each((value.__defaults__, value.__kwdefaults__, cells)), _code(value.__code__)]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return [type(value).__qualname__, _hook_parts(vars(value), depth + 1)]


def _code(code: types.CodeType) -> Any:
    constants = [_code(item) if isinstance(item, types.CodeType) else item for item in code.co_consts]
    plain = [item for item in constants if isinstance(item, (bool, int, float, str, list))]
    return [list(code.co_names), list(code.co_varnames), plain]


_DEEPEST = 4


def config_options(key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a config key into ``(meta-parameters, options)``.

    Raises:
        ValueError: the text has another form.
    """
    groups = decode_groups(key)
    if len(groups) != 2:
        raise ValueError(f"expected 'meta-parameters | options' in config key {key!r}")
    return dict(groups[0]), dict(groups[1])


def space_identity(keys: Iterable[str]) -> str:
    """Return the identity of a config space, whatever order the configs are listed in."""
    payload = json.dumps({"schema": 1, "configs": sorted(keys)}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + sha256_bytes(payload.encode())[:32]
