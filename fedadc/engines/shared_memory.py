"""Shared memory without a name, so that nothing is left behind when a process is killed."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; the bits of a matrix product depend on the alignment of its inputs
MAX_LAYOUTS = 10_000  # whose views are cached

Layout = tuple[tuple[str, int, torch.dtype, tuple[int, ...]], ...]  # name, offset, dtype, shape


class SharedBytes:
    """A block of bytes. Sent to a process that is being started, it is the same block there.

    On Linux it is an anonymous file, which no limit of /dev/shm touches; elsewhere torch's own shared memory.
    """

    def __init__(self, size: int, file: int | None = None, content: Tensor | None = None) -> None:
        size = max(size, 1)
        if file is None and content is None:
            if hasattr(os, "memfd_create"):
                file = os.memfd_create("fedadc")
                os.ftruncate(file, size)
            else:
                content = torch.empty(size, dtype=torch.uint8)
                content.share_memory_()  # type: ignore[no-untyped-call]
        if file is not None:
            content = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        assert content is not None
        self._file, self.bytes = file, content
        self._views: dict[Layout, dict[str, Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is None:
            return SharedBytes, (len(self.bytes), None, self.bytes)
        return _opened, (len(self.bytes), DupFd(self._file))

    def __del__(self) -> None:
        file = getattr(self, "_file", None)  # missing if the system refused to make one
        if file is not None:
            os.close(file)

    def views(self, layout: Layout) -> dict[str, Tensor]:
        """Tensors in the block. Their views are cached, because the same layouts occur again and again."""
        if layout not in self._views:
            if len(self._views) > MAX_LAYOUTS:
                self._views.clear()
            self._views[layout] = {name: self._view(offset, dtype, shape) for name, offset, dtype, shape in layout}
        return self._views[layout]

    def _view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        view: Tensor = self.bytes[offset : offset + size].view(dtype).view(shape)
        return view

    def put(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        for name, view in self.views(layout).items():
            view.copy_(tensors[name])


def _opened(size: int, file: Any) -> SharedBytes:
    return SharedBytes(size, file.detach())


def layout_of(tensors: Mapping[str, Tensor], start: int = 0) -> tuple[Layout, int]:
    """The position of each tensor when they are stored one after another, and the end of the last."""
    layout = []
    for name, tensor in tensors.items():
        layout.append((name, start, tensor.dtype, tuple(tensor.shape)))
        start += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return tuple(layout), start


class SharedTensors:
    """Named tensors in one block."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.layout, size = layout_of(tensors)
        self.block = SharedBytes(size)
        self.block.put(tensors, self.layout)

    def views(self) -> dict[str, Tensor]:
        return self.block.views(self.layout)


Parcel = Layout | bytes  # the positions of tensors in a slot or, if they do not fit, the pickled tensors


class Slots:
    """A block in equal parts, each for the tensors of one job, to the worker and back."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.block = size, SharedBytes(count * size)

    def put(self, slot: int, *states: Mapping[str, Tensor]) -> list[Parcel]:
        place, end = slot * self.size, (slot + 1) * self.size
        parcels: list[Parcel] = []
        for state in states:
            layout, after = layout_of(state, place)
            if after <= end:
                self.block.put(state, layout)
                parcels.append(layout)
                place = after
            else:
                parcels.append(pickle.dumps({name: v.detach().cpu().clone() for name, v in state.items()}))
        return parcels

    def get(self, parcel: Parcel) -> dict[str, Tensor]:
        """The tensors; views of the slot if they are in one."""
        if isinstance(parcel, bytes):
            state: dict[str, Tensor] = pickle.loads(parcel)  # safe: it comes from our own process
            return state
        return self.block.views(parcel)
