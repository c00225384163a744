"""The way through `docs/table.md`, with its commands and its files, in one folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commands import command, contents, fine, refused

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/table.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.slow
def test_every_command_of_the_page_works_in_its_order(tmp_path: Path) -> None:
    shown: dict[str, str] = {}
    subprocess.run([sys.executable, str(ROOT / "examples/hospitals.py"), "patients.csv"], cwd=tmp_path, check=True)
    first, better = (text for language, text in BLOCKS if language == "yaml")
    config, table = tmp_path / "patients.yaml", (tmp_path / "patients.csv").read_text()
    config.write_text(first)
    (new,) = (text for _, text in BLOCKS if text.startswith("age,chol,pain"))
    (tmp_path / "new.csv").write_text(new)
    for text in (text for _, text in BLOCKS if text.startswith("fedadc ")):
        for line in text.splitlines():
            if line == "fedadc data show patients.yaml":
                shown[line] = refused(command(*shlex.split(line)[1:], cwd=tmp_path), code=5)
                continue
            if line.startswith("fedadc run"):
                config.write_text(yaml.safe_dump({**yaml.safe_load(first), **yaml.safe_load(better)}))
            if line.startswith("fedadc predict"):
                (tmp_path / "patients.csv").unlink(missing_ok=True)
            else:
                (tmp_path / "patients.csv").write_text(table)
            answer = command(*shlex.split(line)[1:], cwd=tmp_path)
            shown[line] = fine(answer) + answer.err
    (python,) = (text for language, text in BLOCKS if language == "python")
    subprocess.run([sys.executable, "-c", python], cwd=tmp_path, check=True)

    def said(start: str) -> str:
        return next(text for line, text in shown.items() if line.startswith(start))

    sentences = [
        line for _, text in BLOCKS for line in text.splitlines() if line.startswith(("note: ", "error: ", "stopped "))
    ]
    everything = "\n".join(shown.values()).replace(f"{tmp_path}/", "")
    assert len(sentences) == 6 and all(sentence in everything for sentence in sentences)
    for row in re.findall(r"^ (?:Basel|Bern) .*$", PAGE, flags=re.MULTILINE):
        assert row.split() in [line.split() for line in everything.splitlines()], row
    assert "round 81:" in said("fedadc run patients.yaml --out")
    assert "round 189:" in said("fedadc run patients.yaml method=fedavg")
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 4
    assert {"README.md", "model.pt2", "model.safetensors", "model.json"} == {*contents(tmp_path / "model")}
