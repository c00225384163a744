"""Random generators for everything in a run, derived only from (seed, purpose, round, client).

No generator is kept between rounds or clients, so a result cannot depend on which process ran a client, in which
order, or how often the model was evaluated. A checkpoint needs no generator state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _key(seed: int, purpose: str, round: int, client: int | str, size: int) -> int:
    who = json.dumps(client) if isinstance(client, str) else client  # quoted: the name "5" is not the number 5
    text = f"{seed}|{purpose}|{round}|{who}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, client: int | str = -1) -> np.random.Generator:
    """A new NumPy generator for this purpose, round and client (-1: the server).

    Before training, a client is known by its name: its number depends on who else takes part.
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, round, client, 16)))


@contextmanager
def torch_seeded(seed: int, purpose: str, round: int = 0, client: int = -1) -> Iterator[None]:
    """Seed torch's global generators, which dropout and module constructors use; restore them afterwards."""
    key = _key(seed, purpose, round, client, 8) % 2**63
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    mps = torch.backends.mps.is_available()
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state_all() if cuda else []
    before_mps = torch.mps.get_rng_state() if mps else None
    torch.default_generator.manual_seed(key)
    if cuda:
        torch.cuda.manual_seed_all(key)
    if mps:
        torch.mps.manual_seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if cuda:
            torch.cuda.set_rng_state_all(before_cuda)
        if before_mps is not None:
            torch.mps.set_rng_state(before_mps)
