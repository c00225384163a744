"""Random numbers come from (seed, purpose, round, client) and from nothing else."""

from __future__ import annotations

import itertools

import torch

from fedadc.rng import generator, torch_seeded


def test_every_part_of_the_key_counts() -> None:
    keys = itertools.product((0, 1), ("batches", "cohort"), (1, 2), (-1, 0, 12))
    draws = [generator(*key).integers(2**62) for key in keys]
    assert len(set(draws)) == len(draws)


def test_keys_do_not_run_into_each_other() -> None:
    assert generator(1, "a", 12, 3).integers(2**62) != generator(1, "a", 1, 23).integers(2**62)


def test_a_client_may_be_a_name_and_a_name_is_no_number() -> None:
    clients = (5, -1, "5", "-1", '"5"', "north", "Nørd", "\ud800")
    draws = [generator(0, "hold out test", client=client).integers(2**62) for client in clients]
    assert len(set(draws)) == len(draws)
    assert generator(0, "x", client="a").integers(2**62) == generator(0, "x", client="a").integers(2**62)


def test_the_same_key_is_the_same_stream() -> None:
    assert generator(5, "x", 2, 3).normal(size=4).tolist() == generator(5, "x", 2, 3).normal(size=4).tolist()


def test_torch_is_seeded_inside_and_restored_outside() -> None:
    before = torch.get_rng_state()
    with torch_seeded(1, "dropout", 2, 3):
        first = torch.rand(3)
    with torch_seeded(1, "dropout", 2, 3):
        assert torch.equal(torch.rand(3), first)
    with torch_seeded(1, "dropout", 2, 4):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
