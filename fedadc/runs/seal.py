"""The seal of a run: which user code it has loaded, from which folder and with which checksums.

A run directory may come from anybody, and so may what it says of its user code. The seal is an HMAC with a key that
only the user has; code that a run directory names is loaded if the user's own run has sealed it, or with --trust.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config
from fedadc.config.yaml import parse_yaml
from fedadc.errors import CannotResume, FedadcError, require
from fedadc.runs.environment import read_facts
from fedadc.runs.fingerprint import tree_fingerprint
from fedadc.runs.layout import CONFIG, METRICS, SEAL
from fedadc.system.files import read_regular, write_new_file, write_text
from fedadc.system.user_code import Notes, Permit, Untrusted, UserCode

KEY, KEY_BYTES = "key", 32
PURPOSE = b"fedadc seal 1\n"


@dataclass(frozen=True)
class Seal:
    """What is sealed."""

    folder: str  # of the user code
    settings: str  # checksum of the settings in config.yaml that determine the result
    names: dict[str, str]  # config key -> module:Name
    files: dict[str, str]  # file name -> checksum

    def code(self, key: bytes) -> str:
        content = json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()
        return hmac.digest(key, PURPOSE + content, "sha256").hex()


def is_run(folder: Path) -> bool:
    """True if a folder has files of a run, so that what it says of user code needs a seal."""
    return "config_folder" in read_facts(folder) or any(os.path.lexists(folder / name) for name in (METRICS, SEAL))


def original_folder(run: Path) -> Path:
    """The folder of the config from which the run was started, as the run says; the run itself if it does not say."""
    original = read_facts(run).get("config_folder")
    try:
        return Path(original).resolve() if isinstance(original, str) else run
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, characters that no file name has
        return run


def code_of_run(
    run: Path, tree: Mapping[str, Any], notes: Notes, trust: bool = False, given: Mapping[str, Any] | None = None
) -> UserCode:
    """The user code that the config in a run directory may load: what its seal allows, or all with `trust`."""
    folder = original_folder(run)

    @cache
    def permit() -> Permit:
        seal = _valid_seal(run)
        if seal.folder != str(folder.resolve()):
            raise Untrusted(f"the seal of {run} is for the folder {seal.folder}")
        try:
            same = seal.settings == tree_fingerprint(tree)
        except (TypeError, ValueError, RecursionError):  # nothing that we have written
            same = False
        if not same:
            raise Untrusted(f"the settings in {run / CONFIG} have changed since it was sealed")
        return Permit(str(run), seal.names, seal.files)

    return UserCode(folder, notes, None if trust else permit, given or {})


def seal_run(run: Path, config: Config, warn: Callable[[str], None]) -> None:
    """Seal the user code that a run has loaded, if it has loaded any. A run without a seal is not refused."""
    code = config.code
    if code is None or not code.used:
        return
    try:
        key = _own_key()
    except (FedadcError, OSError) as error:
        warn(f"{run} is not sealed, so that resuming it will need `trust` ({str(error).rstrip('.')})")
        return
    tree = parse_yaml(config.yaml(), CONFIG)
    names = {where: name for where in code.used if (name := _written_name(tree, where))}
    seal = Seal(str(code.folder.resolve()), tree_fingerprint(tree), names, dict(code.files))
    write_text(run / SEAL, json.dumps({**asdict(seal), "hmac": seal.code(key)}, indent=2) + "\n")


def _written_name(tree: Any, where: str) -> str:
    """The name at a key of a config as it is written: a class may be defined beside the file that was named."""
    for key in (*where.split("."), "name"):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return str(tree or "")


def require_unchanged_code(run: Path, config: Config) -> None:
    """Refuse to resume a run with other user code than it was sealed with."""
    if config.code is None or not config.code.used:
        return
    try:
        sealed, now = _valid_seal(run).files, config.code.files
    except Untrusted:
        return  # the config is the user's own, and so is its code: there is nothing to compare it with
    changed = sorted(name for name in sealed.keys() & now.keys() if sealed[name] != now[name])
    if changed:
        raise CannotResume(
            f"{', '.join(changed)} in {config.code.folder} {'has' if len(changed) == 1 else 'have'} changed since "
            f"{run} was sealed; resume it with the new code with `trust`, or start another run."
        )


def _valid_seal(run: Path) -> Seal:
    """The seal of a run, if it was made with the user's own key."""
    if not os.path.lexists(run / SEAL):
        raise Untrusted(f"{run} has no seal: another program wrote it, or a version before 0.3.0, or it had no key")
    try:
        seal, code = _read_seal(run / SEAL)
    except (FedadcError, ValueError, RecursionError):
        raise Untrusted(f"{run / SEAL} is no seal") from None
    try:
        key = _read_key(_key_file())
    except FileNotFoundError:
        raise Untrusted(f"the seal of {run} was not made with your key; you have none yet") from None
    except FedadcError as error:
        raise Untrusted(str(error).rstrip(".")) from None
    if not hmac.compare_digest(seal.code(key).encode(), code.encode(errors="replace")):
        raise Untrusted(f"the seal of {run} was not made with your key")
    return seal


def _read_seal(file: Path) -> tuple[Seal, str]:
    tree = json.loads(read_regular(file, SEAL))
    texts, maps = ("folder", "settings", "hmac"), ("names", "files")
    valid = isinstance(tree, dict) and tree.keys() == {*texts, *maps}
    valid = valid and all(isinstance(tree[name], str) for name in texts)
    valid = valid and all(isinstance(tree[name], dict) for name in maps)
    valid = valid and all(isinstance(value, str) for name in maps for value in tree[name].values())
    require(valid, f"{file} is no seal.")
    return Seal(tree["folder"], tree["settings"], tree["names"], tree["files"]), tree["hmac"]


def _key_file() -> Path:
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (configured if configured.is_absolute() else Path.home() / ".config") / "fedadc" / KEY
    except RuntimeError as error:  # there is no home
        raise FedadcError(f"there is no folder for the key of your runs ({error}).") from error


def _own_key() -> bytes:
    """The user's key, made on first use."""
    file = _key_file()
    if not os.path.lexists(file):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process was faster
            write_new_file(file, secrets.token_bytes(KEY_BYTES))
    return _read_key(file)


def _read_key(file: Path) -> bytes:
    facts = file.lstat()
    if hasattr(os, "getuid"):
        require(facts.st_uid == os.getuid(), f"the key {file} belongs to another user; move it away.")
        require(
            not facts.st_mode & 0o077,
            f"the key {file} can be read by others; delete it, or make it private with `chmod 600 {file}`.",
        )
    key = read_regular(file, "the key of your runs")
    require(len(key) == KEY_BYTES, f"the key {file} is damaged; delete it, and the next run makes a new one.")
    return key
