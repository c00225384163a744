"""Your own data from memory: arrays, tensors, a torch Dataset, one pair of arrays per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.data.dataset import Array, Dataset, Normalization, Samples
from fedadc.errors import FedadcError, require

Pair = tuple[Any, Any]  # inputs and labels: NumPy arrays, tensors or lists


def from_arrays(
    x: Any,
    y: Any,
    test: Pair | None = None,
    *,
    owners: Any = None,
    test_owners: Any = None,
    name: str = "arrays",
    normalization: Normalization | None = None,
) -> Dataset:
    """A data set from inputs and labels; `owners` is the client id of every training sample, `test_owners` of every
    test sample.

    uint8 inputs are images and are scaled to [0, 1]; all others are taken as they are. Labels may be integers or
    strings; the classes are those that occur in training, sorted.
    """
    inputs, labels = _inputs(x, name, "training"), _labels(y, name)
    classes, codes = np.unique(labels, return_inverse=True)
    require(len(inputs) == len(labels), f"data {name}: {len(inputs)} inputs do not match {len(labels)} labels.")
    if owners is not None:
        owners = checked_owners(owners, len(labels), name)
    if normalization is None:
        normalization = Normalization(scale=255.0 if inputs.dtype == torch.uint8 else 1.0)
    samples = Samples(inputs, torch.from_numpy(codes.reshape(-1)))
    names = tuple(str(c) for c in classes)
    held = None if test is None else samples_like(names, *test, name)
    if test_owners is not None:
        test_owners = checked_owners(test_owners, 0 if held is None else len(held), name)
    return Dataset(name, samples, names, held, normalization=normalization, owners=owners, test_owners=test_owners)


def samples_like(classes: Sequence[str], x: Any, y: Any, name: str) -> Samples:
    """Further samples of a data set whose classes are known; where classes have names, integers count them from 0."""
    labels = _labels(y, name)
    code = {c: i for i, c in enumerate(classes)}
    values, position = np.unique(labels, return_inverse=True)
    if labels.dtype.kind == "i" and not any(c.lstrip("-").isdigit() for c in classes):
        code = {str(i): i for i in range(len(classes))}
    strange = [str(v) for v in values if str(v) not in code]
    known = ", ".join(list(code)[:10])
    require(
        not strange, f"data {name}: the label {strange[0] if strange else ''} does not occur in training ({known})."
    )
    codes = np.array([code[str(v)] for v in values], dtype=np.int64)[position.reshape(-1)]
    return Samples(_inputs(x, name, "test"), torch.from_numpy(codes))


def from_clients(
    clients: Sequence[Pair],
    test: Pair | None = None,
    *,
    tests: Sequence[Pair] | None = None,
    name: str = "clients",
    normalization: Normalization | None = None,
) -> Dataset:
    """A natural federation: one pair of inputs and labels per client; `tests` has its own test pair of each."""
    require(len(clients) > 0, "from_clients needs at least one client.")
    require(test is None or tests is None, "from_clients takes `test` for all or `tests` of each, not both.")
    x, y, owners = _joined(clients, name, "")
    empty = np.bincount(owners, minlength=len(clients)) == 0
    require(not empty.any(), f"client {int(empty.argmax())} has 0 inputs and 0 labels; it needs at least one.")
    test_owners = None
    if tests is not None:
        counts = f"{len(tests)} test pairs for {len(clients)} clients"
        require(len(tests) == len(clients), f"from_clients has {counts}; it needs one of each.")
        held_x, held_y, test_owners = _joined(tests, name, "test ")
        test = held_x, held_y
    return from_arrays(x, y, test, owners=owners, test_owners=test_owners, name=name, normalization=normalization)


def _joined(pairs: Sequence[Pair], name: str, part: str) -> tuple[Tensor, Array, Array]:
    """The inputs and labels of all clients, and whose they are."""
    inputs = [_inputs(x, name, f"client {k}'s {part}".strip()) for k, (x, _) in enumerate(pairs)]
    labels = [_labels(y, name) for _, y in pairs]
    for k, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        require(len(x) == len(y), f"client {k} has {len(x)} {part}inputs and {len(y)} labels; it needs the same.")
        require(
            x.shape[1:] == inputs[0].shape[1:] and x.dtype == inputs[0].dtype,
            f"client {k}'s {part}inputs are {list(x.shape[1:])} {x.dtype}, client 0's {list(inputs[0].shape[1:])} "
            f"{inputs[0].dtype}.",
        )
    return torch.cat(inputs), np.concatenate(labels), np.repeat(np.arange(len(pairs)), [len(y) for y in labels])


def from_torch(train: Any, test: Any = None, *, owners: Any = None, name: str = "dataset") -> Dataset:
    """From torch Datasets of (input, label); every item is read once."""

    def stacked(dataset: Any) -> Pair:
        items = [dataset[i] for i in range(len(dataset))]
        require(bool(items), f"data {name}: the Dataset is empty.")
        try:
            x = torch.stack([torch.as_tensor(np.asarray(item[0])) for item in items])
            y = [item[1].item() if isinstance(item[1], Tensor) else item[1] for item in items]
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise FedadcError(f"data {name}: the items are not (input, label) of one shape ({error}).") from error
        return x, y

    x, y = stacked(train)
    return from_arrays(x, y, None if test is None else stacked(test), owners=owners, name=name)


def _inputs(x: Any, name: str, which: str) -> Tensor:
    try:
        tensor = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    except (TypeError, ValueError) as error:
        raise FedadcError(f"data {name}: {which} inputs are not numbers of one shape ({error}).") from error
    require(tensor.ndim >= 2, f"data {name}: {which} inputs need a sample dimension and at least one more.")
    require(not tensor.is_complex(), f"data {name}: {which} inputs are complex numbers.")
    require(
        tensor.ndim != 4 or tensor.shape[3] not in (1, 3) or tensor.shape[1] <= 4,
        f"data {name}: {which} images look like [height, width, channels] ({list(tensor.shape[1:])}); give them as "
        "[channels, height, width].",
    )
    if tensor.dtype != torch.uint8 and tensor.dtype != torch.float64:
        tensor = tensor.to(torch.float32)
    if tensor.is_floating_point() and tensor.numel():
        bad = torch.nonzero(~torch.isfinite(tensor).flatten(1).all(dim=1))
        if len(bad):
            sample = int(bad[0, 0])
            place = torch.nonzero(~torch.isfinite(tensor[sample]))[0].tolist()
            raise FedadcError(f"data {name}: {which} sample {sample} holds a NaN or an infinity at {place}.")
    return tensor.contiguous()


def _labels(y: Any, name: str) -> Array:
    try:
        labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
        if labels.dtype.kind == "O" and all(isinstance(v, str) for v in labels.flat):
            labels = labels.astype(str)  # what pandas gives
    except (TypeError, ValueError) as error:
        raise FedadcError(f"data {name}: labels must be integers or strings ({error}).") from error
    require(labels.ndim == 1, f"data {name}: labels need one dimension, not {labels.ndim}.")
    require(
        labels.dtype.kind in "iubU",
        f"data {name}: labels must be integers or strings, not {labels.dtype}.",
    )
    if labels.dtype == np.uint64:
        large = labels > np.iinfo(np.int64).max
        require(not large.any(), f"data {name}: label {int(large.argmax())} is larger than 63 bits can say.")
    return labels.astype(np.int64) if labels.dtype.kind in "iub" else labels


def checked_owners(owners: Any, samples: int, name: str) -> Array:
    """The client id of every sample: numbers or strings that can be sorted."""
    try:
        ids = np.asarray(owners)
        if ids.dtype.kind == "O" and all(isinstance(v, str) for v in ids.flat):
            ids = ids.astype(str)  # what pandas gives
    except (TypeError, ValueError) as error:
        raise FedadcError(f"data {name}: client ids must be numbers or strings ({error}).") from error
    require(ids.shape == (samples,), f"data {name}: {ids.size} client ids do not match {samples} labels.")
    require(ids.dtype.kind in "iubfUS", f"data {name}: client ids must be numbers or strings, not {ids.dtype}.")
    nobody = ids != ids  # NaN
    require(not nobody.any(), f"data {name}: the client id of sample {int(nobody.argmax())} is missing.")
    return ids
