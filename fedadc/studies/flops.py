"""Counts floating-point operations: two for each multiplication and addition of matrices and convolutions.

The formulas are torch's. Its own `FlopCounterMode` imports a compiler when it is first used, which takes 1.6 seconds
and a hundred megabytes: more than a calibration, and memory that a run does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def flops_of(call: Callable[[], Any]) -> float:
    """The floating-point operations of a call."""
    with _Counter() as counter:
        call()
    return float(counter.total)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's switch for a mode that is never compiled; the default imports the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # an operation made of others, e.g. `linear` without gradients
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result
