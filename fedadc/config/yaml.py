"""Read YAML configs: strict, limited in size, and safe for untrusted files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedadc.errors import FedadcError, kind_of_failure, one_line, require, require_file

LARGEST_FILE = 1 << 20  # bytes in a config file
LARGEST_TREE = 100_000  # values in a config, after aliases are expanded
LONGEST_NUMBER = 10_000  # digits
MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-3 as a number, rejects duplicate keys and limits how far merge keys can expand."""

    merged = 0  # keys copied by `<<`; nested merges can double the number at every level

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise _yaml_error(f"key {key.value!r} appears twice", key)
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            for part in (value.value if isinstance(value, yaml.SequenceNode) else [value]) if key.tag == MERGE else ():
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
                    self.merged += len(part.value)
                if self.merged > LARGEST_TREE:
                    raise _yaml_error(f"`<<` copies more than {LARGEST_TREE} keys", key)
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Limit the length of numbers: PyYAML needs quadratic time for numbers such as 1:20:30."""
        if len(node.value) > LONGEST_NUMBER:
            raise _yaml_error(f"a number has {len(node.value)} digits", node)
        return int(super().construct_yaml_int(node))


def _yaml_error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
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
    """Reject trees that are huge or contain themselves, which aliases make possible even in small files."""
    nodes, todo = 0, [tree]
    while todo:
        node = todo.pop()
        nodes += 1
        require(
            nodes <= LARGEST_TREE, f"{source} expands to more than {LARGEST_TREE} values; a config must be smaller."
        )
        if isinstance(node, dict):
            todo += [*node.keys(), *node.values()]
        elif isinstance(node, list | tuple | set):
            todo += node


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        require(not path.is_dir(), f"{path} is a folder; a config is a YAML file.")
        require(path.exists(), f"there is no config {path}; `fedadc init` writes one to start from.")
        require_file(path, "config", FedadcError)
        require(path.stat().st_size <= LARGEST_FILE, f"{path} is larger than a config may be ({LARGEST_FILE} bytes).")
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise kind_of_failure(error, FedadcError)(
            f"{str(path)[:60]} cannot be read as text ({one_line(error)})."
        ) from error
    require(isinstance(tree, dict), f"{path} must be a mapping of keys, as in `rounds: 60`.")
    return dict(tree)


def override(tree: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The tree with one `key.sub=value` override applied."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    require(bool(equals) and all(parts), f"{text!r} is not an override; write key.sub=value, e.g. local.lr=0.05.")
    return _set_value(tree, parts, parse_yaml(value, f"the value of {key}"), key)


def with_value(tree: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The tree with the value of `key.sub` replaced."""
    require(isinstance(key, str) and all(key.split(".")), f"{key!r} is not a key such as local.lr.")
    return _set_value(tree, key.split("."), value, key)


def with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the values of several `key.sub` replaced."""
    for key, value in values.items():
        tree = with_value(tree, key, value)
    return dict(tree)


def overlay(tree: Mapping[str, Any], fragment: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with a fragment merged over it: a node with a name is replaced as a whole, other nodes key by key."""
    result = dict(tree)
    for key, value in fragment.items():
        current = result.get(key)
        if isinstance(current, str):
            current = {"name": current}  # model: cnn
        if isinstance(value, Mapping) and "name" not in value and isinstance(current, Mapping):
            value = overlay(current, value)
        result[key] = value
    return result


def _set_value(tree: Any, parts: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    if isinstance(tree, str) and parts:
        tree = {"name": tree}  # method: fedadc, then method.beta=0.8
    require(tree is None or isinstance(tree, Mapping), f"{key}: {parts[0]} cannot be set inside a plain value.")
    result: dict[str, Any] = dict(tree or {})
    result[parts[0]] = value if len(parts) == 1 else _set_value(result.get(parts[0]), parts[1:], value, key)
    return result
