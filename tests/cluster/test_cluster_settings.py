"""Settings of a cluster, the form in which tensors travel, and errors that need no cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import Call, refused
from conftest import small_federation
from fedadc.cluster.arrays import bytes_of, to_arrays, to_tensors
from fedadc.cluster.connection import Node
from fedadc.cluster.node_data import NodeData, checksum_of, read_on_node, sample_arrays
from fedadc.cluster.settings import RayCluster, cluster_of
from fedadc.config.build import DataOnDisk
from fedadc.data.dataset import Dataset
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.models import MLP


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers must be auto or a number from 1 to 512"),
        ({"workers": "many"}, "workers must be auto or a number from 1 to 512"),
        ({"cpus_per_worker": 0.0}, "cpus_per_worker must be above 0"),
        ({"gpus_per_worker": -0.5}, "gpus_per_worker must be at least 0"),
        ({"patience": 0.0}, "patience must be above 0"),
        ({"other_nodes": "ignore"}, "other_nodes must be 'refuse', 'leave out' or 'use'"),
        ({"address": 6379}, "address must be"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FedadcError, match=message):
        RayCluster(**settings)


def test_the_engine_is_named_or_an_object() -> None:
    assert cluster_of(None) is None and cluster_of("local") is None
    assert cluster_of("ray") == RayCluster() and cluster_of("ray", 3) == RayCluster(workers=3)
    assert cluster_of(RayCluster(workers=2)) == RayCluster(workers=2)
    for engine, workers, message in [
        ("flower", 0, "engine must be local, ray or a RayCluster"),
        (RayCluster(), 2, "give RayCluster"),
    ]:
        with pytest.raises(FedadcError, match=message):
            Federation(model=MLP((5,), 4, [6]), data=small_federation(), engine=engine, workers=workers)


@pytest.mark.parametrize(
    ("cpus", "gpus", "settings", "room"),
    [
        (4, 0, {}, 4),
        (4, 0, {"cpus_per_worker": 1.5}, 2),
        (8, 2, {"gpus_per_worker": 0.25}, 8),
        (3, 2, {"gpus_per_worker": 0.25}, 3),  # CPUs are short
        (8, 1, {"gpus_per_worker": 0.5, "cpus_per_worker": 0.5}, 2),
        (8, 0, {"gpus_per_worker": 0.5}, 0),
    ],
)
def test_so_many_workers_fit_on_a_node(cpus: float, gpus: float, settings: dict[str, Any], room: int) -> None:
    assert Node("id", "host", cpus, gpus, 0).room(RayCluster(**settings)) == room


@given(
    st.lists(st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "bool"]), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_tensors_travel_without_a_change(dtypes: list[str], shape: list[int]) -> None:
    state = {dtype: torch.randn(shape).to(getattr(torch, dtype)) for dtype in dtypes}
    arrays = to_arrays(state)
    assert bytes_of(arrays) == sum(t.numel() * t.element_size() for t in state.values())
    back = to_tensors(arrays)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
        assert tensor.numel() == 0 or back[name].data_ptr() != tensor.data_ptr()


def test_samples_on_a_node_are_those_here_and_share_memory() -> None:
    data = small_federation()
    arrays = sample_arrays(data)
    for array in arrays.values():
        assert isinstance(array, np.ndarray)
        array.flags.writeable = False  # as in the object store
    node = NodeData(arrays, (np.arange(3), np.array([0, 2, 3])))
    samples = node.samples("train")
    assert torch.equal(samples.x, data.train.x) and samples.x.data_ptr() == data.train.x.data_ptr()
    assert [list(node.clients[k]) for k in range(2)] == [[0, 1], [2]]


def test_a_node_uses_its_own_data_only_if_it_is_the_same(tmp_path: Path) -> None:
    data = small_federation()
    expected = checksum_of(sample_arrays(data))
    assert read_on_node(lambda: data, expected)[0] == ""
    assert read_on_node(lambda: small_federation(seed=1), expected) == ("its data has another checksum", {})
    data.train.x[0, 0] += 1e-12
    assert read_on_node(lambda: data, expected)[0] == "its data has another checksum"

    def broken() -> Dataset:
        raise OSError("no such file")

    assert read_on_node(broken, expected) == ("no such file", {})
    absent = DataOnDisk(config=None, folder=tmp_path / "absent")  # type: ignore[arg-type]
    assert f"it has no folder {tmp_path / 'absent'}" in read_on_node(absent, expected)[0]


BAD_OPTIONS = [
    (["--engine", "rai"], 2, "--engine must be local or ray, not 'rai'."),
    (["--ray-address", "auto"], 2, "--ray-address and --ray need --engine ray."),
    (["--engine", "ray", "--ray", "gpus=1"], 2, "--ray: setting 'gpus' is unknown"),
    (["--engine", "ray", "--ray", "patience=soon"], 2, "--ray: patience must be a number, not 'soon'."),
    (["--engine", "ray", "--ray", "patience"], 2, "--ray must be KEY=VALUE, such as gpus_per_worker=0.5"),
    (["--engine", "ray", "--workers", "0.5"], 2, "--workers must be auto or a number from 1 to 512 on a cluster"),
    (["--engine", "ray", "--workers", "0"], 2, "--workers must be auto or a number from 1 to 512 on a cluster"),
    (["--engine", "ray", "--ray-address", "nonsense"], 2, "--ray-address must be auto or HOST:PORT of the head"),
    (
        ["--engine", "ray", "--ray-address", "ray://10.0.0.1:10001"],
        2,
        "--ray-address is ray://...: addresses of Ray Client",
    ),
    (["--engine", "ray", "--workers-per-gpu", "2"], 2, "--workers-per-gpu is for --engine local; use e.g. --ray"),
    (["--engine", "ray", "--ray-address", "[::1]:1"], 6, "no Ray cluster answers at the address [::1]:1."),
    (["--engine", "ray", "--ray-address", "127.0.0.1:1"], 6, "no Ray cluster answers at the address 127.0.0.1:1."),
]


@pytest.mark.parametrize(("options", "code", "sentence"), BAD_OPTIONS)
def test_a_mistake_is_one_sentence(options: list[str], code: int, sentence: str, call: Call) -> None:
    refused(call("run", "small.yaml", "--out", "run", *options), sentence, code)
    assert not Path("run").exists()


def test_without_ray_the_extra_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(call("run", "small.yaml", "--out", "run", "--engine", "ray"), "pip install 'fedadc[ray]'")
    assert not Path("run").exists()
