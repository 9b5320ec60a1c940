"""The shape of the package: light to import, one direction, a pinned surface, documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kimi_k3_fp8

ROOT = Path(kimi_k3_fp8.__file__).parent

#: Each room may import only from rooms above it (docs/design.md).
ROOMS = [
    "errors",
    "architecture",
    "recipe",
    "checkpoint",
    "hub",
    "fidelity",
    "machine",
    "staging",
    "tables",
    "decisions",
    "planning",
    "engine.observer",
    "engine.transcode",
    "engine.llm_compressor",
    "execution",
    "assembly",
    "validation",
    "serving",
    "model_card",
    "synthetic",
    "api",
    "cli",
    "__init__",
    "__main__",
]
#: Imports inside functions that point down on purpose, each with its reason.
LAZY = {
    ("recipe", "engine.observer"): "the recipe in compressed-tensors' own type needs the observer registered",
    ("recipe", "serving"): "Recipe.for_layout reads as part of the recipe",
    ("checkpoint", "hub"): "find_source opens the Hub only for a name that is no folder",
}


def room(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kimi_k3_fp8"):
            base = node.module.removeprefix("kimi_k3_fp8").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                found.add(name if (ROOT / f"{name.replace('.', '/')}.py").exists() else base)
    return {name or "__init__" for name in found}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=room)
def test_rooms_import_only_from_rooms_above(path: Path) -> None:
    name = room(path)
    if name == "engine.__init__":
        assert not imports(path)
        return
    assert name in ROOMS, f"{name} has no place in the order of rooms"
    for other in imports(path):
        if (name, other) not in LAZY:
            assert ROOMS.index(other) < ROOMS.index(name), f"{name} imports {other}, which is below it"


def test_only_the_engines_know_torch_and_llm_compressor() -> None:
    """At module level nothing outside engine/ imports them."""
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy = {n.partition(".")[0] for n in names} & {"torch", "llmcompressor", "compressed_tensors"}
            assert not heavy or room(path).startswith("engine."), f"{room(path)} imports {heavy}"


def test_importing_loads_neither_torch_nor_llm_compressor() -> None:
    code = (
        "import sys, kimi_k3_fp8\n"
        "heavy = ('torch', 'llmcompressor', 'compressed_tensors', 'transformers')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    assert kimi_k3_fp8.__all__ == [
        "EngineError",
        "Fidelity",
        "IgnoreRule",
        "JobError",
        "KimiK3FP8Error",
        "Layout",
        "Plan",
        "PlanError",
        "Problem",
        "ProblemsError",
        "Recipe",
        "RecipeError",
        "Report",
        "ResumeError",
        "RunError",
        "RunLockedError",
        "ServeOptions",
        "SourceError",
        "ValidationError",
        "check_layout",
        "layouts",
        "plan",
        "quantize",
        "serve_commands",
        "validate",
    ]
    assert all(hasattr(kimi_k3_fp8, name) for name in kimi_k3_fp8.__all__)


@pytest.mark.parametrize("name", kimi_k3_fp8.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(kimi_k3_fp8, name)
    text = inspect.getdoc(thing) or ""
    assert len(text) > 20
    assert text != inspect.getdoc(object.__init__)
    if inspect.isfunction(thing):
        assert "Raises" in text
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{name}: {parameter} is not explained"


def test_every_exception_is_in_the_tree() -> None:
    tree = sys.modules["kimi_k3_fp8.errors"].__doc__ or ""
    for name, thing in vars(kimi_k3_fp8).items():
        if inspect.isclass(thing) and issubclass(thing, Exception):
            assert issubclass(thing, kimi_k3_fp8.KimiK3FP8Error)
            assert name in tree


def test_errors_survive_pickling() -> None:
    """They travel from worker processes to the caller."""
    import pickle

    from kimi_k3_fp8 import EngineError, JobError, PlanError, Problem, ResumeError

    problem = Problem(code="pair-shape", subject="x", message="y")
    for error in (
        JobError(3, "x.weight", "message", "fix"),
        EngineError("x", "message", "fix"),
        ResumeError("message", ("a", "b")),
        PlanError([problem]),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_types_are_strict_and_style_is_kept() -> None:
    root = Path(__file__).parents[1]
    for command in (["mypy"], ["ruff", "check"], ["ruff", "format", "--check"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
