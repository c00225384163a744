"""Downlinks and the virtual clock: all downlinks give the same training bits; bytes and seconds are correct."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation, steps_of
from fedadc.communication.clock import Between, Clock, Devices, Distribution, Fixed, LogNormal, read_trace
from fedadc.communication.downlinks import DOWNLINKS, Broadcast, Downlink, Overlap, Pull
from fedadc.communication.network import Communication, Network
from fedadc.communication.uplinks import TopK, Uplink
from fedadc.data.batches import shuffled
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS, PAIRS, FedADC, FedAvg, LocalOnly, Method, Scaffold, SlowMo
from fedadc.models import MLP
from fedadc.objectives import OBJECTIVES, GlobalDistillation, SelfConfidence
from fedadc.partitions import Partition
from fedadc.rng import generator
from fedadc.runs.checkpoint import Checkpoints
from fedadc.selections import Selection
from fedadc.training.ensembles import EMA, Ensembles, Lookahead
from fedadc.training.faults import Faults
from fedadc.training.server import Server
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork
from fedadc.views.round_info import RoundInfo

FAMOUS = {**{name: cls() for name, cls in METHODS.items()},
          **{short: METHODS[m](objective=OBJECTIVES[o]()) for short, (m, o) in PAIRS.items()}}  # fmt: skip
HIDDEN = {
    "slowmo",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "feddyn",
    "local_only",
}  # their server keeps vectors that clients never receive


def federation(method: Method, downlink: Downlink | None = None, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": MLP((5,), 4, [6], projection=3),
        "data": small_federation(clients=8),
        "method": method,
        "local": LocalWork(steps=3, batch_size=4, lr=0.1),
        "cohort": 3,
        "communication": Communication(downlink=downlink or Pull()),
    }
    return Federation(**{**settings, **kw})


def train(method: Method, downlink: Downlink | None = None, many: int = 6, **kw: Any) -> list[Round]:
    return list(federation(method, downlink, **kw).rounds(many))


@pytest.mark.parametrize("name", sorted(FAMOUS.keys() - HIDDEN))
def test_every_downlink_trains_with_the_same_bits(name: str) -> None:
    faulty = Faults(drop=0.3)
    runs = {s: train(FAMOUS[name], make(), faults=faulty, clock=Clock()) for s, make in DOWNLINKS.items()}
    for other in ("broadcast", "overlap"):
        for a, b in zip(runs["pull"], runs[other], strict=True):
            assert a.cohort == b.cohort and a.metrics == b.metrics and a.bytes_up == b.bytes_up
            for vector, theirs in zip((a.state.theta, *a.state.server.values()),
                                      (b.state.theta, *b.state.server.values()), strict=True):  # fmt: skip
                assert torch.equal(vector, theirs)


@pytest.mark.parametrize("downlink", [Broadcast(), Overlap()])
@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_a_server_with_hidden_state_is_refused_with_the_reason(name: str, downlink: Downlink) -> None:
    reason = "sends nothing" if name == "local_only" else "they are never sent .*; use pull"
    with pytest.raises(FedadcError, match=reason):
        federation(FAMOUS[name], downlink)


def test_the_reason_names_what_is_hidden() -> None:
    with pytest.raises(FedadcError, match=r"with overlap, clients repeat .* never sent m of SlowMo with CrossEntropy"):
        federation(SlowMo(), Overlap())
    with pytest.raises(FedadcError, match="sent recent of FedAvg with GlobalDistillation"):
        federation(FedAvg(objective=GlobalDistillation(window=3)), Overlap())
    with pytest.raises(FedadcError, match="sent lookahead of FedADC"):
        federation(FedADC(), Overlap(), ensembles=Ensembles(lookahead=Lookahead(reset=True)))


@dataclass(frozen=True, kw_only=True)
class Recording(FedADC):
    """FedADC that records the arguments of the server's update."""

    means: list[Any] = field(default_factory=list, metadata={"config": False}, compare=False)

    def update(self, theta: Any, server: Any, mean: Any, info: RoundInfo) -> Any:
        self.means.append((mean, info))
        return super().update(theta, server, mean, info)


@pytest.mark.parametrize("objective", ["cross_entropy", "ema"])
def test_a_late_client_that_replays_the_means_has_theta_and_m_bit_for_bit(objective: str) -> None:
    """It may start from any round whose theta and m it has, or from round 1 with theta alone."""
    loss = SelfConfidence(teacher="ema") if objective == "ema" else OBJECTIVES[objective]()
    ensembles = Ensembles(ema=EMA(decay=0.5)) if objective == "ema" else Ensembles()
    method = Recording(objective=loss, nesterov=True, beta=0.8, beta_local=0.5, server_lr=0.9)
    chosen = federation(method, ensembles=ensembles)
    states = [chosen.start(), *(r.state for r in chosen.rounds(6))]
    client = Server(FedADC(**{k: getattr(method, k) for k in ("beta", "beta_local", "server_lr")}, objective=loss),
                    ensembles)  # fmt: skip
    for late in range(6):
        theta = states[late].theta
        known = client.start(theta) if late == 0 else {n: states[late].server[n] for n in chosen.coordinator.downlink}
        for mean, info in method.means[late:]:
            theta, known = client.updated(theta, known, mean, info)
        assert torch.equal(theta, states[-1].theta)
        for name in chosen.coordinator.downlink:
            assert torch.equal(known[name], states[-1].server[name])


@dataclass(frozen=True, kw_only=True)
class Impure(FedADC):
    """FedADC whose update does not depend on its arguments alone."""

    calls: list[int] = field(default_factory=list, metadata={"config": False}, compare=False)

    def update(self, theta: Any, server: Any, mean: Any, info: RoundInfo) -> Any:
        self.calls.append(0)
        theta, server = super().update(theta, server, mean, info)
        return theta + 1e-3 * len(self.calls), server


def test_clients_whose_update_differs_are_detected() -> None:
    train(Impure())
    with pytest.raises(FedadcError, match="gave clients another theta than the server"):
        train(Impure(), Overlap())


VECTOR = 4 * sum(p.numel() for p in MLP((5,), 4, [6], projection=3).parameters())  # bytes


def test_the_ledger_of_pull() -> None:
    for result in train(Scaffold()):
        assert result.ledger.down == {"theta": 3 * VECTOR, "c": 3 * VECTOR} and not result.ledger.ahead
        assert result.ledger.up == {"delta": 3 * VECTOR, "c": 3 * VECTOR}
        assert result.bytes_down == 6 * VECTOR and result.bytes_up == 6 * VECTOR
    assert {r.bytes_down + r.bytes_up for r in train(LocalOnly())} == {0}


def test_the_ledger_of_overlap() -> None:
    """The first cohort is sent theta; then each is sent what it does not have ahead, and the mean."""
    rounds = train(FedADC(), Overlap(), many=8)
    chosen = federation(FedADC())
    for result in rounds:
        new = set(chosen.coordinator.select(result.round + 1)) - set(result.cohort)
        each = ("theta",) if result.round == 1 else ("theta", "m")
        assert result.ledger.ahead == {name: len(new) * VECTOR for name in each if new}
        assert result.ledger.down == {"theta" if result.round == 1 else "mean": 3 * VECTOR}
    assert any(set(a.cohort) & set(b.cohort) for a, b in pairwise(rounds))


def test_a_client_that_was_dropped_pulls_again() -> None:
    rounds = train(FedADC(), Overlap(), many=12, faults=Faults(drop=0.4))
    seen = 0
    for before, result in pairwise(rounds):
        lost = len(set(result.cohort) & set(before.dropped))
        counted = len(before.cohort) > len(before.dropped)
        expected = {"mean": (3 - lost) * VECTOR * counted, "theta": lost * VECTOR, "m": lost * VECTOR}
        assert result.ledger.down == {name: size for name, size in expected.items() if size}
        seen += lost
    assert seen


def test_the_ledger_of_broadcast() -> None:
    first, *others = train(FedADC(), Broadcast())
    assert first.ledger.down == {"theta": 8 * VECTOR, "mean": 8 * VECTOR}
    assert all(r.ledger.down == {"mean": 8 * VECTOR} for r in others)
    assert {r.ledger.down["mean"] for r in train(Scaffold(), Broadcast())} == {16 * VECTOR}  # of delta and of c


def test_absent_clients_catch_up_with_the_fewest_bytes() -> None:
    """An independent count, client by client, of what each has and is sent: missed means, or theta and m if less."""
    rounds = train(FedADC(), Broadcast(absent=0.5), many=14)
    has, caught = dict.fromkeys(range(8), 0), 0  # how many means each client has
    for total, result in enumerate(rounds):
        catch_up = sum(min(total - has[k], 2) for k in result.cohort)
        has |= dict.fromkeys(result.cohort, total)
        fresh = 0
        there = generator(0, "absent", result.round).random(8) >= 0.5
        for k in range(8):
            if there[k]:
                missed = total + 1 - has[k]
                fresh, catch_up = (fresh + 1, catch_up) if missed == 1 else (fresh, catch_up + min(missed, 2))
                has[k] = total + 1
        expected = {
            "theta": 8 * VECTOR if result.round == 1 else 0,
            "mean": fresh * VECTOR,
            "catch up": catch_up * VECTOR,
        }
        assert result.ledger.down == {name: size for name, size in expected.items() if size}
        caught += catch_up
    assert caught


def test_means_of_a_compressed_uplink_go_down_whole() -> None:
    chosen = Communication(downlink=Overlap(), uplink=TopK(share=0.1))
    result = list(federation(FedADC(), communication=chosen).rounds(3))[-1]
    assert result.ledger.down == {"mean": 3 * VECTOR} and result.bytes_up < VECTOR


@pytest.mark.parametrize("downlink", [Pull(), Broadcast(absent=0.3), Overlap()])
def test_bytes_and_time_continue_from_a_checkpoint(downlink: Downlink, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"faults": Faults(drop=0.3), "clock": Clock(down=LogNormal(median=1e3, sigma=1.0))}
    whole = train(FedADC(), downlink, many=9, **settings)
    first, second = federation(FedADC(), downlink, **settings), federation(FedADC(), downlink, **settings)
    Checkpoints(tmp_path / "kept", first).write(list(first.rounds(4))[-1].state)
    found = Checkpoints(tmp_path / "kept", second).newest()
    for a, b in zip(whole[4:], second.rounds(9, found), strict=True):
        assert a.ledger == b.ledger and a.virtual_seconds == b.virtual_seconds


def test_a_state_of_another_downlink_is_refused() -> None:
    state = train(FedADC(), Broadcast())[-1].state
    with pytest.raises(FedadcError, match="another model or method"):
        federation(FedADC(), Overlap()).rounds(9, state)


LINK = Clock(step_seconds=Fixed(value=0.5), down=Fixed(value=100.0), up=Fixed(value=50.0), latency=Fixed(value=0.25))


def test_the_time_of_a_round_by_hand() -> None:
    """latency + bytes down / rate, H steps, latency + bytes up / rate; all clients alike, so the slowest is any."""
    work, up = 3 * 0.5, 0.25 + VECTOR / 50
    pull = 0.25 + 2 * VECTOR / 100 + work + up
    assert [r.virtual_seconds for r in train(FedADC(), clock=LINK)] == pytest.approx([pull * t for t in range(1, 7)])
    plain = 0.25 + VECTOR / 100 + work + up
    assert train(FedAvg(), clock=LINK)[-1].virtual_seconds == pytest.approx(6 * plain)
    assert train(FedADC(), Broadcast(), clock=LINK)[-1].virtual_seconds == pytest.approx(6 * plain)
    assert train(LocalOnly(), clock=LINK)[-1].virtual_seconds == pytest.approx(6 * work)  # nothing travels
    assert train(FedADC())[-1].virtual_seconds is None


THETA, M, UP, STEPS = 4000, 4000, 4000, 10  # bytes of theta, m and an upload; H
MEAN = {"delta": torch.zeros(THETA // 4)}  # the mean of the uploads, as many bytes as theta


def durations(downlink: Downlink, devices: Devices, server: int = M, many: int = 60) -> np.ndarray:
    """Seconds of each round, by a Network alone. Two halves of the clients take turns, so all cohorts are new."""
    clients = len(devices.up)
    halves = np.split(np.arange(clients), 2)
    full = {"theta": THETA, "m": server} if server else {"theta": THETA}
    network = Network(downlink, devices, clients, 0, full, slice(None), lambda t: halves[t % 2])
    links, ends = network.start(), [0.0]
    for t in range(1, many + 1):
        cohort = halves[t % 2]
        steps, sent = {int(k): STEPS for k in cohort}, {int(k): {"delta": UP} for k in cohort}
        _, links = network.carry(t, cohort, steps, sent, MEAN, links)
        ends.append(float(links["now"]))
    return np.diff(ends)


def alike(down: float, up: float = 900.0, step: float = 0.1, latency: float = 0.3, clients: int = 4) -> Devices:
    return Devices(*(np.full(clients, value) for value in (step, down, up, latency)))


def threshold(up: float = 900.0, step: float = 0.1, latency: float = 0.3) -> float:
    """docs/communication.md: b* = M / (H s + L + U / u)."""
    return M / (STEPS * step + latency + UP / up)


@pytest.mark.parametrize("link", [{}, {"up": 300.0}, {"latency": 2.0, "step": 0.0}, {"step": 3.0, "latency": 0.0}])
def test_overlap_hides_the_momentum_exactly_above_the_threshold(link: dict[str, float]) -> None:
    """Above b*, rounds take what FedAvg's take, which sends no momentum at all; below it they take longer."""
    for factor in (1.001, 1.5, 10.0, 1000.0):
        device = alike(factor * threshold(**link), **link)
        np.testing.assert_allclose(durations(Overlap(), device), durations(Pull(), device, server=0), rtol=1e-12)
        assert durations(Pull(), device).mean() > durations(Pull(), device, server=0).mean()
    for factor in (0.999, 0.7, 0.3, 0.01):
        device = alike(factor * threshold(**link), **link)
        hidden, pulled, plain = (durations(*args).mean() for args in (
            (Overlap(), device), (Pull(), device), (Pull(), device, 0)))  # fmt: skip
        assert plain < hidden < pulled


@pytest.mark.parametrize("factor", [0.9, 0.5, 0.1])
def test_below_the_threshold_rounds_take_turns_as_derived(factor: float) -> None:
    """After a short round the next one waits for what was sent ahead, after a long one it need not: docs say why."""
    down = factor * threshold()
    plain = 0.3 + THETA / down + STEPS * 0.1 + 0.3 + UP / 900
    ahead = 0.3 + (THETA + M) / down
    rounds = durations(Overlap(), alike(down))[2:]  # the first pulls, and the second has no m to wait for
    np.testing.assert_allclose(rounds[:-1] + rounds[1:], ahead + plain, rtol=1e-12)
    assert rounds.mean() == pytest.approx((ahead + plain) / 2)


def test_a_round_waits_for_the_slowest_that_reports() -> None:
    slow = alike(1e6)
    slow.step_seconds[0] = 7.0
    assert durations(Pull(), slow)[1::2].max() == pytest.approx(7.0 * STEPS, rel=0.1)  # 0 takes part in even rounds
    network = Network(Pull(), slow, 4, 0, {"theta": THETA}, slice(None), lambda t: np.arange(4))
    _, links = network.carry(1, np.arange(4), {1: STEPS, 2: STEPS}, {1: {"delta": UP}}, MEAN, network.start())
    assert float(links["now"]) < 10  # client 0 was dropped


def by_hand(cohorts: list[list[int]], down: list[float]) -> list[float]:
    """The end of each broadcast round: links are queues of theta once and of every mean; nothing else takes time."""
    free, now, ends = [THETA / rate for rate in down], 0.0, []
    for cohort in cohorts:
        now = max([now, *(free[k] for k in cohort)])
        free = [max(f, now) + THETA / rate for f, rate in zip(free, down, strict=True)]
        ends.append(now)
    return ends


@pytest.mark.parametrize("cohorts", [[[0], [3]], [[0], [1], [3], [2, 3], [0]], [[3], [0], [0], [0], [3]]])
def test_broadcasts_to_a_slow_link_queue_up(cohorts: list[list[int]]) -> None:
    """This includes the download of theta by clients that are not in the first cohort."""
    down = [4000.0, 400.0, 4e6, 40.0]
    devices = Devices(np.zeros(4), np.array(down), np.full(4, 1e12), np.zeros(4))
    full = {"theta": THETA, "m": M}
    network = Network(Broadcast(), devices, 4, 0, full, slice(None), lambda t: np.array(cohorts[t - 1]))
    links, ends = network.start(), []
    for t, cohort in enumerate(cohorts, start=1):
        steps = dict.fromkeys(cohort, 0)
        _, links = network.carry(t, np.array(cohort), steps, {}, MEAN, links)
        ends.append(float(links["now"]))
    np.testing.assert_allclose(ends, by_hand(cohorts, down), rtol=1e-12)


@pytest.mark.parametrize(("downlink", "draws"), [(Pull(), 5), (Broadcast(), 5), (Overlap(), 6)])
def test_every_cohort_is_drawn_once(downlink: Downlink, draws: int) -> None:
    """The cohorts of rounds 1 to 5, and with overlap also of round 6."""
    chosen, drawn = federation(FedADC(), downlink), []
    choose = chosen.coordinator.select._choose
    chosen.coordinator.select._choose = lambda rng: drawn.append(0) or choose(rng)  # type: ignore[func-returns-value]
    list(chosen.rounds(5))
    assert len(drawn) == draws


def test_clock_values_must_not_change_during_a_run(tmp_path: Path) -> None:
    trace = tmp_path / "sites.csv"
    line = "{},{},1000,1000,0\n"
    for step in (0.1, 0.2):
        trace.write_text("client,step_seconds,down,up,latency\n" + "".join(line.format(k, step) for k in range(8)))
        chosen = federation(FedADC(), clock=Clock(trace=str(trace)))
        if step == 0.1:
            state = list(chosen.rounds(2))[-1].state
            Checkpoints(tmp_path / "kept", chosen).write(state)
    with pytest.raises(FedadcError, match="clock's figures have changed"):
        Checkpoints(tmp_path / "kept", chosen).newest()
    with pytest.raises(FedadcError, match="another model or method"):
        chosen.rounds(4, state)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"communication": "overlap"}, "communication must be a Communication, not 'overlap'"),
        ({"clock": 5}, "clock must be a Clock, not 5"),
        ({"ensembles": {"swa": {}}}, "ensembles must be an Ensembles"),
        ({"method": LocalOnly(), "communication": Communication(uplink=TopK())}, "sends nothing that"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedadcError, match=sentence):
        federation(**{"method": FedADC(), **settings})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Communication(downlink="overlap"),  # type: ignore[arg-type]
        lambda: Communication(uplink="top_k"),  # type: ignore[arg-type]
        lambda: Clock(down=3.0),  # type: ignore[arg-type]
        lambda: Ensembles(swa=True),  # type: ignore[arg-type]
        lambda: Between(low=-1e308, high=1e308),
        lambda: Fixed(value=float("inf")),
        lambda: LogNormal(median=0),
        lambda: Between(low=3, high=2),
        lambda: Clock(down=Fixed(value=1e-320)).devices([""] * 3, np.random.default_rng(0)),
        lambda: Clock(up=LogNormal(median=1e11, sigma=20)).devices([""] * 100, np.random.default_rng(0)),
        lambda: Broadcast(absent=1.5),
    ],
)
def test_bad_settings_are_refused(make: Any) -> None:
    with pytest.raises(FedadcError):
        make()


def test_links_of_another_federation_are_refused() -> None:
    small = federation(FedADC(), Broadcast(), data=small_federation(clients=4))
    state = list(small.rounds(1))[-1].state
    with pytest.raises(FedadcError, match="another model or method"):
        federation(FedADC(), Broadcast()).rounds(2, state)


def test_clock_values_are_drawn_once_and_from_the_seed_alone() -> None:
    clock = Clock(down=LogNormal(median=1e4, sigma=0.7), step_seconds=LogNormal(median=0.1, sigma=0.3))
    a, b = (federation(FedADC(), clock=clock, seed=seed).coordinator.network.devices for seed in (0, 0))
    other = federation(FedAvg(), clock=clock, seed=1).coordinator.network.devices
    assert a is not None and b is not None and other is not None
    assert np.array_equal(a.down, b.down) and not np.array_equal(a.down, other.down)
    assert np.array_equal(a.down, federation(SlowMo(), clock=clock).coordinator.network.devices.down)  # type: ignore[union-attr]
    many = clock.devices([""] * 100_000, np.random.default_rng(0))
    assert np.median(many.down) == pytest.approx(1e4, rel=0.02)
    assert np.log(many.down).std() == pytest.approx(0.7, rel=0.02)


TRACE = "client,step_seconds,down,up,latency\n1,0.2,20,30,0.1\n0,0.1,10,40,0.0\n"


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sites.csv"
    file.write_text(TRACE)
    devices = read_trace(file, ("0", "1"))
    assert devices.down.tolist() == [10, 20] and devices.latency.tolist() == [0.0, 0.1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TRACE.replace("latency", "delay"), "has no column latency"),
        (TRACE.replace("1,0.2", "2,0.2"), "line 2: there is no client 2"),
        (TRACE.replace("1,0.2", "0,0.2"), "line 3: client 0 is listed twice"),
        (TRACE.replace("1,0.2", "-1,0.2"), "there is no client -1"),
        (TRACE.replace("0.2", "quick"), "line 2 must contain a client and four numbers"),
        (TRACE.replace("0.2", "nan"), "line 2: a number is missing"),
        (TRACE.replace("30", "0"), r"clock\.up must be between 0\.001 and 1e\+12, but client 1 has 0"),
        (
            TRACE.replace("0.1\n", "inf\n"),
            r"clock\.latency must be between 0 and 1e\+12, but client",
        ),
        (TRACE.split("\n0,")[0], "has no line for client 0"),
        ("", "has no column client"),
        ("client,step_seconds,down,up,latency\n", "has no line for client 0"),
        ('client,"', "cannot be read"),
    ],
)
def test_an_invalid_trace_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "sites.csv").write_text(text)
    with pytest.raises(FedadcError, match=sentence):
        read_trace(tmp_path / "sites.csv", ("0", "1"))


def test_a_trace_names_clients_as_the_data_does(tmp_path: Path) -> None:
    file = tmp_path / "sites.csv"
    file.write_text(TRACE.replace("\n1,", "\nsouth,").replace("\n0,", "\nnorth,"))
    assert read_trace(file, ("north", "south")).down.tolist() == [10, 20]
    with pytest.raises(FedadcError, match="there is no client south; the clients are east, north"):
        read_trace(file, ("east", "north"))
    with pytest.raises(FedadcError, match=r"^trace already gives the values of all clients; leave out up"):
        Clock(trace=str(file), up=Fixed(value=5))


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match="there is no file"):
        federation(FedAvg(), clock=Clock(trace=str(tmp_path / "none.csv")))


def test_samples_are_those_of_the_batches() -> None:
    """By epochs the last batch may be smaller, and a slow client stops early: counted batch by batch."""
    for work in (LocalWork(epochs=2, batch_size=4, lr=0.1), LocalWork(steps=5, batch_size=10, lr=0.1)):
        chosen = federation(FedAvg(), local=work, faults=Faults(slow=0.5))
        for result in chosen.rounds(5):
            used = 0
            for client in result.cohort:
                size = len(chosen.clients[client])
                cohort = np.array([client])
                steps = steps_of(chosen, cohort)
                if client in result.slow:
                    steps = [generator(0, "slow", result.round, client).integers(1, steps[0])]
                batches = shuffled(size, work.batch_size, work.steps, work.epochs, generator(0, "any order"))
                used += sum(len(b) for b in islice(batches, int(steps[0])))
            assert result.samples == used


@pytest.mark.parametrize(
    ("base", "word", "given"),
    [
        (Downlink, "deliver", lambda kind: {"communication": Communication(downlink=kind())}),
        (Uplink, "encode", lambda kind: {"communication": Communication(uplink=kind())}),
        (Selection, "chooser", lambda kind: {"selection": kind()}),
        (Distribution, "draw", lambda kind: {"clock": Clock(up=kind())}),
        (Partition, "owners", lambda kind: {"partition": kind(), "clients": 4}),
    ],
)
def test_a_subclass_without_a_required_method_is_refused_with_its_name(base: type, word: str, given: Any) -> None:
    mine = type("Mine", (base,), {})
    with pytest.raises(FedadcError, match=f"Mine must define {word}"):
        train(FedADC(), **given(mine))
