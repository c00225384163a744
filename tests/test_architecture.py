"""Imports point one way: the rooms of the house, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedadc

ROOT = Path(fedadc.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def for_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(body: list[ast.stmt], inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import that runs, and whether it stands inside a function."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, inside
        elif not for_type_checking(node):
            function = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for part in ("body", "orelse", "finalbody"):
                yield from walk(getattr(node, part, []), function)
            for handler in getattr(node, "handlers", []):
                yield from walk(handler.body, function)


@cache
def imports(module: str, at_the_top_only: bool = False) -> frozenset[str]:
    """Modules that a module imports when it runs; `from package import module` counts as that module."""
    found = set()
    for node, inside in walk(ast.parse(FILES[module].read_text(encoding="utf-8")).body):
        if inside and at_the_top_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        assert node.level == 0 and node.module, f"{module}: imports are written in full"
        found |= {f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in FILES else node.module for a in node.names}
    return frozenset(found)


def ours(module: str) -> frozenset[str]:
    return frozenset(name for name in imports(module) if name.split(".")[0] == "fedadc")


def room(module: str) -> str:
    """`fedadc.data.loaders.arrays` is in the room `data`; `fedadc.errors` is one of its own."""
    return [*module.split("."), ""][1]


def members(name: str) -> list[str]:
    found = [module for module in FILES if room(module) == name]
    assert found, f"there is no room {name}"
    return found


ALLOWED = {  # room -> the rooms it may import, beside itself
    "errors": set(),
    "rng": set(),
    "durable": {"errors"},
    "interrupts": set(),
    "processes": {"interrupts"},
    "exact": {"errors", "processes"},
    "schema": {"errors"},
    "objectives": {"errors", "rng"},
    "models": {"errors", "rng"},
    "data": {"errors", "rng"},
    "methods": {"errors", "rng", "objectives"},
    "engines": {"errors", "exact", "processes", "schema", "data", "methods", "evaluate", "federation"},
    "evaluate": {"errors", "exact", "rng", "data", "models", "methods", "federation"},
    "federation": {
        "errors",
        "rng",
        "exact",
        "durable",
        "data",
        "models",
        "methods",
        "objectives",
        "engines",
        "evaluate",
    },
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_room_imports_only_what_it_may(name: str) -> None:
    for module in members(name):
        strange = {m for m in ours(module) if room(m) not in ALLOWED[name] | {name}}
        assert not strange, f"{module} imports {sorted(strange)}"


def test_the_rules_would_notice() -> None:
    """The reader of imports sees what is known to be there, and not what only type checkers see."""
    assert "fedadc.objectives" in ours("fedadc.methods.base") and "fedadc.config.settings" in ours(
        "fedadc.analysis.demo"
    )
    assert "fedadc.training.local" not in ours("fedadc.methods.base")
    assert "fedadc.runs.directory" in ours("fedadc.analysis.demo") and "PIL" in imports("fedadc.data.loaders.images")


def test_engines_know_the_inner_loop_and_how_to_add_and_nothing_else_of_the_federation() -> None:
    for module in members("engines"):
        known = {m for m in ours(module) if room(m) == "federation"}
        assert known <= {"fedadc.training.local", "fedadc.training.aggregate"}, f"{module} imports {sorted(known)}"


def test_selection_sees_labels_and_no_training_and_only_the_outer_loop_sees_selection() -> None:
    selection = "fedadc.selections"
    inside = {module for module in FILES if module.startswith(selection)}
    for module in inside:
        assert ours(module) <= inside | {"fedadc.data.dataset", "fedadc.errors"}, module
        assert "torch" not in imports(module), module
    outside = {module for module in FILES if module not in inside and ours(module) & inside}
    loop = {"fedadc.training.rounds", "fedadc.federation"}
    assert outside == loop | {"fedadc.config.settings", "fedadc.cli.catalogue"}


def test_calibration_knows_the_inner_loop_and_nothing_of_runs_and_files() -> None:
    known = {room(m) for m in ours("fedadc.personal.calibrate")}
    assert known == {"errors", "data", "models", "methods", "objectives", "federation"}
    assert {room(m) for m in ours("fedadc.personal.results")} == {"data"}


def test_the_leaf_rooms_use_torch_numpy_and_the_standard_library_only() -> None:
    import sys

    for name in ("errors", "rng", "exact", "durable", "objectives", "models", "data", "methods"):
        for module in members(name):
            for top_only, more in ((True, set()), (False, {"PIL", "safetensors"})):
                foreign = {m.split(".")[0] for m in imports(module, top_only)} - set(sys.stdlib_module_names)
                assert foreign <= {"torch", "numpy", "fedadc"} | more, f"{module} imports {sorted(foreign)}"


def test_nothing_imports_the_command_line_and_only_it_the_terminal() -> None:
    for module in FILES:
        assert "fedadc.cli.app" not in ours(module), module
        assert "fedadc.cli.terminal" not in ours(module) or module == "fedadc.cli.app", module


@pytest.mark.parametrize("module", ["fedadc.config.settings", "fedadc.evaluation.metrics", "fedadc.config.schema"])
def test_configs_know_nothing_of_runs(module: str) -> None:
    assert not {room(m) for m in ours(module)} & {"record", "run", "report", "saved", "demo", "holdings", "catalogue"}


def test_no_module_needs_itself() -> None:
    graph = {module: ours(module) & FILES.keys() - {module, "fedadc"} for module in FILES}
    order = list(TopologicalSorter(graph).static_order())  # raises a CycleError
    assert order.index("fedadc.errors") < order.index("fedadc.training.rounds") < order.index("fedadc.cli.app")


def test_only_the_terminal_prints_and_knows_its_libraries() -> None:
    for module, path in FILES.items():
        if module in ("fedadc.cli.app", "fedadc.cli.terminal"):
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"], module
        assert not {m.split(".")[0] for m in imports(module)} & {"rich", "typer", "click"}, module


def test_the_command_line_loads_nothing_heavy_before_a_command_runs() -> None:
    for module in ("fedadc", "fedadc.cli.app", "fedadc.errors"):
        top = {m.split(".")[0] for m in imports(module, at_the_top_only=True)}
        assert not top & {"torch", "numpy", "pydantic", "yaml", "matplotlib", "rich"}, module
        assert {m for m in imports(module, True) if m.startswith("fedadc.")} <= {"fedadc.errors"}, module
