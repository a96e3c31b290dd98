"""Config keys: one point of the tuning space as text, and the identity of the space."""

from __future__ import annotations

import json
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
    since two configs that differ only in it are two configs.

    Raises:
        UnsupportedValue: a meta-parameter has no canonical text.
    """
    options = [(name, getattr(config, name, None)) for name in _OPTIONS]
    options = [(name, value) for name, value in options if value is not None]
    if config.pre_hook is not None:
        options.append(("pre_hook", getattr(config.pre_hook, "__qualname__", type(config.pre_hook).__qualname__)))
    return encode_groups([sorted(config.kwargs.items()), options])


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
