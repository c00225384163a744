"""The settings that determine the result of a run, which must not change when the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fedadc.config.settings import Config
from fedadc.errors import CannotResume
from fedadc.system.files import checksum

# keys that may change: none affects what is trained in a round (the length of a schedule is local.schedule.horizon)
CHANGEABLE = (
    "rounds",
    "label",
    "evaluate",
    "stop",
    "storage",
    "checkpoint",
    "faults.bad_update",
    "federation.at_once",
    "federation.patience",
    "federation.personalize",
)
MAX_SHOWN = 5  # keys in an error message


def result_settings(config: Config) -> dict[str, Any]:
    """The settings that determine the result, by their full keys."""
    return _fixed(config.tree())


def _fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    leaves = dict(_leaves(tree))
    return {key: v for key, v in leaves.items() if not any(f"{key}.".startswith(f"{name}.") for name in CHANGEABLE)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def config_fingerprint(config: Config) -> str:
    """A checksum of the settings that determine the result."""
    return tree_fingerprint(config.tree())


def tree_fingerprint(tree: Mapping[str, Any]) -> str:
    """The same of a config as plain values, with the defaults that it has and without those of this version."""
    return checksum(json.dumps(_fixed(tree), sort_keys=True, default=str).encode())


def with_original_horizon(config: Config, original: Config) -> Config:
    """The config of a resumed run; a schedule without a horizon gets the one of the original config."""
    schedule = config.local.schedule
    if schedule.horizon is not None or type(schedule) is not type(original.local.schedule):
        return config
    horizon = original.local.schedule.horizon
    return replace(config, local=replace(config.local, schedule=replace(schedule, horizon=horizon)))


def require_same_settings(original: Config, config: Config, where: str, complete: bool = True) -> None:
    """Reject a config that would have given a result different from the original config's.

    If it is not `complete`, settings that it leaves open are not compared: a run chooses them by its data.
    """
    before, now = result_settings(original), result_settings(config)
    if not complete:
        now = {key: value for key, value in now.items() if value is not None}
        before = {key: value for key, value in before.items() if key in now}
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    shown = ", ".join(f"{key} {_shown(before.get(key))} (now {_shown(now.get(key))})" for key in keys[:MAX_SHOWN])
    more = f" and {len(keys) - MAX_SHOWN} more" if len(keys) > MAX_SHOWN else ""
    if keys:
        raise CannotResume(
            f"the run in {where} was started with other settings: {shown}{more}; keep them, or start another run."
        )


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value!s:.40}"
