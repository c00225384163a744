"""Classes and functions of the user's own, named in a config as `module:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from fedadc.errors import FedadcError, one_line, unknown

_USER_FOLDERS: set[Path] = set()


def load_object(name: str, folder: Path, where: str) -> Any:
    """`module:Name`, the module being looked up in `folder` first."""
    module_name, _, attribute = name.partition(":")
    try:
        module = _load_module(module_name, folder)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        where_to = f"there is no {module_name}.py in {folder} and no such module is installed"
        raise FedadcError(
            f"{where}: {where_to}." if missing == module_name else f"{where}: {module_name} needs the module {missing}."
        ) from error
    except Exception as error:
        raise FedadcError(
            f"{where}: importing {module_name} failed ({type(error).__name__}: {one_line(error)})."
        ) from error
    if not hasattr(module, attribute):
        raise unknown(f"{where}: in {module_name} the name", attribute, [n for n in vars(module) if n[:1] != "_"])
    return getattr(module, attribute)


def _load_module(name: str, folder: Path) -> types.ModuleType:
    file = (folder / f"{name.replace('.', '/')}.py").resolve()
    known = sys.modules.get(name)
    if not file.is_file():
        return importlib.import_module(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    _forget_modules_of_other_folders(folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name=name)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # for modules of the user's that it imports
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        sys.path.remove(str(folder))
    return module


def _forget_modules_of_other_folders(folder: Path) -> None:
    """Two configs may each have a `helper.py`: what one folder's modules imported is not for another's."""
    _USER_FOLDERS.add(folder.resolve())
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent in _USER_FOLDERS - {folder.resolve()}:
            del sys.modules[name]


def user_folders() -> list[str]:
    """Folders from which a user's own classes were loaded: another process needs them to know these."""
    return [str(folder) for folder in _USER_FOLDERS]
