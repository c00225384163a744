"""Uplinks: the properties of each encoding, and that nothing else depends on the uplink."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import small_federation, updated
from fedadc.communication.network import Communication
from fedadc.communication.uplinks import RESIDUAL, UPLINKS, EightBit, Full, TopK, Uplink
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedADC, FedAvg, FedDyn, FedPer, Method, Scaffold
from fedadc.models import MLP
from fedadc.rng import generator
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork

vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


def federation(uplink: Uplink, method: Method | None = None, **kw: Any) -> Federation:
    torch.manual_seed(0)
    return Federation(
        model=MLP((5,), 4, [6]).double(),
        data=small_federation(),
        method=method or FedAvg(),
        local=LocalWork(steps=3, batch_size=4, lr=0.1),
        communication=Communication(uplink=uplink),
        **{"cohort": 3, **kw},
    )


def rounds(uplink: Uplink, method: Method | None = None, many: int = 4, **kw: Any) -> list[Round]:
    return list(federation(uplink, method, **kw).rounds(many))


@given(vectors, vectors, st.floats(0.01, 1))
def test_top_k_sends_or_keeps_every_entry_and_loses_none(delta: torch.Tensor, old: torch.Tensor, share: float) -> None:
    """sent + kept = delta + what was kept before, bit for bit; what is sent is at least as large as what is kept."""
    residual = torch.zeros_like(delta)
    residual[: min(len(old), len(delta))] = old[: len(delta)]
    uplink = TopK(share=share)
    message, kept = uplink.encode(delta, {RESIDUAL: residual}, generator(0, "uplink"))
    sent = uplink.decode(message, len(delta))
    assert torch.equal(sent + kept[RESIDUAL], delta + residual)
    assert share * len(delta) - 1e-9 <= len(message["values"]) < share * len(delta) + 1
    assert message["values"].abs().min() >= kept[RESIDUAL].abs().max()
    assert message["values"].element_size() + message["index"].element_size() == 8 + 4


@pytest.mark.parametrize(("share", "sent"), [(0.07, 7), (0.14, 14), (0.28, 28), (0.55, 55), (0.001, 1), (0.075, 8)])
def test_top_k_is_the_share_rounded_up(share: float, sent: int) -> None:
    message, _ = TopK(share=share, error_feedback=False).encode(torch.randn(100), {}, generator(0, "uplink"))
    assert len(message["values"]) == sent


def test_a_block_larger_than_all_is_one_block() -> None:
    message, _ = EightBit(block=10**9).encode(torch.randn(100), {}, generator(0, "uplink"))
    assert message["scale"].shape == (1,) and message["levels"].shape == (100,)


def test_a_residual_that_overflows_makes_the_update_not_finite() -> None:
    chosen = federation(TopK(share=0.5))
    state = chosen.start()
    full = {RESIDUAL: torch.full_like(state.theta, 1.7e308)}
    report = updated(chosen, 1, -1e308, state.theta, 0, 3, state=full)  # a step that adds about as much
    assert not report.finite


def test_top_k_sends_the_residual_in_later_rounds() -> None:
    """Over rounds, all that was sent and what is still kept is the sum of all deltas; without feedback it is not."""
    deltas = torch.randn(50, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uplink, state, sent = TopK(share=0.1), {RESIDUAL: torch.zeros(30, dtype=torch.float64)}, torch.zeros(30)
    for delta in deltas:
        message, state = uplink.encode(delta, state, generator(0, "uplink"))
        sent = sent + uplink.decode(message, 30)
    torch.testing.assert_close(sent + state[RESIDUAL], deltas.sum(dim=0), rtol=0, atol=1e-12)
    forgetful = TopK(share=0.1, error_feedback=False)
    lost = sum(forgetful.decode(forgetful.encode(d, {}, generator(0, "uplink"))[0], 30) for d in deltas)
    assert (lost - deltas.sum(dim=0)).norm() > 3 * state[RESIDUAL].norm()


@given(vectors, st.integers(1, 50), st.integers(0, 2**32))
def test_eight_bits_are_one_of_the_two_levels_around_an_entry(delta: torch.Tensor, block: int, seed: int) -> None:
    uplink = EightBit(block=block)
    message, kept = uplink.encode(delta, {}, np.random.default_rng(seed))
    read = uplink.decode(message, len(delta))
    assert not kept and message["levels"].dtype == torch.int8 and len(message["levels"]) == len(delta)
    for start in range(0, len(delta), block):
        part, scale = slice(start, start + block), delta[start : start + block].abs().max()
        assert ((read[part] - delta[part]).abs() <= scale / 127 * (1 + 1e-12)).all()
        assert torch.equal(read[part][delta[part] == 0], delta[part][delta[part] == 0])


def test_eight_bits_are_right_on_average() -> None:
    """The mean over many draws lies within 4.5 standard errors of every entry (Bernoulli, known variance)."""
    delta = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uplink, many = EightBit(block=64), 5_000
    reads = [uplink.decode(uplink.encode(delta, {}, generator(0, "uplink", n))[0], 200) for n in range(many)]
    mean = torch.stack(reads).mean(dim=0)
    step = torch.cat([torch.full((len(b),), float(b.abs().max()) / 127) for b in delta.split(64)])
    fraction = delta / step - (delta / step).floor()
    error = step * (fraction * (1 - fraction) / many).sqrt()
    assert ((mean - delta).abs() <= 4.5 * error + 1e-12).all()
    nearest = (delta / step).round() * step
    assert ((nearest - delta).abs() > 4.5 * error).any()  # rounding to the nearest would fail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eight_bits_take_zeros_and_extremes(dtype: torch.dtype) -> None:
    for values in ([0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [1e-38, -1e-38, 5e-39], [3e38, -3e38, 1.0]):
        delta = torch.tensor(values, dtype=dtype)
        read = EightBit(block=2).decode(EightBit(block=2).encode(delta, {}, generator(0, "uplink"))[0], 3)
        assert torch.isfinite(read).all() and read.dtype == dtype
        assert (read - delta).abs().max() <= delta.abs().max() / 127


def test_top_k_with_all_entries_equals_full_and_bytes_are_those_of_the_messages() -> None:
    plain, whole = rounds(Full()), rounds(TopK(share=1.0))
    entries = plain[0].state.theta.numel()
    for a, b in zip(plain, whole, strict=True):
        assert torch.equal(a.state.theta, b.state.theta)
        assert a.ledger.up == {"delta": 3 * 8 * entries} and b.ledger.up == {"delta": 3 * (8 + 4) * entries}
    few, eight = rounds(TopK(share=0.1))[-1], rounds(EightBit(block=16))[-1]
    assert few.bytes_up == 3 * 12 * int(np.ceil(0.1 * entries))
    assert eight.bytes_up == 3 * (entries + 8 * -(-entries // 16))
    assert not torch.equal(few.state.theta, plain[-1].state.theta)
    assert few.bytes_down == plain[-1].bytes_down


def test_a_residual_changes_only_if_the_upload_is_counted() -> None:
    from fedadc.training.faults import Faults

    taken = rounds(TopK(share=0.2), many=5, faults=Faults(drop=0.4))
    before: Any = {}
    for result in taken:
        counted = set(result.cohort) - set(result.dropped)
        for client, state in result.state.clients.items():
            same = client in before and torch.equal(state[RESIDUAL], before[client])
            assert same == (client not in counted)
        before = {client: state[RESIDUAL] for client, state in result.state.clients.items()}


def test_tracked_uploads_stay_exact() -> None:
    """SCAFFOLD's c is the mean of all clients' c_k, also if delta is compressed."""
    last = rounds(TopK(share=0.1), Scaffold(), many=6)[-1].state
    mean = sum(state["c"] for state in last.clients.values()) / 6
    torch.testing.assert_close(last.server["c"], mean, rtol=0, atol=1e-12)


def test_feddyn_needs_the_full_uplink_because_h_is_computed_from_delta() -> None:
    with pytest.raises(FedadcError, match=r"communication\.uplink to full"):
        federation(TopK(share=0.5), FedDyn())


@pytest.mark.parametrize("uplink", UPLINKS.values())
@pytest.mark.parametrize("method", [FedADC(), Scaffold(), FedPer()])
def test_workers_give_the_same_bits(uplink: type[Uplink], method: Method) -> None:
    alone = rounds(uplink(), method, many=3)[-1]
    chosen = federation(uplink(), method, workers=2)
    try:
        shared = list(chosen.rounds(3))[-1]
    finally:
        chosen.close()
    assert torch.equal(alone.state.theta, shared.state.theta) and alone.ledger == shared.ledger
    assert {k: sorted(v) for k, v in alone.state.clients.items()} == {
        k: sorted(v) for k, v in shared.state.clients.items()
    }


@pytest.mark.parametrize("make", [lambda: TopK(share=0), lambda: TopK(share=1.5), lambda: EightBit(block=0)])
def test_bad_settings_are_refused(make: Any) -> None:
    with pytest.raises(FedadcError):
        make()
