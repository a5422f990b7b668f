"""torch.compile for what has no kernel of its own (the LK losses), on CUDA and only where the recipe asks for it.

Compilation takes a minute or two: on a small model longer than the whole training.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_enabled = False


def enable(on: bool) -> None:
    """Whether functions marked with `fused_on_cuda` are compiled from now on (`train.compile`)."""
    global _enabled
    _enabled = on


def fused_on_cuda(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function`, once for any number of rows, for calls whose last argument is a CUDA tensor."""
    compiled: Any = None  # made when it is needed: torch.compile imports a compiler, which takes seconds

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal compiled
        last = args[-1]
        if not (_enabled and isinstance(last, torch.Tensor) and last.is_cuda):
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, dynamic=True)
        result: T = compiled(*args, **kwargs)
        return result

    return call
