"""Load user-defined classes and functions, named in a config as `module:Name`."""

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
    """Load `module:Name`; the module is searched in `folder` first. `where` is the config key, for error messages."""
    module_name, _, attribute = name.partition(":")
    try:
        module = _load_module(module_name, folder)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing == module_name:
            problem = f"there is no {module_name}.py in {folder}, and no installed module has that name"
        else:
            problem = f"{module_name} needs the module {missing}, which was not found"
        raise FedadcError(f"{where}: {problem}.") from error
    except Exception as error:
        raise FedadcError(
            f"{where}: importing {module_name} failed ({type(error).__name__}: {one_line(error)})."
        ) from error
    if not hasattr(module, attribute):
        raise unknown(f"{where}: in {module_name} the name", attribute, [n for n in vars(module) if n[:1] != "_"])
    return getattr(module, attribute)


def _load_module(name: str, folder: Path) -> types.ModuleType:
    file = (folder / f"{name.replace('.', '/')}.py").resolve()
    loaded = sys.modules.get(name)
    if not file.is_file():
        return importlib.import_module(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    _unload_modules_of_other_folders(folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name=name)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # so that the module can import other modules in its folder
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        sys.path.remove(str(folder))
    return module


def _unload_modules_of_other_folders(folder: Path) -> None:
    """Unload user modules of other folders: two configs may each have a different `helper.py`."""
    _USER_FOLDERS.add(folder.resolve())
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent in _USER_FOLDERS - {folder.resolve()}:
            del sys.modules[name]


def user_folders() -> list[str]:
    """The folders from which user-defined classes were loaded; worker processes need them for their own imports."""
    return [str(folder) for folder in _USER_FOLDERS]
