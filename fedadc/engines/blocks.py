"""How the clients of a round are grouped for processes that add up uploads where they are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedadc.training.aggregate import BLOCK_LENGTH
from fedadc.training.messages import ClientTask


def grouped(tasks: Sequence[ClientTask], workers: int) -> Iterator[Sequence[ClientTask]]:
    """Group tasks into whole blocks of 8 while there is enough work for every worker, then one by one."""
    left = sum(task.steps for task in tasks)
    for start in range(0, len(tasks), BLOCK_LENGTH):
        block = tasks[start : start + BLOCK_LENGTH]
        work = sum(task.steps for task in block)
        left -= work
        if len(block) == BLOCK_LENGTH and left >= workers * work:
            yield block
        else:
            yield from ([task] for task in block)
