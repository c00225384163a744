"""What decides a run's result, and so may not change when it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fedadc.config.settings import Config
from fedadc.errors import CannotResume
from fedadc.system.files import checksum

# None of these touches what is trained in a round. How long a schedule is, is its own horizon.
FREE = ("rounds", "label", "evaluate", "stop", "storage", "checkpoint", "faults.bad_update")
SHOWN = 5  # differing keys


def decisive(config: Config) -> dict[str, Any]:
    """The settings that decide the result, by their full names."""
    return {key: v for key, v in _leaves(config.tree()) if not any(f"{key}.".startswith(f"{free}.") for free in FREE)}


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def config_fingerprint(config: Config) -> str:
    """The same for the same settings, whatever else differs."""
    return checksum(json.dumps(decisive(config), sort_keys=True, default=str).encode())


def with_horizon_of(first: Config, config: Config) -> Config:
    """A schedule whose horizon is not given has the one with which the run first started."""
    schedule = config.local.schedule
    if schedule.horizon is not None or type(schedule) is not type(first.local.schedule):
        return config
    horizon = first.local.schedule.horizon
    return replace(config, local=replace(config.local, schedule=replace(schedule, horizon=horizon)))


def require_same(first: Config, config: Config, where: str) -> None:
    """Refuse a config that would have given another result."""
    before, now = decisive(first), decisive(config)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    shown = ", ".join(f"{key} {_shown(before.get(key))} (now {_shown(now.get(key))})" for key in keys[:SHOWN])
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    if keys:
        raise CannotResume(
            f"the run in {where} was begun with other settings: {shown}{more}; keep these, or begin another run."
        )


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value!s:.40}"
