"""A client's own model: from the checkpoint of a run whose method keeps such models, or from `fedadc personalize`."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedadc.data.roster import client_place
from fedadc.errors import DataError, FedadcError, require
from fedadc.models.vectors import State, Vector
from fedadc.runs.layout import CHECKPOINTS, CLIENT_STATES, client_state_file
from fedadc.runs.manifest import Manifest, UnusableCheckpoint, decode, read_file, read_tensors
from fedadc.training.agreement import Agreement

log = logging.getLogger("fedadc")
MANIFEST = re.compile(r"round-\d{8,}\.json")


def client_number(client: int | str, names: Sequence[str] | None, count: int | None) -> int:
    """The number of a client, from its name or its number."""
    if names is not None:
        return client_place(client, names)
    text = str(client)
    if text.isdecimal() and (count is None or int(text) < count):
        return int(text)
    raise FedadcError(f"client must be a number in 0..{(count or 1) - 1}, not {client!r:.60}.")


def stored_model(run: Path, agreement: Agreement, client: int, settings: str | None) -> tuple[Vector, int]:
    """The model of a client's own after the round of the newest good checkpoint, and that round.

    `settings` is the fingerprint of the run's settings. The data of the run is not needed.
    """
    reasons: list[str] = []
    for path in sorted((run / CHECKPOINTS).glob("round-*.json"), reverse=True):
        if not MANIFEST.fullmatch(path.name):
            continue
        try:
            manifest = decode(read_file(path))
            if manifest.name != path.stem or settings not in (None, manifest.config):
                raise UnusableCheckpoint("it belongs to another run")
            return _personal(run / CHECKPOINTS, manifest, agreement, client), manifest.round
        except UnusableCheckpoint as error:
            reasons.append(f"{path} cannot be used: {error}")
        except OSError as error:
            reasons.append(f"{path} cannot be read ({error.strerror or error})")
    why = "; ".join(reasons) or f"it has no {CHECKPOINTS}"
    raise DataError(f"{run} has no usable state of client {client}: {why}.")


def _personal(folder: Path, manifest: Manifest, agreement: Agreement, client: int) -> Vector:
    method, like = agreement.method, agreement.start
    theta = read_tensors(folder / f"{manifest.name}.safetensors", manifest.state).get("theta")
    if theta is None or theta.shape != like.shape or theta.dtype != like.dtype:
        raise UnusableCheckpoint("it belongs to another model")
    theta = theta.to(like.device, copy=True)
    found = next(((round, expected) for k, round, expected in manifest.clients if k == client), None)
    own: State = agreement.client_state(theta)  # of a client that was never selected
    if found is None:
        log.warning("client %d was never selected, so its model is the one with which it would begin", client)
    else:
        own = read_tensors(folder / CLIENT_STATES / client_state_file(client, found[0]), found[1])
    try:
        personal = method.personal(theta, {name: v.to(like.device, copy=True) for name, v in own.items()})
    except (KeyError, RuntimeError, IndexError, TypeError):  # a state of other names or shapes
        raise UnusableCheckpoint("its states of clients belong to another method") from None
    if not _fits(personal, like):
        raise UnusableCheckpoint("it belongs to another model")
    return personal


def _fits(vector: Tensor, like: Tensor) -> bool:
    same = vector.shape == like.shape and vector.dtype == like.dtype
    return same and bool(torch.isfinite(vector).all())


def require_states_here(run: Path, at_sites: bool) -> None:
    """Refuse a run whose clients' models are not in its directory."""
    require(
        not at_sites,
        f"{run} is a federation of real sites, whose own models stay with them; `client` is for simulations.",
    )
