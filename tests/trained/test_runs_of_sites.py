"""A federation of real sites saves what its sites have agreed on, and its model predicts as that of the simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedadc
from direct_sites import CLIENTS, Direct, config_of, sites_of
from fedadc.config.settings import FederationConfig
from fedadc.errors import FedadcError
from fedadc.runs.preprocessing import read_preprocessing
from fedadc.sites.serving import serve


def test_a_federation_of_sites_predicts(site_arrays: Path) -> None:
    config = config_of(site_arrays)
    federated = replace(config, federation=FederationConfig(sites=tuple(CLIENTS)))
    serve(federated, Direct(sites_of(site_arrays, config)), site_arrays / "run")
    fedadc.run(config, out=site_arrays / "simulated")
    here, there = (read_preprocessing(site_arrays / name) for name in ("simulated", "run"))
    assert here is not None and there is not None
    assert there.schema == here.schema and there.clients == here.clients == tuple(CLIENTS)
    assert there.samples == here.samples
    x = np.random.default_rng(0).normal(size=(9, 6))
    one, other = (fedadc.predict(site_arrays / name, x) for name in ("simulated", "run"))
    assert (one.outputs == other.outputs).all()


def test_models_of_sites_stay_with_them(site_arrays: Path) -> None:
    config = replace(config_of(site_arrays, method="fedper"), federation=FederationConfig(sites=tuple(CLIENTS)))
    serve(config, Direct(sites_of(site_arrays, config)), site_arrays / "run")
    with pytest.raises(FedadcError, match="is a federation of real sites, whose own models stay with them"):
        fedadc.load(site_arrays / "run", client=CLIENTS[0])
