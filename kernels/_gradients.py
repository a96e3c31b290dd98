"""Gradients that are there once: what the functions of autograd here have for a backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward whose results refuse to be differentiated.

    torch's ``once_differentiable`` sees to that where the incoming gradient depends on something. That of a sum does
    not, but what follows from it depends on the function's inputs all the same; it would count as a constant, and a
    penalty on it would have no effect and say nothing. Gradients are recorded in a backward only when somebody asked
    for a graph of it (``create_graph``).

    Args:
        backward: of a ``torch.autograd.Function``, computing without a graph.
    """
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            gradients = tuple(
                each if each is None or each.requires_grad else each.detach().requires_grad_() for each in gradients
            )
        return guarded(ctx, *gradients)

    return refusing
