"""The examples do what they say, on the tiny checkpoint."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Inline, read_tensors

import kimi_k3_fp8
from kimi_k3_fp8 import Layout, Recipe, Report, validate
from kimi_k3_fp8.serving import rules_for_layout

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in this process: starting workers takes longer than the work."""
    quantize = functools.partial(kimi_k3_fp8.quantize, executor=Inline(), progress=False)
    monkeypatch.setattr(kimi_k3_fp8, "quantize", quantize)


def main_of(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / name))["main"]


def run(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_quantize(tiny: Path, converted: Path, tmp_path: Path) -> None:
    """As a user runs it, with workers of its own."""
    printed = run("quantize.py", str(tiny), cwd=tmp_path)
    output = tmp_path / "Kimi-K3-FP8-BLOCK"
    assert f"{output}: ok" in printed
    assert read_tensors(output) == read_tensors(converted)


def test_quantize_is_for_the_real_model_by_default() -> None:
    assert main_of("quantize.py").__defaults__ == ("moonshotai/Kimi-K3", None)


@pytest.mark.usefixtures("inline")
def test_exact(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report: Report = main_of("exact.py")(str(tiny), str(tmp_path / "out"))
    assert [found.module_class for found in report.fidelity if found.exact] == ["routed experts"]
    assert "routed experts: exact" in capsys.readouterr().out


@pytest.mark.usefixtures("inline")
def test_custom_recipe(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_of("custom_recipe.py")(str(tiny), str(tmp_path / "out"))
    printed = capsys.readouterr().out
    recipe = Recipe.from_file(tmp_path / "out.yaml")
    assert not rules_for_layout(Layout(16, nodes=2, expert_parallel=True), recipe)
    dtypes = {name: dtype for name, (dtype, _, _) in read_tensors(tmp_path / "out").items()}
    added = [rule for rule in recipe.ignore if rule not in Recipe().ignore]
    assert len(added) == 2
    for rule in added:
        assert f"{rule.name}: {rule.reason}" in printed
        assert {dtypes[name] for name in dtypes if rule.matches(name.rpartition(".")[0])} == {"BF16"}
    assert validate(tmp_path / "out", recipe, source=tiny).ok


@pytest.mark.slow
def test_resume(tiny: Path, converted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    printed = run("resume.py", str(tiny), str(output), "1MB", cwd=tmp_path).splitlines()
    assert printed[0] == "killed; there is nothing at the output path"
    kept, _, _, _, ran, _, _ = printed[-1].split()
    shards = len([*output.glob("*.safetensors")])
    assert int(kept) >= 1
    assert int(kept) + int(ran) == shards > 3
    assert read_tensors(output) == read_tensors(converted)


@pytest.mark.slow
def test_quickstart_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), (
        "commit it without outputs"
    )

    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    shown = [output.get("data", {}) for cell in code for output in cell.outputs]
    tables = [data["text/html"] for data in shown if "text/html" in data]
    assert len(tables) == 4
    assert all("<table>" in table for table in tables)
    assert "exact" not in tables[1]
    assert "exact" in tables[2]
    assert sum("image/png" in data for data in shown) == 3
