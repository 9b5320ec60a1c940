"""Clusters: the examples, on the real engines, with a worker killed in the middle of a job.

Both engines are extras; a test is skipped where its engine is not installed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import edit_shard, shard_of

from kimi_k3_fp8 import JobError, quantize
from kimi_k3_fp8.checkpoint import Folder

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w1"

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Deadly(Folder):
    """A source that notes which process reads it for which job, and kills the first to do so for the
    first job: in the middle, with the job's scratch folder there and nothing finished."""

    job: int = 0
    notes: Path = Path()

    def fetch(self, name: str) -> Path:
        (self.notes / f"{self.job}-{os.getpid()}").touch()
        if self.job == 1:
            try:
                (self.notes / "killed").touch(exist_ok=False)
            except FileExistsError:
                pass  # that has happened
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(name)


class DeadlyExecutor(Executor):
    """Hands jobs on with a deadly source."""

    def __init__(self, executor: Executor, notes: Path) -> None:
        self.executor, self.notes = executor, notes

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        (task,) = args
        files = Deadly(task.files.path, task.job.number, self.notes)
        return self.executor.submit(fn, replace(task, files=files))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the record, which names the time a job took."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "kimi_k3_fp8.json"
    }


def example(
    name: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> Callable[[list[str]], None]:
    """An example's `main`, with `quantize` replaced."""
    module = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    monkeypatch.setitem(module["main"].__globals__, "quantize", run)
    main: Callable[[list[str]], None] = module["main"]
    return main


@pytest.mark.parametrize(("name", "engine"), [("dask_cluster", "distributed"), ("ray_cluster", "ray")])
def test_a_cluster_gives_the_same_bytes_and_loses_one_job_with_a_worker(
    tiny: Path,
    converted: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    engine: str,
) -> None:
    pytest.importorskip(engine)
    notes = tmp_path / "notes"
    notes.mkdir()
    errors: list[JobError] = []

    def run(source_: str, save_directory: str, *, executor: Executor, **options: Any) -> Any:
        options |= {"progress": False, "card": False}
        report = quantize(source_, save_directory, executor=DeadlyExecutor(executor, notes), **options)
        # While the cluster is up: what a job raises arrives as it was raised.
        with pytest.raises(JobError) as caught:
            quantize(source, tmp_path / "bad", executor=executor, **options)
        errors.append(caught.value)
        return report

    def spoil(tensors: Any) -> None:
        dtype, shape, data = tensors[f"{EXPERT}.weight_scale"]
        tensors[f"{EXPERT}.weight_scale"] = (dtype, shape, b"\xff" + data[1:])

    edit_shard(shard_of(source, f"{EXPERT}.weight_scale"), spoil)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a cluster of this test alone
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    out = tmp_path / "out"
    example(name, monkeypatch, run)([str(tiny), str(out), "--max-shard-size", "1MB"])

    assert contents(out) == contents(converted)
    readers = [path.name.partition("-")[::2] for path in notes.glob("*-*")]
    processes = {job: [pid for other, pid in readers if other == job] for job, _ in readers}
    assert (notes / "killed").exists()
    assert {job: len(pids) for job, pids in processes.items()} == {
        job: 2 if job == "1" else 1 for job in processes
    }
    assert len({pid for _, pid in readers}) >= 2
    assert len(processes) == len([*out.glob("*.safetensors")])
    (error,) = errors
    assert error.subject.startswith(EXPERT)
    assert isinstance(error.job, int)
