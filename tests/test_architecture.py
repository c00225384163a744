"""Imports point one way: which folder may import which, read from the source.

Every import counts: at the top of a file, inside a function, for type checkers only, and modules named in strings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedadc

ROOT = Path(fedadc.__file__).parent
LONGEST_FUNCTION = 50  # lines


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
FACADE = "fedadc"  # the package's own __init__, which loads public names from everywhere; nothing may import it


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Everything that runs when a module is imported: no function bodies, nothing for type checkers only."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, part, []))
        for block in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements(block.body)


@cache
def imports(module: str, at_import_only: bool = False) -> frozenset[str]:
    """Modules that a module imports; `from package import module` counts as that module."""
    found: set[str] = set()
    for node in statements(tree(module).body) if at_import_only else ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else node.module for name in names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= named_in(node.value)
    return frozenset(found)


def named_in(text: str) -> set[str]:
    """The module that a string begins with: "fedadc.rng", "fedadc.rng:generator", "fedadc.rng.generator"."""
    match = re.match(r"fedadc(\.\w+)+", text)
    parts = match[0].split(".") if match else []
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 1, -1)]
    return set(next(([name] for name in prefixes if name in FILES), []))


def ours(module: str) -> frozenset[str]:
    return frozenset(name for name in imports(module) if name in FILES and name != module)


def folder(module: str) -> str:
    """`fedadc.data.loaders.csv` is in `data`; `fedadc.errors` is one of its own."""
    return module.split(".")[1]


MODULES = [module for module in FILES if module != FACADE]
BASICS = {"errors", "rng", "fields", "system", "tasks"}
NUMBERS = BASICS | {"data", "models", "schedules", "optimizers"}
CLIENTS = NUMBERS | {"views", "objectives", "methods"}
LOOPS = CLIENTS | {"communication", "training", "evaluation"}
FEDERATION = LOOPS | {"engines", "cluster", "partitions", "selections", "server_half"}
ALLOWED = {  # folder -> the folders it may import, beside itself
    "errors": set(),
    "rng": set(),
    "fields": {"errors"},
    "system": {"errors"},
    "models": {"errors", "rng", "tasks"},
    "tasks": {"errors"},
    "data": {"errors", "rng", "fields", "system", "tasks"},
    "schedules": {"errors", "fields"},
    "optimizers": {"errors", "fields"},
    "partitions": {"errors", "rng", "fields", "data"},
    "selections": {"errors", "rng", "fields", "data"},
    "views": {"errors", "fields", "data", "models", "schedules", "optimizers"},
    "objectives": {"errors", "fields", "data", "models", "views"},
    "methods": {"errors", "fields", "models", "objectives", "views"},
    "communication": {"errors", "rng", "fields", "data", "models"},
    "training": CLIENTS | {"communication", "selections"},
    "evaluation": CLIENTS | {"training"},
    "engines": LOOPS,
    "cluster": LOOPS | {"engines"},
    "server_half": LOOPS | {"engines"},
    "federation": FEDERATION,
    "config": FEDERATION | {"federation"},
    "runs": FEDERATION | {"federation", "config"},
    "analysis": FEDERATION | {"federation", "config", "runs"},
    "personal": FEDERATION | {"federation", "config", "runs", "analysis"},
    "studies": FEDERATION | {"federation", "config", "runs", "analysis", "personal"},
    "sites": FEDERATION | {"federation", "config", "runs", "analysis", "personal"},
    "trained": FEDERATION | {"federation", "config", "runs", "analysis", "personal"},
    "cli": FEDERATION | {"federation", "config", "runs", "analysis", "personal", "studies", "sites", "trained"},
    "__main__": {"cli"},
}


def test_every_folder_is_in_the_table_and_the_table_in_the_tree() -> None:
    assert {folder(module) for module in MODULES} == ALLOWED.keys()


@pytest.mark.parametrize("name", ALLOWED)
def test_a_folder_imports_only_what_it_may(name: str) -> None:
    for module in MODULES:
        if folder(module) == name:
            forbidden = {m for m in ours(module) if m == FACADE or folder(m) not in ALLOWED[name] | {name}}
            assert not forbidden, f"{module} imports {sorted(forbidden)}"


def test_the_table_has_no_cycle() -> None:
    order = list(TopologicalSorter(ALLOWED).static_order())  # raises a CycleError
    assert order.index("errors") < order.index("training") < order.index("cli")


def test_no_module_imports_itself_through_others() -> None:
    """Type-checking and function-level imports included: the largest strongly connected component is one module."""
    list(TopologicalSorter({module: ours(module) - {FACADE} for module in MODULES}).static_order())


def test_modules_are_imported_by_constant_names() -> None:
    """A name that is put together at run time would escape this test."""
    calls = [
        (module, ast.unparse(node.func), node)
        for module in FILES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call)
    ]
    dynamic = {
        module
        for module, function, node in calls
        if function.endswith(("import_module", "__import__")) and not isinstance(node.args[0], ast.Constant)
    }
    assert dynamic == {FACADE}
    assert {module for module, function, _ in calls if function in ("exec", "eval")} == {"fedadc.system.user_code"}


def test_the_reader_of_imports_sees_every_kind() -> None:
    assert "fedadc.training.server" in ours("fedadc.federation")  # at the top
    assert "fedadc.engines.workers" in ours("fedadc.federation")  # inside a function
    assert "fedadc.engines.workers" not in imports("fedadc.federation", at_import_only=True)
    assert "PIL.Image" in imports("fedadc.data.loaders.images")  # for type checkers
    assert "fedadc.engines.worker" in ours("fedadc.cli.training")  # in a string
    for text in ("fedadc.training.rounds", "fedadc.training.rounds:train", "fedadc.training.rounds.Training"):
        assert named_in(text) == {"fedadc.training.rounds"}
    source = "try:\n    import yaml\nexcept ImportError:\n    import torch\n"
    assert len([node for node in statements(ast.parse(source).body) if isinstance(node, ast.Import)]) == 2


def test_no_class_name_stands_for_two_classes() -> None:
    homes: dict[str, list[str]] = {}
    for module in FILES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_no_constant_name_stands_for_two_constants() -> None:
    homes: dict[str, set[str]] = {}
    for module in FILES:
        for node in tree(module).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)]
            for name in filter(str.isupper, names):
                homes.setdefault(name, set()).add(module)
    assert "BLOCK_LENGTH" in homes and not {name: found for name, found in homes.items() if len(found) > 1}


def test_no_function_is_long() -> None:
    for module in FILES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= LONGEST_FUNCTION, f"{module}.{node.name} has {lines} lines"


def test_few_modules_lie_loose() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == {
        "__init__", "__main__", "errors", "rng", "federation", "server_half",
    }  # fmt: skip


def test_tests_mirror_the_tree() -> None:
    """A folder of tests is a folder of the package, and every folder has tests."""
    tests = Path(__file__).parent
    tested = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    assert tested == folders


def test_engines_know_the_clients_half_of_a_round_and_how_to_add() -> None:
    for module in MODULES:
        if folder(module) in ("engines", "cluster"):
            known = {m for m in ours(module) if folder(m) == "training"}
            assert known <= {f"fedadc.training.{n}" for n in ("local", "aggregate", "agreement", "messages", "wire")}, (
                module
            )


def test_files_are_deleted_in_few_places() -> None:
    """A client's state file by `StateFolder` alone; the others delete their own kinds of files."""
    deletes = {"unlink", "rmtree", "rmdir"}
    found = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in deletes
    }
    assert found == {
        "fedadc.cluster.reaper",  # the folder of a local cluster
        "fedadc.data.loaders.download",  # half a download
        "fedadc.personal.folder",  # results that are replaced
        "fedadc.runs.checkpoint",  # old checkpoints
        "fedadc.runs.directory",  # a run that never finished a round
        "fedadc.sites.checked_files",  # what a site has replaced
        "fedadc.sites.resident",  # its socket
        "fedadc.sites.site_states",  # old states of a client at its site
        "fedadc.sites.trial",  # data that was dealt for a trial that did not begin
        "fedadc.system.files",  # unfinished files, locks
        "fedadc.trained.export",  # an export that is replaced
        "fedadc.training.state_files",  # client states
    }


def test_the_outer_loop_sees_no_sample_and_no_model() -> None:
    known = ours("fedadc.training.rounds")
    assert not known & {"fedadc.federation", "fedadc.models.flat", "fedadc.data.batches", "fedadc.training.local"}
    assert {m for m in known if folder(m) == "data"} == {"fedadc.data.dataset"}  # the type of an array


def test_selection_sees_labels_and_no_training() -> None:
    for module in MODULES:
        if folder(module) == "selections":
            assert "torch" not in imports(module), module
            assert not {m for m in ours(module) if folder(m) == "data"} - {
                "fedadc.data.dataset",
                "fedadc.data.roster",
            }, module


def test_calibration_knows_the_inner_loop_and_nothing_of_runs_and_files() -> None:
    known = {folder(m) for m in ours("fedadc.personal.calibrate")}
    assert not known & {"runs", "config", "analysis", "system"} and "training" in known


def test_the_lower_folders_use_torch_numpy_and_the_standard_library_only() -> None:
    for module in MODULES:
        if folder(module) in {*CLIENTS, "partitions", "selections", "communication"}:
            later = (
                {"pydantic"} if folder(module) == "fields" else {"PIL", "pyarrow", "safetensors"}
            )  # inside functions
            for at_import_only, more in ((True, set()), (False, later)):
                foreign = {m.split(".")[0] for m in imports(module, at_import_only)} - set(sys.stdlib_module_names)
                assert foreign <= {"torch", "numpy", "fedadc"} | more, f"{module} imports {sorted(foreign)}"


def test_only_the_command_line_prints_and_knows_its_libraries() -> None:
    for module in MODULES:
        if folder(module) == "cli":
            continue
        calls = [n for n in ast.walk(tree(module)) if isinstance(n, ast.Call)]
        assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"], module
        assert not {m.split(".")[0] for m in imports(module)} & {"rich", "typer", "click"}, module


def test_the_command_line_loads_nothing_heavy_before_a_command_runs() -> None:
    names = (
        "app",
        "configs",
        "data",
        "doctor",
        "federation",
        "models",
        "options",
        "reproduction",
        "results",
        "studies",
        "supervision",
        "training",
    )
    commands = {f"fedadc.cli.{name}" for name in names}
    light = {"fedadc", "fedadc.cli", "fedadc.errors", "fedadc.system", "fedadc.system.version"} | commands
    for module in light:
        found = imports(module, at_import_only=True)
        assert not {m.split(".")[0] for m in found} & {"torch", "numpy", "pydantic", "yaml", "matplotlib", "rich"}
        assert {m for m in found if m.startswith("fedadc.")} <= light, module
