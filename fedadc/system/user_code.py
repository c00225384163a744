"""Load a user's own classes and functions, named in a config as `module:Name`: MODULE.py in the config's own folder.

A config may come from anybody, so a name leads nowhere else: not to the standard library, not to an installed package,
not out of the folder. Everything is checked before anything is imported, and the bytes that were checked are the bytes
that are executed. What an installed package offers is a plugin (`fedadc.system.plugins`).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from fedadc.errors import FedadcError, one_line, require, unknown
from fedadc.system.files import checksum, read_regular

log = logging.getLogger("fedadc")
Notes = Callable[[str], None]
NOT_PLAIN = "module:Name needs two plain names, those of a file module.py in {folder} and of a class or function in it"


@dataclass(frozen=True)
class UserModule:
    """The source of a user's module, as it was read and executed."""

    file: Path
    content: bytes

    @property
    def sha256(self) -> str:
        return checksum(self.content)


@dataclass(frozen=True)
class Permit:
    """The user code that the seal of a run allows."""

    run: str
    names: Mapping[str, str]  # config key -> module:Name
    files: Mapping[str, str]  # file name -> checksum

    def require_name(self, where: str, name: str, folder: Path) -> None:
        if self.names.get(where) != name:
            raise not_trusted(where, name, folder, f"the seal of {self.run} does not name it")

    def require_file(self, where: str, module: UserModule) -> None:
        """Refuse a file that has changed, and name the others that have."""
        name, folder = module.file.name, module.file.parent
        if name not in self.files:
            raise not_trusted(where, name, folder, f"{self.run} had not loaded it when it was sealed")
        if self.files[name] != module.sha256:
            changed = [other for other in sorted(self.files) if _checksum_of(folder / other) != self.files[other]]
            has = "has" if len(changed) == 1 else "have"
            raise not_trusted(where, name, folder, f"{', '.join(changed)} {has} changed since {self.run} was sealed")


class Untrusted(Exception):
    """Why a run's user code is not loaded, as a part of a sentence."""


def not_trusted(where: str, name: str, folder: Path, reason: str) -> FedadcError:
    """The error for user code that a run directory names and that nobody has vouched for."""
    return FedadcError(
        f"{where}: the user code {name} in {folder} is not loaded, because {reason}; read it first, then load it with "
        "`trust`."
    )


@dataclass
class UserCode:
    """The user's modules in the folder of a config: what may be loaded from it, and what was loaded."""

    folder: Path
    notes: Notes = log.info
    permit: Callable[[], Permit] | None = None  # or raises `Untrusted`; None: all files of the folder may be loaded
    given: Mapping[str, Any] = field(default_factory=dict)  # classes that came as Python objects, by their module:Name
    used: dict[str, str] = field(default_factory=dict)  # config key -> module:Name
    files: dict[str, str] = field(default_factory=dict)  # file name -> checksum of what was executed

    def load(self, name: str, where: str) -> Any:
        """Load `module:Name`; `where` is the config key."""
        if name in self.given:
            return self.given[name]
        module_name, attribute = self._split(name, where)
        permit = self._permit(where, name)
        module = self._module(module_name, where, permit)
        if self.used.get(where) != name:
            self.notes(f"{where}: loading {name} from {module.file}")
        try:
            imported = _imported(module_name, module, _Helpers(self, where, permit))
        except FedadcError:
            raise
        except ModuleNotFoundError as error:
            raise FedadcError(
                f"{where}: {module_name} needs the module {error.name or one_line(error)}, which was not found."
            ) from error
        except Exception as error:
            raise FedadcError(
                f"{where}: importing {module_name} failed ({type(error).__name__}: {one_line(error)})."
            ) from error
        self.used[where] = name
        self.files |= {loaded.file.name: loaded.sha256 for loaded in _FINDER.modules.values()}
        if not hasattr(imported, attribute):
            raise unknown(f"{where}: in {module_name} the name", attribute, _defined_in(imported))
        found = getattr(imported, attribute)
        home = getattr(found, "__module__", None) if isinstance(found, type | types.FunctionType) else None
        require(  # else a file with `from subprocess import run` would offer `run` to every config
            home in _FINDER.modules or home == module_name,
            f"{where}: {name} is not a class or function that {module.file.name} defines; define one there.",
        )
        return found

    def _permit(self, where: str, name: str) -> Permit | None:
        """What the seal of the run allows, if there has to be one."""
        if self.permit is None:
            return None
        try:
            permit = self.permit()
        except Untrusted as reason:
            raise not_trusted(where, name, self.folder, str(reason)) from None
        permit.require_name(where, name, self.folder)
        return permit

    def _split(self, name: str, where: str) -> tuple[str, str]:
        """The module and the name in it, if both are plain names and the module is none of Python's own."""
        module, _, attribute = name.partition(":")
        require(
            module != "__main__",
            f"{where}: {name} was defined in a script, not in a file beside a config; resume its run in that script "
            "with fedadc.run(config, out=..., resume=True).",
        )
        plain = module.isidentifier() and attribute.isidentifier()
        require(plain, f"{where}: {name!r:.80} cannot be loaded; {NOT_PLAIN.format(folder=self.folder)}.")
        require(
            module not in sys.stdlib_module_names,
            f"{where}: {name} cannot be loaded, because {module} is a module of Python; name a file of your own.",
        )
        return module, attribute

    def _module(self, name: str, where: str, permit: Permit | None) -> UserModule:
        """The source of a module: what this config has executed already, or the file as it is now."""
        file = self.folder.resolve() / f"{name}.py"
        loaded = _FINDER.modules.get(name)
        if loaded is not None and loaded.file == file and self.files.get(file.name) == loaded.sha256:
            return loaded
        require(
            os.path.lexists(file),
            f"{where}: there is no {name}.py in {self.folder}; the code of a config is in its own folder, or a plugin "
            "of an installed package.",
        )
        other = _other_module(name, file)
        require(other is None, f"{where}: {file.name} in {self.folder} has the name of {other}; rename it.")
        module = UserModule(file, read_regular(file, where))
        if permit is not None:
            permit.require_file(where, module)
        return module


@dataclass(frozen=True)
class _Helpers:
    """The modules beside a user's module, which it may import while it is loaded."""

    code: UserCode
    where: str
    permit: Permit | None

    def find(self, name: str) -> UserModule | None:
        """A module of the folder; None if there is none, or if Python or an installed package has that name."""
        file = self.code.folder.resolve() / f"{name}.py"
        if not name.isidentifier() or name in sys.stdlib_module_names or not os.path.lexists(file):
            return None
        if _other_module(name, file) is not None:
            return None
        module = UserModule(file, read_regular(file, self.where))
        if self.permit is not None:
            self.permit.require_file(self.where, module)
        self.code.notes(f"{self.where}: loading {file}, which is imported there")
        return module


class _BytesLoader(importlib.abc.Loader):
    """Executes the bytes that were read, never a file that may have changed since or a cached translation of it."""

    def __init__(self, module: UserModule) -> None:
        self.module = module

    def exec_module(self, module: types.ModuleType) -> None:
        _FINDER.modules[module.__name__] = self.module
        exec(compile(self.module.content, str(self.module.file), "exec", dont_inherit=True), vars(module))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the user's modules: those that a worker's parent has loaded, or those beside the one being loaded."""

    def __init__(self) -> None:
        self.modules: dict[str, UserModule] = {}  # loaded, all of one folder
        self.sent: dict[str, UserModule] = {}  # by the parent of a worker
        self.helpers: _Helpers | None = None  # of the module that is being loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self.sent.get(name)
        if module is None and self.helpers is not None:
            module = self.helpers.find(name)
        return None if module is None else _spec(name, module)

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def unload(self) -> None:
        """Forget all modules: two folders may each have a `helper.py`, and files change."""
        for name in self.modules.keys() & sys.modules.keys():
            if _is_ours(sys.modules[name]):
                del sys.modules[name]
        self.modules.clear()


_FINDER = _Finder()


def loaded_modules() -> dict[str, UserModule]:
    """The user's modules that are loaded now; worker processes need them."""
    return dict(_FINDER.modules)


def provide_modules(modules: Mapping[str, UserModule]) -> None:
    """In a worker process: import these modules as the parent process has read them."""
    _FINDER.sent.update(modules)
    _FINDER.install()


def _defined_in(module: types.ModuleType) -> list[str]:
    """The names of the classes and functions that a module defines itself."""
    own = (n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")]


def _has_changed(known: types.ModuleType, file: Path) -> bool:
    """True if a file is known to differ from what Python itself has imported, by the header of Python's cached code."""
    try:
        header = Path(known.__cached__ or "").read_bytes()[:16]
        status = file.stat()
    except (OSError, AttributeError, ValueError):
        return False  # there is no cached code
    by_time, cached = header[4:8] == bytes(4), (header[8:12], header[12:16])
    now = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return by_time and cached != tuple(n.to_bytes(4, "little") for n in now)


def _imported(name: str, module: UserModule, helpers: _Helpers) -> types.ModuleType:
    """The module, imported if it is not yet, or if a file of its folder has changed."""
    known = sys.modules.get(name)
    if known is not None and not _is_ours(known):  # the user's script has imported it
        require(
            not _has_changed(known, module.file),
            f"{module.file} has changed since this program imported it; start the program again.",
        )
        _FINDER.modules |= {**_imported_from(module.file.parent), name: module}
        return known
    if not _may_stay(helpers):
        _FINDER.unload()
        _FINDER.modules |= _imported_from(module.file.parent)
    if _FINDER.modules.get(name) == module and name in sys.modules:
        return sys.modules[name]
    _FINDER.install()
    imported = importlib.util.module_from_spec(_spec(name, module))
    sys.modules[name] = imported
    _FINDER.helpers, before = helpers, _FINDER.helpers
    try:
        _BytesLoader(module).exec_module(imported)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        _FINDER.helpers = before
    return imported


def _may_stay(helpers: _Helpers) -> bool:
    """True if the loaded modules are those of this folder, as its files are now or as this config has loaded them."""
    loaded = list(_FINDER.modules.values())
    if any(module.file.parent != helpers.code.folder.resolve() for module in loaded):
        return False
    if helpers.code.files:
        return all(helpers.code.files.get(module.file.name) == module.sha256 for module in loaded)
    return helpers.permit is None and all(_checksum_of(module.file) == module.sha256 for module in loaded)


def _is_ours(module: types.ModuleType) -> bool:
    return isinstance(getattr(module, "__loader__", None), _BytesLoader)


def _spec(name: str, module: UserModule) -> ModuleSpec:
    spec = ModuleSpec(name, _BytesLoader(module), origin=str(module.file))
    spec.has_location = True
    return spec


def _imported_from(folder: Path) -> dict[str, UserModule]:
    """The modules of a folder that the user's script has imported itself."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if name != "__main__" and isinstance(file, str) and file == str(folder / f"{name}.py") and Path(file).is_file():
            found[name] = UserModule(Path(file), read_regular(Path(file), name))
    return found


def _checksum_of(file: Path) -> str | None:
    try:
        return checksum(read_regular(file, file.name))
    except FedadcError:
        return None


def _other_module(name: str, file: Path) -> str | None:
    """What Python would import under this name if it is not this file; nothing is imported to find out."""
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_ours(loaded):
        origin = getattr(loaded, "__file__", None)
        return None if _is_same(origin, file) else f"the loaded module {origin or name}"
    elsewhere = [entry for entry in sys.path if not _is_same(entry or os.curdir, file.parent)]  # a script has its own
    for finder in sys.meta_path:
        if finder is _FINDER:
            continue
        spec = finder.find_spec(name, elsewhere if finder is PathFinder else None)
        if spec is not None and not (spec.loader is None and spec.origin is None):  # None: a folder, no package
            return None if _is_same(spec.origin, file) else f"the module {spec.origin or name}"
    return None


def _is_same(origin: str | None, file: Path) -> bool:
    try:
        return origin is not None and file.samefile(origin)
    except OSError:
        return False
