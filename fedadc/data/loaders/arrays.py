"""Create a data set from memory: from arrays, tensors, a torch Dataset, or one pair of arrays per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.data.dataset import Array, Dataset, DataSpec, Normalization, Samples
from fedadc.data.labels import require_classes
from fedadc.data.spelling import DEFAULT_SPELLING, EXACT_BELOW, Spelling
from fedadc.errors import DataError, FedadcError, require, same_kind
from fedadc.tasks import Target, require_task

FAR = 10.0  # beyond it, an input that is not scaled is remarked on
ANY_NAME = Spelling(())  # only None, NaN and empty texts are missing
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
    task: str | None = None,
    targets: Sequence[str] | None = None,
    missing: Sequence[str] | None = None,
    merge_names: bool = False,
) -> Dataset:
    """A data set from inputs and labels.

    `owners` and `test_owners` hold the client id of every training and test sample. uint8 inputs are treated as images
    and scaled to [0, 1]; other inputs are not changed. Labels may be integers or strings. The classes are the labels
    that occur in training, sorted. With `task="regression"`, labels are numbers, [n] or [n, targets], and `targets` may
    name them. Missing labels, names that look alike and numbers that are no classes are refused as in a table;
    `missing` replaces the spellings of missing labels, and `merge_names` makes one of names that look alike.
    """
    require_task(task)
    inputs = checked_inputs(x, name, "training")
    classes: tuple[str, ...] = ()
    goals: tuple[Target, ...] = ()
    if task == "regression":
        labels = codes = checked_numbers(y, name)
        goals = named_targets(targets, labels.shape[1])
    else:
        require(targets is None, 'targets are for task="regression"; leave them out.')
        spelling = Spelling(merge_names=merge_names) if missing is None else Spelling(tuple(missing), merge_names)
        labels = checked_labels(y, name, spelling)
        classes, codes = _classes_of(labels, name, spelling, task)
    require(
        len(inputs) == len(labels), f"data {name}: {len(inputs)} inputs do not match {len(labels)} labels.", DataError
    )
    if owners is not None:
        owners = checked_owners(owners, len(labels), name)
    if normalization is None:
        normalization = default_normalization(inputs)
    samples = Samples(inputs, torch.from_numpy(codes))
    test_samples = None if test is None else samples_like(classes, *test, name, goals)
    if test_owners is not None:
        test_owners = checked_owners(test_owners, 0 if test_samples is None else len(test_samples), name)
    return Dataset(
        name, samples, classes, test_samples, normalization=normalization, owners=owners, test_owners=test_owners,
        targets=goals, notes=_about_ranges(inputs, normalization),
    )  # fmt: skip


def _classes_of(labels: Array, name: str, spelling: Spelling, task: str | None) -> tuple[tuple[str, ...], Array]:
    """The classes of these labels, in order, and the class of every label."""
    values, position = np.unique(labels, return_inverse=True)
    names = [str(value) for value in values]
    if names:  # a data set without samples is refused later
        require_classes(names, len(labels), f"data {name}", task)
    one = spelling.one_name(names, f"data {name}: the label")
    classes = tuple(text for text in names if one[text] == text)
    code = np.array([classes.index(one[text]) for text in names], dtype=np.int64)
    return classes, code[position.reshape(-1)]


def default_normalization(inputs: Tensor) -> Normalization:
    """Bytes are pixels and are scaled to [0, 1]; other inputs are not changed."""
    return Normalization(scale=255.0 if inputs.dtype == torch.uint8 else 1.0)


def _about_ranges(inputs: Tensor, normalization: Normalization) -> tuple[str, ...]:
    """A note on features far from ±1 that nobody scales; whole numbers may be indices, which must not be scaled."""
    if inputs.ndim != 2 or not inputs.is_floating_point() or not len(inputs) or normalization != Normalization():
        return ()
    largest = inputs.abs().amax(dim=0)
    wide = torch.nonzero(largest > FAR).flatten().tolist()
    if not wide or torch.equal(inputs, inputs.round()):
        return ()
    which = (
        f"feature {wide[0]} has" if len(wide) == 1 else f"features {wide[0]}, {wide[1]}{', ...' * (len(wide) > 2)} have"
    )
    return (
        f"{which} values up to {float(largest[wide[0]]):.4g} and inputs are not scaled: training may be slow or "
        "diverge; scale them, or give normalization (data.normalize in a config)",
    )


def named_targets(names: Sequence[str] | None, count: int) -> tuple[Target, ...]:
    """Targets whose constants are not known yet."""
    if names is None:
        names = ["label"] if count == 1 else [f"label {i + 1}" for i in range(count)]
    valid = not isinstance(names, str) and all(isinstance(name, str) for name in names) and len({*names}) == count
    require(valid, f"targets must be {count} different names, one for each number of a label, not {names!r:.60}.")
    return tuple(Target(name, scaled=False) for name in names)


def samples_like(classes: Sequence[str], x: Any, y: Any, name: str, targets: Sequence[Target] = ()) -> Samples:
    """Further samples of a data set with these classes, or of a regression with these targets.

    Integer labels are class indices unless a class is a number.
    """
    if targets:
        numbers = checked_numbers(y, name)
        wanted = f"{len(targets)} numbers for every sample"
        require(
            numbers.shape[1] == len(targets), f"data {name}: labels need {wanted}, not {numbers.shape[1]}.", DataError
        )
        return Samples(checked_inputs(x, name, "test"), torch.from_numpy(numbers))
    labels = checked_labels(y, name, ANY_NAME)
    code = {c: i for i, c in enumerate(classes)}
    values, position = np.unique(labels, return_inverse=True)
    if labels.dtype.kind == "i" and not any(c.lstrip("-").isdigit() for c in classes):
        code = {str(i): i for i in range(len(classes))}
    unknown = [str(v) for v in values if str(v) not in code]
    if unknown:
        labels_of_training = ", ".join(list(code)[:10]) + (", ..." if len(code) > 10 else "")
        raise DataError(
            f"data {name}: the label {unknown[0]} does not occur in training, whose labels are {labels_of_training}."
        )
    codes = np.array([code[str(v)] for v in values], dtype=np.int64)[position.reshape(-1)]
    return Samples(checked_inputs(x, name, "test"), torch.from_numpy(codes))


def from_clients(
    clients: Sequence[Pair] | Mapping[str, Pair],
    test: Pair | None = None,
    *,
    tests: Sequence[Pair] | Mapping[str, Pair] | None = None,
    name: str = "clients",
    normalization: Normalization | None = None,
    task: str | None = None,
    targets: Sequence[str] | None = None,
    missing: Sequence[str] | None = None,
    merge_names: bool = False,
) -> Dataset:
    """A natural federation from one pair of inputs and labels per client, in a list or by name.

    `tests` holds one test pair per client. In a list, a client's name is its position.
    """
    require(len(clients) > 0, "from_clients needs at least one client.")
    names = None
    if isinstance(clients, Mapping):
        names, clients = np.array([str(name) for name in clients]), [*clients.values()]
    if isinstance(tests, Mapping):
        known = set() if names is None else {*names.tolist()}
        require({*map(str, tests)} == known, "from_clients needs the same client names in `clients` and `tests`.")
        tests = [tests[name] for name in tests] if names is None else [_named(tests, name) for name in names.tolist()]
    require(
        test is None or tests is None,
        "from_clients takes `test` (one pair for all clients) or `tests` (one pair per client), not both.",
    )
    x, y, owners = _joined(clients, name, "", task)
    empty = np.bincount(owners, minlength=len(clients)) == 0
    require(
        not empty.any(),
        f"client {int(empty.argmax())} has 0 inputs and 0 labels; it needs at least one sample.",
        DataError,
    )
    test_owners = None
    if tests is not None:
        counts = f"{len(tests)} test pairs for {len(clients)} clients"
        require(len(tests) == len(clients), f"from_clients got {counts}; it needs one test pair per client.")
        test_x, test_y, test_owners = _joined(tests, name, "test ", task)
        test = test_x, test_y
    if names is not None:
        owners, test_owners = names[owners], None if test_owners is None else names[test_owners]
    return from_arrays(
        x, y, test, owners=owners, test_owners=test_owners, name=name, normalization=normalization, task=task,
        targets=targets, missing=missing, merge_names=merge_names,
    )  # fmt: skip


def _named(pairs: Mapping[str, Pair], name: str) -> Pair:
    return next(pair for key, pair in pairs.items() if str(key) == name)


def _joined(pairs: Sequence[Pair], name: str, part: str, task: str | None) -> tuple[Tensor, Array, Array]:
    """The inputs, labels and owners of all clients' samples."""
    require_task(task)
    for k, pair in enumerate(pairs):
        require(
            isinstance(pair, tuple | list) and len(pair) == 2,
            f"client {k} must be a pair (inputs, labels), not {type(pair).__name__}.",
        )
    inputs = [checked_inputs(x, name, f"client {k}'s {part}".strip()) for k, (x, _) in enumerate(pairs)]
    labels = [checked_numbers(y, name) if task == "regression" else checked_labels(y, name, ANY_NAME) for _, y in pairs]
    for k, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        require(
            len(x) == len(y),
            f"client {k} has {len(x)} {part}inputs and {len(y)} labels; it needs one label per input.",
            DataError,
        )
        require(
            x.shape[1:] == inputs[0].shape[1:] and x.dtype == inputs[0].dtype,
            f"client {k}'s {part}inputs are {list(x.shape[1:])} {x.dtype}, but client 0's are "
            f"{list(inputs[0].shape[1:])} {inputs[0].dtype}; all clients need the same shape and type.",
            DataError,
        )
    return torch.cat(inputs), np.concatenate(labels), np.repeat(np.arange(len(pairs)), [len(y) for y in labels])


def from_torch(
    train: Any,
    test: Any = None,
    *,
    owners: Any = None,
    name: str = "dataset",
    task: str | None = None,
    missing: Sequence[str] | None = None,
    merge_names: bool = False,
) -> Dataset:
    """A data set from torch Datasets whose items are (input, label). Every item is read once."""

    def stacked(dataset: Any) -> Pair:
        items = [dataset[i] for i in range(len(dataset))]
        require(bool(items), f"data {name}: the Dataset is empty.", DataError)
        try:
            x = torch.stack([torch.as_tensor(np.asarray(item[0])) for item in items])
            y = [_plain_label(item[1]) for item in items]
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise DataError(f"data {name}: items must be (input, label) with inputs of one shape ({error}).") from error
        return x, y

    x, y = stacked(train)
    further = None if test is None else stacked(test)
    return from_arrays(x, y, further, owners=owners, name=name, task=task, missing=missing, merge_names=merge_names)


def _plain_label(label: Any) -> Any:
    """The label of an item of a torch Dataset, a tensor as a number or a list of numbers."""
    if not isinstance(label, Tensor):
        return label
    return label.item() if label.numel() == 1 else label.tolist()


def checked_inputs(x: Any, name: str, which: str) -> Tensor:
    """Inputs as a tensor of bytes or floating-point numbers, all of them finite."""
    try:
        tensor = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    except (TypeError, ValueError) as error:
        raise DataError(f"data {name}: {which} inputs must be numbers of one shape ({error}).") from error
    require(tensor.ndim >= 2, f"data {name}: {which} inputs need a sample dimension and at least one more.", DataError)
    require(
        not tensor.is_complex(), f"data {name}: {which} inputs are complex numbers; real numbers are needed.", DataError
    )
    require(
        tensor.ndim != 4 or tensor.shape[3] not in (1, 3) or tensor.shape[1] <= 4,
        f"data {name}: {which} images seem to be [height, width, channels] ({list(tensor.shape[1:])}); pass them as "
        "[channels, height, width].",
        DataError,
    )
    if tensor.dtype != torch.uint8 and tensor.dtype != torch.float64:
        tensor = tensor.to(torch.float32)
    if tensor.is_floating_point() and tensor.numel():
        invalid = torch.nonzero(~torch.isfinite(tensor).flatten(1).all(dim=1))
        if len(invalid):
            sample = int(invalid[0, 0])
            position = torch.nonzero(~torch.isfinite(tensor[sample]))[0].tolist()
            raise DataError(f"data {name}: {which} sample {sample} has a NaN or an infinity at {position}.")
    return tensor.contiguous()


def checked_labels(y: Any, name: str, spelling: Spelling = DEFAULT_SPELLING) -> Array:
    """Labels as an array of int64 or of texts, none of them missing. Whole numbers may be stored as floats."""
    try:
        labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    except (TypeError, ValueError) as error:
        raise DataError(f"data {name}: labels must be integers or strings ({error}).") from error
    require(labels.ndim == 1, f"data {name}: labels must have one dimension, not {labels.ndim}.", DataError)
    _require_labels(labels, name, spelling)
    if labels.dtype.kind == "O" and all(isinstance(v, str) for v in labels):
        labels = labels.astype(str)  # pandas stores strings as objects
    if labels.dtype.kind == "f" and (labels == np.round(labels)).all() and (np.abs(labels) < EXACT_BELOW).all():
        labels = labels.astype(np.int64)
    require(
        labels.dtype.kind in "iubU",
        f"data {name}: labels must be integers or strings, not {labels.dtype}; for numbers to predict, set task to "
        "regression.",
        DataError,
    )
    if labels.dtype == np.uint64:
        large = labels > np.iinfo(np.int64).max
        require(
            not large.any(),
            f"data {name}: the label of sample {int(large.argmax())} is larger than 2^63 - 1.",
            DataError,
        )
    return labels.astype(np.int64) if labels.dtype.kind in "iub" else labels


def _require_labels(labels: Array, name: str, spelling: Spelling) -> None:
    """Refuse missing labels: None, NaN, and the spellings of missing values."""
    if labels.dtype.kind == "f":
        missing = np.isnan(labels)
    elif labels.dtype.kind == "O":
        missing = np.array([v is None or v is not v or _is_nan(v) for v in labels])
        words = {v for v in labels if isinstance(v, str)}
        missing |= np.array([isinstance(v, str) and v in words and spelling.is_missing(v) for v in labels], dtype=bool)
    elif labels.dtype.kind == "U":
        values, position = np.unique(labels, return_inverse=True)
        missing = np.array([spelling.is_missing(str(v)) for v in values], dtype=bool)[position.reshape(-1)]
    else:
        return
    if missing.any():
        sample = int(missing.argmax())
        raise DataError(
            f"data {name}: the label of sample {sample} is missing ({labels[sample]!r}); leave the sample out, or say "
            "with missing which spellings are missing values."
        )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def checked_numbers(y: Any, name: str) -> Array:
    """Labels that are numbers, as an array [n, targets], float32 or float64, all of them finite."""
    try:
        labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    except (TypeError, ValueError) as error:
        raise DataError(f"data {name}: labels must be numbers ({error}).") from error
    require(labels.dtype.kind in "iubf", f"data {name}: labels must be numbers, not {labels.dtype}.", DataError)
    require(
        labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] > 0),
        f"data {name}: labels must have the shape [n] or [n, targets], not {list(labels.shape)}.",
        DataError,
    )
    numbers = labels.reshape(len(labels), -1)
    numbers = numbers.astype(numbers.dtype if numbers.dtype in (np.float32, np.float64) else np.float64)
    missing = ~np.isfinite(numbers).all(axis=1)
    require(
        not missing.any(), f"data {name}: the label of sample {int(missing.argmax())} is NaN or infinite.", DataError
    )
    return np.ascontiguousarray(numbers)


def checked_owners(owners: Any, samples: int, name: str) -> Array:
    """The client id of every sample, as an array of numbers or strings."""
    try:
        ids = np.asarray(owners)
        if ids.dtype.kind == "O" and all(isinstance(v, str) for v in ids.flat):
            ids = ids.astype(str)  # pandas stores strings as objects
    except (TypeError, ValueError) as error:
        raise DataError(f"data {name}: client ids must be numbers or strings ({error}).") from error
    require(ids.shape == (samples,), f"data {name}: {ids.size} client ids do not match {samples} labels.", DataError)
    require(
        ids.dtype.kind in "iubfUS", f"data {name}: client ids must be numbers or strings, not {ids.dtype}.", DataError
    )
    missing = ids != ids  # NaN is the only value that differs from itself
    require(not missing.any(), f"data {name}: the client id of sample {int(missing.argmax())} is missing.", DataError)
    return ids


def inputs_like(spec: DataSpec, x: Any, name: str) -> Samples:
    """Inputs without labels, to be predicted; they must have the shape and the type of those of training."""
    try:
        inputs = checked_inputs(x, name, "further")
    except FedadcError as error:
        raise same_kind(error, f"x: {error}") from error
    if inputs.is_floating_point() and spec.dtype.is_floating_point:
        inputs = inputs.to(spec.dtype)
    require(
        inputs.shape[1:] == spec.input_shape and inputs.dtype == spec.dtype,
        f"x has inputs {list(inputs.shape[1:])} of type {inputs.dtype}, but the model was trained on "
        f"{list(spec.input_shape)} of type {spec.dtype}.",
    )
    return Samples(inputs, spec.task.blank_labels(len(inputs)))
