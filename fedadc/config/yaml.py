"""YAML for configs: strict, small, and safe to read from anybody."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedadc.errors import FedadcError, one_line, require, require_file

LARGEST_FILE = 1 << 20  # bytes of a config
LARGEST_TREE = 100_000  # values in it
LONGEST_NUMBER = 10_000  # digits
MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, a key cannot stand twice, and nothing grows far beyond what is written."""

    merged = 0  # keys that `<<` has copied: merges of merges double at every step

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise _refusal(f"key {key.value!r} stands twice", key)
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            for part in (value.value if isinstance(value, yaml.SequenceNode) else [value]) if key.tag == MERGE else ():
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
                    self.merged += len(part.value)
                if self.merged > LARGEST_TREE:
                    raise _refusal(f"`<<` copies more than {LARGEST_TREE} keys", key)
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """PyYAML takes quadratic time for numbers such as 1:20:30."""
        if len(node.value) > LONGEST_NUMBER:
            raise _refusal(f"a number has {len(node.value)} digits", node)
        return int(super().construct_yaml_int(node))


def _refusal(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> Any:
    try:
        tree = yaml.load(text, _Loader)
    except RecursionError:
        raise FedadcError(f"{source} is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise FedadcError(f"{source}{at} is not valid YAML: {problem}.") from error
    _check_size(tree, source)
    return tree


def _check_size(tree: Any, source: str) -> None:
    """Aliases make a small file a huge tree, or one that holds itself: count before anybody walks it."""
    nodes, todo = 0, [tree]
    while todo:
        node = todo.pop()
        nodes += 1
        require(nodes <= LARGEST_TREE, f"{source} expands to more than {LARGEST_TREE} values; a config is smaller.")
        if isinstance(node, dict):
            todo += [*node.keys(), *node.values()]
        elif isinstance(node, list | tuple | set):
            todo += node


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        require(not path.is_dir(), f"{path} is a folder; a config is a YAML file.")
        require(path.exists(), f"there is no config {path}; `fedadc init` writes one to start from.")
        require_file(path, "config")
        require(path.stat().st_size <= LARGEST_FILE, f"{path} is larger than a config can be ({LARGEST_FILE} bytes).")
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise FedadcError(f"{str(path)[:60]} cannot be read as text ({one_line(error)}).") from error
    require(isinstance(tree, dict), f"{path} must be a mapping of keys, as in `rounds: 60`.")
    return dict(tree)


def override(tree: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The tree with one `key.sub=value` changed."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    require(bool(equals) and all(parts), f"{text!r} is not an override; write key.sub=value, e.g. local.lr=0.05.")
    return _with(tree, parts, parse_yaml(value, f"the value of {key}"), key)


def with_value(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tree with the value of `key.sub` changed."""
    require(isinstance(key, str) and all(key.split(".")), f"{key!r} is not a key such as local.lr.")
    return _with(tree, key.split("."), value, key)


def overlay(tree: Mapping[str, Any], fragment: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with a fragment laid over it: a node with a name is replaced, other keys one by one."""
    result = dict(tree)
    for key, value in fragment.items():
        below = result.get(key)
        if isinstance(below, str):
            below = {"name": below}  # model: cnn
        if isinstance(value, Mapping) and "name" not in value and isinstance(below, Mapping):
            value = overlay(below, value)
        result[key] = value
    return result


def _with(tree: Any, parts: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    if isinstance(tree, str) and parts:
        tree = {"name": tree}  # method: fedadc, then method.beta=0.8
    require(tree is None or isinstance(tree, Mapping), f"{key}: {parts[0]} stands below a plain value.")
    result: dict[str, Any] = dict(tree or {})
    result[parts[0]] = value if len(parts) == 1 else _with(result.get(parts[0]), parts[1:], value, key)
    return result
