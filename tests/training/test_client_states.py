"""Client states between rounds: the same bits wherever they lie, files that come and go, one sentence on failure."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from commands import FILES as RUN_FILES
from commands import SMALL, Call, contents, fine, refused
from fedadc.data import Dataset, from_arrays
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import FedAvg, FedDyn, LocalOnly, Method, Scaffold
from fedadc.models import MLP
from fedadc.models.vectors import State
from fedadc.objectives import ModelContrast
from fedadc.runs.runner import run
from fedadc.training.client_states import BUCKET, ClientStates, StateHandle, Storage, Store
from fedadc.training.state import RunState
from fedadc.training.state_files import FOLDER_PREFIX
from fedadc.views.local_work import LocalWork

CLIENTS, COHORT, ROUNDS = 1000, 50, 4
METHODS: dict[str, Method] = {
    "feddyn": FedDyn(),
    "scaffold": Scaffold(),
    "moon": FedAvg(objective=ModelContrast()),
    "local_only": LocalOnly(),
}


@cache
def thousand_clients() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3000, 5)).astype(np.float32), rng.integers(4, size=3000)
    return from_arrays(x, y, test=(rng.normal(size=(40, 5)).astype(np.float32), np.arange(40) % 4))


def federation(method: Method, storage: Storage, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"clients": CLIENTS, "cohort": COHORT, "local": LocalWork(epochs=1, batch_size=2)}
    model, data = MLP((5,), 4, [4], projection=3), thousand_clients()
    return Federation(
        model=model, data=data, method=method, storage=storage, evaluate=Evaluation(every=2), **settings | kw
    )


def states_of(*values: float) -> list[State]:
    return [{"v": torch.tensor([value, 0.5])} for value in values]


def files(folder: Path) -> list[Path]:
    return list(folder.glob(f"{FOLDER_PREFIX}*/*.safetensors"))


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def assert_same_run(one: RunState, other: RunState) -> None:
    assert torch.equal(one.theta, other.theta) and same(one.server, other.server)
    assert list(one.clients) == list(other.clients)
    for client in one.clients:
        assert same(one.clients[client], other.clients[client]), client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "states"
    place.mkdir()
    return place


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 7])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_gives_the_same_bits_wherever_its_states_lie(name: str, held: int, folder: Path) -> None:
    """1,000 clients, of whose states only so many fit in memory, beside the same run with all of them there."""
    size = federation(METHODS[name], Storage()).start().theta.numel() * 4  # every method here keeps one vector
    storage = Storage(memory_gb=(held + 0.5) * size / 1e9, folder=str(folder))
    first = 0
    runs = [federation(METHODS[name], s).rounds(ROUNDS) for s in (storage, Storage())]
    for small, large in zip(*runs, strict=True):
        assert small.cohort == large.cohort and small.train_loss == large.train_loss and small.metrics == large.metrics
        assert_same_run(small.state, large.state)
        clients = small.state.clients
        assert clients.store.used == held * size <= storage.memory_gb * 1e9
        assert len(files(folder)) == len(clients) - held  # nobody holds those of the round before
        assert large.state.clients.store.used == len(clients) * size
        first = first or len(clients)
    assert first == COHORT < len(clients) < ROUNDS * COHORT, "some clients came back and found their state"
    assert large.metrics


def test_a_file_holds_the_state_itself(folder: Path) -> None:
    store = Store(Storage(memory_gb=0, folder=str(folder)))
    state = {"wide": torch.arange(6.0).view(2, 3).t(), "one": torch.tensor(7), "half": torch.ones(3)[:1].double()}
    entry = store.keep(state)
    (file,) = files(folder)
    assert same(load_file(file), state) and same(store.read(entry), state)
    assert {k: v.dtype for k, v in store.read(entry).items()} == {k: v.dtype for k, v in state.items()}


def test_the_oldest_states_go_to_files_and_the_newest_stay(folder: Path) -> None:
    store = Store(Storage(memory_gb=17e-9, folder=str(folder)))  # two of 8 bytes
    states = states_of(1, 2, 3, 4, 5)
    entries = [store.keep(state) for state in states]
    here = [store.read(e)["v"] is s["v"] for e, s in zip(entries, states, strict=True)]
    assert here == [False, False, False, True, True]
    assert all(same(store.read(e), s) for e, s in zip(entries, states, strict=True))
    del entries[3:], states[3:]
    gc.collect()
    assert store.used == 0 and len(files(folder)) == 3


def test_a_state_larger_than_the_memory_goes_to_its_file_at_once(folder: Path) -> None:
    store = Store(Storage(memory_gb=10e-9, folder=str(folder)))
    entry = store.keep({"v": torch.arange(100.0)})
    assert store.used == 0 and len(files(folder)) == 1 and torch.equal(store.read(entry)["v"], torch.arange(100.0))


def test_a_file_follows_neither_the_tensors_written_nor_those_read(folder: Path) -> None:
    store, state = Store(Storage(memory_gb=0, folder=str(folder))), states_of(1)[0]
    entry = store.keep(state)
    state["v"].fill_(9)
    store.read(entry)["v"].fill_(9)
    assert same(store.read(entry), states_of(1)[0])


def test_states_of_earlier_rounds_live_as_long_as_somebody_holds_them(folder: Path) -> None:
    trained = federation(FedDyn(), Storage(memory_gb=0, folder=str(folder)))
    rounds, read = [], []
    for result in trained.rounds(ROUNDS):
        rounds.append(result)
        read.append({k: {n: v.clone() for n, v in s.items()} for k, s in result.state.clients.items()})
    assert len(files(folder)) == ROUNDS * COHORT
    for result, then in zip(rounds, read, strict=True):
        now = result.state.clients
        assert list(now) == sorted(then) and all(same(now[k], then[k]) for k in now)

    clients = rounds[-1].state.clients
    del result, now, rounds[:-1]
    gc.collect()
    assert len(files(folder)) == len(clients) == len(read[-1])
    assert all(same(clients[k], read[-1][k]) for k in clients)
    del clients, rounds[:]
    gc.collect()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("through", [lambda s: s, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_run_goes_on_from_any_state_and_from_its_copy(through: Callable[[RunState], RunState], folder: Path) -> None:
    storage = Storage(memory_gb=0, folder=str(folder))
    whole = list(federation(Scaffold(), storage).rounds(ROUNDS))
    begun = through(whole[1].state)
    again = list(federation(Scaffold(), storage).rounds(ROUNDS, start=begun))
    assert [r.round for r in again] == [3, 4]
    for one, other in zip(again, whole[2:], strict=True):
        assert_same_run(one.state, other.state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_has_files_of_its_own(copied: Callable[[RunState], RunState], folder: Path) -> None:
    states = ClientStates(store := Store(Storage(memory_gb=0, folder=str(folder))))
    states = states.updated({k: store.keep(s) for k, s in zip((3, 5000), states_of(1, 2), strict=True)})
    original = RunState(4, torch.ones(2), {"h": torch.zeros(2)}, states, horizon=9)
    twin = copied(original)
    assert_same_run(twin, original)
    assert (twin.round, twin.horizon) == (4, 9) and twin.clients.store.storage == store.storage
    assert len(files(folder)) == 4 and twin.theta.data_ptr() != original.theta.data_ptr()
    del store, states, original
    gc.collect()
    assert len(files(folder)) == 2 and same(twin.clients[5000], states_of(2)[0])


def test_a_rounds_cost_does_not_grow_with_the_clients() -> None:
    """What it reads and keeps is its cohort's, and only the buckets of its cohort are copied."""

    class Counting(Store):
        reads = keeps = 0

        def read(self, entry: StateHandle) -> State:
            self.reads += 1
            return super().read(entry)

        def keep(self, state: State, round: int = 0) -> StateHandle:
            self.keeps += 1
            return super().keep(state, round)

    trained = federation(FedDyn(), Storage(), clients=3000, cohort=2)  # one sample each, three buckets
    start, store = trained.start(), Counting(Storage())
    everybody = {k: store.keep(trained.method.client_state(start.theta)) for k in range(3000)}
    before = ClientStates(store).updated(everybody)
    store.keeps = 0
    result = next(trained.rounds(1, start=replace(start, clients=before)))
    after, touched = result.state.clients, {k // BUCKET for k in result.cohort}
    assert (store.reads, store.keeps) == (1 + 2, 2) and len(after) == 3000  # one to see that the start fits
    assert {b for b in range(3) if after._buckets[b] is not before._buckets[b]} == touched != {0, 1, 2}


# --- what is left behind ---------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path

import fedadc

folder = Path(sys.argv[1])


def watch(record):
    print(len(list(folder.glob("*/*.safetensors"))), flush=True)
    if record["round"] == 2:
        {end}


result = fedadc.run({config!r}, watch=watch)
"""


@pytest.mark.parametrize(("end", "code", "counts"), [("pass", 0, 3), ("1 / 0", 1, 2)])
def test_a_process_leaves_no_file_however_it_ends(end: str, code: int, counts: int, folder: Path) -> None:
    config = {**SMALL, "method": "feddyn", "storage": {"memory_gb": 0, "folder": str(folder)}}
    script = SCRIPT.format(config=config, end=end)
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and ("ZeroDivisionError" in done.stderr) == bool(code)
    seen = [int(n) for n in done.stdout.split()]
    assert len(seen) == counts and seen[0] == 4 and seen == sorted(seen)
    assert list(folder.iterdir()) == []


def test_a_run_directory_holds_states_no_longer_than_its_result(tmp_path: Path) -> None:
    config = {**SMALL, "method": "scaffold", "storage": {"memory_gb": 0}}
    result = run(config, out=tmp_path / "a")
    states = {f"{k}-{result.state.clients.handle(k).round}.safetensors" for k in result.state.clients}
    assert {p.name for p in (tmp_path / "a/checkpoints/clients").iterdir()} >= states and len(states) > 4
    assert len(list((tmp_path / "a").glob("fedadc-states-*/*"))) == 0
    del result
    gc.collect()
    assert {p.name for p in (tmp_path / "a").iterdir()} == RUN_FILES


def test_a_command_leaves_no_states(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "method=local_only", "storage.memory_gb=0", "--out", "a"))
    gc.collect()
    assert {p.name for p in (tmp_path / "a").iterdir()} == RUN_FILES - {"model.safetensors"}


# --- folders that fail -----------------------------------------------------------------------------------------------


def unwritable(tmp_path: Path) -> Path:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if not os.access(locked, os.W_OK):
        return locked
    if not Path("/proc").is_dir():
        pytest.skip("this user may write everywhere")
    return Path("/proc")  # where not even root makes a folder


def test_a_folder_that_is_missing_is_named_before_anything_is_trained(call: Call, tmp_path: Path) -> None:
    for place in (tmp_path / "absent", tmp_path / "small.yaml"):
        with pytest.raises(FedadcError, match=rf"storage\.folder: there is no folder {place}"):
            federation(FedDyn(), Storage(folder=str(place))).rounds(3)
    refused(
        call("run", "small.yaml", "storage.folder=absent", "--out", "a"),
        f"storage.folder: there is no folder {tmp_path / 'absent'}",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["small.yaml"]


def test_a_folder_that_cannot_be_written_is_one_sentence(call: Call, tmp_path: Path) -> None:
    place = unwritable(tmp_path)
    with pytest.raises(FedadcError, match=rf"cannot be written to {place} \(storage\.folder\)") as caught:
        next(federation(FedDyn(), Storage(memory_gb=0, folder=str(place))).rounds(3))
    assert "\n" not in str(caught.value)
    words = ("run", "small.yaml", "method=feddyn", f"storage.folder={place}", "storage.memory_gb=0", "--out", "a")
    refused(call(*words), f"storage.folder: {place} is not writable", code=4)
    assert not (tmp_path / "a").exists()


VANDAL = """
import shutil
from pathlib import Path
from fedadc.methods import FedDyn

class Vandal(FedDyn):
    def update(self, theta, server, mean, info):
        if info.round == 2:
            {act}
        return super().update(theta, server, mean, info)
"""


@pytest.mark.parametrize(
    ("act", "sentence", "left", "code"),
    [
        ("[f.unlink() for f in Path('a').glob('*/*.safetensors')]", "cannot be read back", True, 5),
        ("[f.write_bytes(b'') for f in Path('a').glob('*/*.safetensors')]", "cannot be read back", True, 5),
        ("[shutil.rmtree(f) for f in Path('a').glob('fedadc-states-*')]", "cannot be written", True, 4),
        ("shutil.rmtree('a')", "cannot be read back", False, 5),
    ],
    ids=["file gone", "file empty", "states gone", "all gone"],
)
def test_what_vanishes_during_a_run_ends_it_with_one_sentence(
    call: Call, tmp_path: Path, act: str, sentence: str, left: bool, code: int
) -> None:
    (tmp_path / "own.py").write_text(VANDAL.format(act=act))
    answer = call("run", "small.yaml", "rounds=9", "method=own:Vandal", "storage.memory_gb=0", "--out", "a")
    last = answer.err.splitlines()[-1]
    assert answer.code == code and answer.out == "" and "Traceback" not in answer.err
    assert last.startswith("error: ") and "client state" in last and sentence in last
    assert (tmp_path / "a").exists() == left
    if left:
        assert len((tmp_path / "a/metrics.jsonl").read_text().splitlines()) >= 2  # what was finished is kept
        assert {p.name for p in (tmp_path / "a").iterdir()} >= RUN_FILES


@pytest.mark.parametrize("memory", [-1.0, float("nan")])
def test_impossible_budgets_are_refused(memory: float) -> None:
    with pytest.raises(FedadcError, match=r"^memory_gb must be at least 0"):
        Storage(memory_gb=memory)


# --- a mapping -------------------------------------------------------------------------------------------------------


def some_states(*clients: int) -> ClientStates:
    store = Store(Storage())
    return ClientStates(store).updated({k: store.keep(states_of(k)[0]) for k in clients})


def test_states_are_a_mapping_in_the_order_of_clients() -> None:
    states = some_states(5000, 3, BUCKET, BUCKET - 1)
    known = [3, BUCKET - 1, BUCKET, 5000]
    assert isinstance(states, Mapping) and len(states) == 4 and list(states) == list(states.keys()) == known
    assert [int(s["v"][0]) for s in states.values()] == known and [k for k, _ in states.items()] == known
    assert all(k in states for k in known) and same(states[5000], states_of(5000)[0])
    for absent in (4, 2 * BUCKET, -1):  # of a bucket that there is, and of none
        assert absent not in states and states.get(absent) is None
        with pytest.raises(KeyError):
            states[absent]
    assert "3" not in states  # type: ignore[comparison-overlap]
    assert len(some_states()) == 0 and not some_states() and list(some_states()) == []


def test_an_update_leaves_the_old_states_alone_and_copies_only_what_it_touches() -> None:
    old = some_states(0, BUCKET, 2 * BUCKET)
    before = dict(old._buckets)
    new = old.updated({BUCKET: old.store.keep(states_of(-1)[0]), BUCKET + 1: old.store.keep(states_of(-2)[0])})
    assert list(old) == [0, BUCKET, 2 * BUCKET] and same(old[BUCKET], states_of(BUCKET)[0])
    assert list(new) == [0, BUCKET, BUCKET + 1, 2 * BUCKET] and same(new[BUCKET], states_of(-1)[0])
    assert all(old._buckets[b] is before[b] for b in before)
    assert [new._buckets[b] is before[b] for b in before] == [True, False, True]


STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),  # which of the states that are held
        st.none() | st.dictionaries(st.sampled_from([0, 1, BUCKET - 1, BUCKET, 5000]), st.integers(), max_size=4),
    ),
    max_size=14,
)


@given(STEPS, st.integers(0, 50))
def test_any_history_reads_like_plain_dicts(steps: list[tuple[int, dict[int, int] | None]], memory: int) -> None:
    """Go on from any states that are held with some changes, or drop them (None), in any order."""

    def states(value: int) -> State:
        return {"v": torch.tensor(value % 2**62)}  # 8 bytes

    with tempfile.TemporaryDirectory() as place:
        store = Store(Storage(memory_gb=memory * 1e-9, folder=place))
        held = [ClientStates(store)]
        plain: list[dict[int, tuple[int, int]]] = [{}]  # client -> the step that made its state, and its value
        for number, (which, changes) in enumerate(steps):
            at = which % len(held)
            if changes is not None:
                held.append(held[at].updated({k: store.keep(states(v)) for k, v in changes.items()}))
                plain.append({**plain[at], **{k: (number, v) for k, v in changes.items()}})
            elif len(held) > 1:
                del held[at], plain[at]
            for found, model in zip(held, plain, strict=True):
                assert list(found) == sorted(model) and len(found) == len(model)
                assert all(same(found[k], states(v)) for k, (_, v) in model.items())
            alive = {(k, made) for model in plain for k, (made, _) in model.items()}
            assert store.used <= memory and store.used // 8 + len(files(Path(place))) == len(alive)


# --- what went wrong once ---------------------------------------------------------------------------------------------


class Collecting(dict[str, torch.Tensor]):
    """A state during whose reading Python collects cycles, as it may at any time."""

    def items(self) -> Any:
        gc.collect()
        return super().items()

    def values(self) -> Any:
        gc.collect()
        return super().values()


@pytest.fixture
def collected_on_demand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def keep_in_a_circle(store: Store, state: State) -> None:
    circle: list[Any] = [store.keep(state)]
    circle.append(circle)


@pytest.mark.usefixtures("collected_on_demand")
def test_a_state_may_die_while_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **kw: (make(**kw), gc.collect())[0])  # the first of the writing
    store = Store(Storage(memory_gb=10e-9, folder=str(folder)))
    keep_in_a_circle(store, states_of(1)[0])
    entry = store.keep(states_of(1)[0])
    assert store.used == 8 and files(folder) == [] and same(store.read(entry), states_of(1)[0])


@pytest.mark.usefixtures("collected_on_demand")
def test_states_that_die_while_bytes_are_counted_are_not_counted() -> None:
    store = Store(Storage())
    keep_in_a_circle(store, states_of(1)[0])
    entry = store.keep(Collecting(v=torch.zeros(2)))  # here the circle goes
    assert store.used == 8
    keep_in_a_circle(store, states_of(1)[0])
    del entry
    gc.collect()
    assert store.used == 0


def test_a_run_goes_on_in_its_own_storage(folder: Path) -> None:
    begun = next(federation(FedDyn(), Storage()).rounds(1))
    result = next(federation(FedDyn(), Storage(memory_gb=0, folder=str(folder))).rounds(2, start=begun.state))
    assert len(files(folder)) == len(result.cohort)  # the new ones; the others stay where they are


def test_states_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run({**SMALL, "method": "feddyn", "storage": {"memory_gb": 0}}, out="a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(dict(result.state.clients)) == len(result.state.clients)
    del result
    gc.collect()
    assert {p.name for p in (tmp_path / "a").iterdir()} == RUN_FILES | {"model-server.safetensors"}


def test_a_numpy_integer_is_a_client_too() -> None:
    states = some_states(3)
    assert same(states[np.int64(3)], states[3])  # type: ignore[index]
    assert np.int64(3) in states


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs /proc of Linux")
def test_a_state_that_was_read_needs_its_file_no_more(folder: Path) -> None:
    store = Store(Storage(memory_gb=0, folder=str(folder)))
    state = store.read(store.keep(states_of(1)[0]))
    assert same(state, states_of(1)[0]) and str(folder) not in Path("/proc/self/maps").read_text()


def test_the_end_of_a_store_is_no_warning(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(Storage(memory_gb=0, folder=str(folder)))
        store.keep(states_of(1)[0])
        del store
        gc.collect()
    assert list(folder.iterdir()) == [] and caught == []


def test_a_missing_folder_is_found_before_an_old_run_is_replaced(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    before = contents(tmp_path / "a")
    refused(call("run", "small.yaml", "storage.folder=absent", "--out", "a", "--overwrite"), "absent")
    assert (tmp_path / "a").is_dir() and contents(tmp_path / "a") == before


def test_a_folder_beside_the_config_is_found(call: Call, tmp_path: Path) -> None:
    (tmp_path / "there/states").mkdir(parents=True)
    (tmp_path / "small.yaml").rename(tmp_path / "there/small.yaml")
    fine(call("run", "there/small.yaml", "storage.folder=states", "--out", "a"))


def test_a_folder_that_takes_no_files_is_found_before_an_old_run_is_replaced(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    before = contents(tmp_path / "a")
    place = f"storage.folder={unwritable(tmp_path)}"
    words = ("run", "small.yaml", "method=feddyn", place, "storage.memory_gb=0", "--out", "a", "--overwrite")
    refused(call(*words), "is not writable", code=4)
    assert (tmp_path / "a").is_dir() and contents(tmp_path / "a") == before
