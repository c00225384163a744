"""Batches: which samples in which order, augmentation, and the gathering of fresh normalized inputs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedadc.data import Clients, Normalization, Samples
from fedadc.data.batches import Augment, ClientData, Inputs, count_steps, shuffled
from fedadc.errors import FedadcError
from fedadc.tasks import Classification

SIZES = st.integers(1, 60)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(SIZES, SIZES, st.integers(1, 40))
def test_steps_are_full_batches_and_each_pass_is_a_permutation(samples: int, batch: int, steps: int) -> None:
    batches = list(shuffled(samples, batch, steps, None, rng()))
    assert len(batches) == steps
    assert {len(b) for b in batches} == {min(batch, samples)}
    stream = np.concatenate(batches)
    for start in range(0, len(stream), samples):  # the data is used up before any sample comes again
        part = stream[start : start + samples]
        assert len(set(part.tolist())) == len(part)
        assert part.min() >= 0 and part.max() < samples


@given(SIZES, SIZES, st.integers(1, 5))
def test_epochs_use_every_sample_once_and_only_the_last_batch_is_short(samples: int, batch: int, epochs: int) -> None:
    batches = list(shuffled(samples, batch, None, epochs, rng()))
    per_epoch = len(batches) // epochs
    assert per_epoch * epochs == len(batches)
    for e in range(epochs):
        own = batches[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(np.concatenate(own).tolist()) == list(range(samples))
        assert all(len(b) == min(batch, samples) for b in own[:-1]) and len(own[-1]) <= batch


@given(st.lists(SIZES, min_size=1, max_size=6), SIZES, st.integers(1, 9), st.booleans())
def test_count_steps_counts_what_shuffled_yields(sizes: list[int], batch: int, amount: int, by_steps: bool) -> None:
    steps, epochs = (amount, None) if by_steps else (None, amount)
    expected = [len(list(shuffled(n, batch, steps, epochs, rng()))) for n in sizes]
    assert count_steps(np.array(sizes), batch, steps, epochs).tolist() == expected


def test_a_batch_larger_than_the_data_is_all_of_it_each_time() -> None:
    for batch in shuffled(5, 32, 4, None, rng()):
        assert sorted(batch.tolist()) == [0, 1, 2, 3, 4]


def test_order_is_seeded_and_every_pass_is_shuffled_anew() -> None:
    first, again, other = (np.stack(list(shuffled(40, 10, 8, None, rng(s)))) for s in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert not np.array_equal(first[:4], first[4:])


def images(n: int, height: int = 6, width: int = 7) -> torch.Tensor:
    return torch.from_numpy(rng(3).integers(1, 256, size=(n, 2, height, width), dtype=np.uint8))


def slow_augment(x: np.ndarray, crop: int, flip: bool, draws: np.random.Generator) -> np.ndarray:
    """One sample after the other: pad, cut, mirror; the draws in the order flips, tops, lefts."""
    flips = draws.integers(2, size=len(x)) if flip else np.zeros(len(x))
    tops, lefts = (draws.integers(2 * crop + 1, size=(2, len(x)))) if crop else np.zeros((2, len(x)), int)
    out = np.empty_like(x)
    for i, image in enumerate(x):
        padded = np.pad(image, [(0, 0), (crop, crop), (crop, crop)])
        cut = padded[:, tops[i] : tops[i] + x.shape[2], lefts[i] : lefts[i] + x.shape[3]]
        out[i] = cut[:, :, ::-1] if flips[i] else cut
    return out


@settings(max_examples=25)
@given(st.integers(1, 20), st.integers(0, 4), st.booleans(), st.integers(0, 3))
def test_augment_equals_a_loop_over_samples(n: int, crop: int, flip: bool, seed: int) -> None:
    x = images(n)
    out = Augment(crop=crop, flip=flip)(x.clone(), rng(seed))
    assert out.shape == x.shape and out.dtype == torch.uint8
    assert np.array_equal(out.numpy(), slow_augment(x.numpy(), crop, flip, rng(seed)))


def test_every_crop_and_its_mirror_image_comes_up() -> None:
    """400 copies of one image, one pixel of padding: 9 crops × 2, nothing else, none missing."""
    image = images(1)[0].numpy()
    padded = np.pad(image, [(0, 0), (1, 1), (1, 1)])
    crops = [padded[:, t : t + 6, left : left + 7] for t, left in itertools.product(range(3), repeat=2)]
    expected = {c.tobytes() for c in crops} | {c[:, :, ::-1].tobytes() for c in crops}
    out = Augment(crop=1, flip=True)(torch.from_numpy(image).expand(400, -1, -1, -1), rng())
    assert {o.tobytes() for o in out.numpy()} == expected


def test_flip_mirrors_columns_of_about_half_the_samples() -> None:
    x = images(400)
    out = Augment(flip=True)(x, rng())
    mirrored = (out == x.flip(-1)).flatten(1).all(dim=1)
    assert ((out == x).flatten(1).all(dim=1) ^ mirrored).all()
    assert 140 < int(mirrored.sum()) < 260  # 200 ± 6 standard deviations


def test_augment_is_seeded() -> None:
    augment, x = Augment(crop=2, flip=True), images(10)
    assert torch.equal(augment(x, rng(1)), augment(x, rng(1)))
    assert not torch.equal(augment(x, rng(1)), augment(x, rng(2)))


def test_no_augmentation_is_false_and_a_negative_crop_refused() -> None:
    assert not Augment() and Augment(crop=1) and Augment(flip=True)
    with pytest.raises(FedadcError, match=r"^crop must be at least 0, not -1"):
        Augment(crop=-1)


RGB = Normalization(255.0, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "constants", [Normalization(), Normalization(scale=16.0), RGB, Normalization(255.0, (0.3,), (0.7,))]
)
def test_gather_normalizes_as_the_formula_says(constants: Normalization, dtype: torch.dtype) -> None:
    raw = rng().integers(0, 256, size=(9, 3, 5, 4), dtype=np.uint8)
    samples = Samples(torch.from_numpy(raw.copy()), torch.arange(9))
    at = np.array([7, 0, 7, 3])
    x, y = Inputs(constants, dtype).gather(samples, at)
    mean = np.reshape(constants.mean or 0.0, (-1, 1, 1))
    std = np.reshape(constants.std or 1.0, (-1, 1, 1))
    expected = (raw[at].astype(np.float64) / constants.scale - mean) / std
    assert x.dtype == dtype and y.tolist() == at.tolist()
    np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)
    assert np.array_equal(samples.x.numpy(), raw)  # the samples themselves stay as they were


@pytest.mark.parametrize("layout", ["plain", "offset", "channels last", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_gather_makes_fresh_aligned_contiguous_tensors(layout: str, dtype: torch.dtype) -> None:
    """Whatever the samples' memory looks like, a batch is the same bits in the same layout."""
    values = torch.from_numpy(rng().integers(0, 256, size=(8, 3, 5, 5))).to(dtype)
    held = {
        "plain": values,
        "offset": torch.cat([torch.zeros(1, dtype=dtype), values.flatten()])[1:].view_as(values),
        "channels last": values.contiguous(memory_format=torch.channels_last),
        "transposed": values.transpose(2, 3).contiguous().transpose(2, 3),
    }[layout]
    samples, before = Samples(held, torch.arange(8)), held.clone()
    for at in (np.arange(8), np.array([5]), np.array([6, 1, 1])[::-1]):
        x, y = Inputs(RGB).gather(samples, at)
        assert x.is_contiguous() and x.stride()[0] == 75
        assert x.data_ptr() % 64 == 0 and y.data_ptr() % 64 == 0
        plain = Inputs(RGB).gather(Samples(values.clone(), torch.arange(8)), at)[0]
        assert torch.equal(x, plain)
        x.zero_()
        y.zero_()
    assert torch.equal(samples.x, before) and samples.y.tolist() == list(range(8))


def client(augment: Augment | None = None) -> ClientData:
    samples = Samples(images(12), torch.arange(12) % 4)
    inputs = Inputs(Normalization(scale=255.0))
    return ClientData(samples, np.array([9, 2, 4, 5, 11]), Classification(4), inputs, augment or Augment())


def test_client_batches_are_its_own_samples() -> None:
    mine = client()
    assert len(mine) == 5 and mine.class_counts().tolist() == [1, 2, 1, 1]  # labels 1, 2, 0, 1, 3
    for batch in mine.batches([np.array([4, 0]), np.array([2])], lambda purpose: rng()):
        at = mine.indices[batch.position]
        assert torch.equal(batch.y, mine.samples.y[at])
        assert torch.equal(batch.x, mine.samples.x[at].float() / 255)


def test_in_order_is_every_sample_once_without_augmentation() -> None:
    mine = client(Augment(crop=2, flip=True))
    parts = list(mine.in_order(None, 2))
    assert [len(p.y) for p in parts] == [2, 2, 1]
    whole = torch.cat([p.x for p in parts])
    assert torch.equal(whole, mine.samples.x[mine.indices].float() / 255)
    batch = next(mine.batches([np.arange(5)], lambda purpose: rng()))
    assert not torch.equal(batch.x, whole)  # training batches are augmented
    (some,) = mine.in_order(np.array([1, 4]), 9)
    assert torch.equal(some.x, whole[[1, 4]]) and some.position.tolist() == [1, 4]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=50))
def test_class_counts_of_clients(pairs: list[tuple[int, int]]) -> None:
    owner, labels = (np.array(side) for side in zip(*pairs, strict=True))
    clients = Clients.from_owner(owner, 5)
    counts = clients.class_counts(torch.from_numpy(labels), 4)
    assert counts.tolist() == [[pairs.count((k, c)) for c in range(4)] for k in range(5)]
    assert clients.sizes.tolist() == [owner.tolist().count(k) for k in range(5)]
    assert all((owner[clients[k]] == k).all() for k in range(5))
