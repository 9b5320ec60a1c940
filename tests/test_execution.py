"""A run: bounded, killed and continued, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Inline, edit_shard, read_tensors, shard_of

from kimi_k3_fp8 import JobError, Recipe, ResumeError, RunLockedError, api, plan, quantize
from kimi_k3_fp8.execution import open_run, run_job
from kimi_k3_fp8.staging import Staging, sha256_of

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w1"
SHARED = "language_model.model.layers.2.block_sparse_moe.shared_experts.gate_proj"


class Stopping(Inline):
    """Runs the first jobs and refuses the rest, as a run that dies in the middle."""

    def __init__(self, jobs: int) -> None:
        self.left = jobs

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().submit(fn, *args, **kwargs)


def begin(source: Path, out: Path, jobs: int = 3, recipe: Recipe | None = None) -> Staging:
    """A run that stopped after some jobs."""
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, recipe, max_shard_size="1MB", executor=Stopping(jobs), progress=False)
    assert not out.exists()
    staging = Staging.beside(out)
    assert len([*staging.receipts()]) == jobs
    return staging


def finish(source: Path, out: Path, recipe: Recipe | None = None, **more: Any) -> Any:
    defaults = {"max_shard_size": "1MB", "card": False}
    return quantize(source, out, recipe, executor=Inline(), progress=False, **(defaults | more))


def files(folder: Path) -> dict[str, str]:
    """A checksum of every file below a folder."""
    return {p.relative_to(folder).as_posix(): sha256_of(p) for p in folder.rglob("*") if p.is_file()}


# --- kill -9 (TRAPS 22)

KILLS = """
import json, os, random, shutil, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
import torch, llmcompressor
from kimi_k3_fp8 import Recipe, quantize
from kimi_k3_fp8.staging import Staging

torch.set_num_threads(1)
source, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
recipe = Recipe.from_file(folder / "recipe.json")

def start(out):
    "The run in a process group of its own: a parent and two workers, forked with everything imported."
    child = os.fork()
    if child == 0:
        os.setsid()
        code = 1
        try:
            with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
                report = quantize(source, out, recipe, max_shard_size="200kB", executor=pool,
                              card=False, progress=False)
            out.with_suffix(".report").write_text(json.dumps([report.jobs_run, report.jobs_kept]))
            code = 0
        finally:
            os._exit(code)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

began = time.monotonic()
assert ended(start(folder / "whole")) == 0
duration = time.monotonic() - began
moments = random.Random(seed)
for kill in range(kills):
    out = folder / f"killed-{kill}"
    child = start(out)
    time.sleep(duration * (kill + moments.random()) / kills)
    finished = out.exists()
    os.killpg(child, signal.SIGKILL)
    ended(child)
    staging = Staging.beside(out)
    receipts = {receipt.job for receipt in staging.receipts()}
    begun = {int(path.name[:5]) for path in staging.scratch.glob("*")} if staging.scratch.is_dir() else set()
    whole = out.exists()
    if not whole:
        assert ended(start(out)) == 0
    report = json.loads(out.with_suffix(".report").read_text()) if not whole else None
    print(json.dumps({"out": out.name, "receipts": sorted(receipts), "begun": sorted(begun),
                      "finished": finished, "whole": whole, "report": report}), flush=True)
"""


def small_source(folder: Path) -> tuple[Path, Recipe]:
    """A checkpoint of two layers, and the published recipe without the rules it has nothing for."""
    from kimi_k3_fp8.architecture import Dimensions
    from kimi_k3_fp8.synthetic import write_checkpoint

    tiny = Dimensions.tiny()
    fields = {name: getattr(tiny, name) for name in Dimensions.__dataclass_fields__}
    fields |= {"layers": 2, "mla_layers": (), "dense_layers": (), "vision_blocks": 0, "experts": 3}
    source = write_checkpoint(folder / "Kimi-K3", dimensions=Dimensions(**fields), values="random")
    return source, Recipe().without_rule("vision tower", "projector")


@pytest.mark.slow
def test_killed_at_twenty_moments_and_continued(tmp_path: Path) -> None:
    source, recipe = small_source(tmp_path)
    recipe.save(tmp_path / "recipe.json")
    command = [sys.executable, "-c", KILLS, str(source), str(tmp_path), "20", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 20
    whole = files(tmp_path / "whole")
    jobs = len([name for name in whole if name.endswith(".safetensors")])
    for case in cases:
        out = tmp_path / case["out"]
        assert files(out) == whole
        assert not Staging.beside(out).path.exists() or case["whole"]
        if not case["whole"]:
            assert case["report"] == [jobs - len(case["receipts"]), len(case["receipts"])]
            assert len({*case["begun"]} - {*case["receipts"]}) <= 2, "more was redone than was in flight"
    assert any(case["receipts"] and not case["whole"] for case in cases), "no kill fell between two jobs"


@pytest.mark.slow
def test_the_workers_of_a_killed_run_do_not_outlive_it(tiny: Path, tmp_path: Path) -> None:
    import psutil

    call = f"quantize({str(tiny)!r}, {str(tmp_path / 'out')!r}, progress=False)"
    code = f"from kimi_k3_fp8 import quantize; {call}"
    child = subprocess.Popen([sys.executable, "-c", code])
    scratch = Staging.beside(tmp_path / "out").scratch
    wait_for(lambda: scratch.is_dir() and any(scratch.iterdir()))
    workers = psutil.Process(child.pid).children(recursive=True)
    assert workers
    child.kill()
    child.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    finish(tiny, tmp_path / "out")


def wait_for(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this should have happened by now"
        time.sleep(0.005)


# --- continued


def test_a_stopped_run_continues_and_gives_the_same_bytes(
    tiny: Path, converted: Path, tmp_path: Path
) -> None:
    begin(tiny, tmp_path / "out", jobs=3)
    report = finish(tiny, tmp_path / "out")
    assert report.jobs_kept == 3
    assert read_tensors(tmp_path / "out") == read_tensors(converted)
    assert not Staging.beside(tmp_path / "out").path.exists()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_all_receipts_there_means_no_job_runs(
    tiny: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    made = plan(tiny, save_directory=out, max_shard_size="1MB")
    with monkeypatch.context() as patch:
        patch.setattr(api, "assemble", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(tiny, out)
    assert not out.exists()

    class Refusing(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a job was started")

    report = quantize(tiny, out, max_shard_size="1MB", executor=Refusing(), progress=False)
    assert (report.jobs_run, report.jobs_kept) == (0, len(made.jobs))
    assert read_tensors(out) == read_tensors(converted)


def test_the_shard_size_belongs_to_the_run(tiny: Path, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begin(tiny, out)
    made = plan(tiny, save_directory=out, max_shard_size="3MB")
    notes = [problem.message for problem in made.problems if problem.code == "resumed"]
    assert notes == ["the run continues from here, and keeps its jobs of 1.00 MB"]
    report = finish(tiny, out, max_shard_size="3MB", workers=1, devices=["cpu"])
    assert report.jobs_kept == 3
    assert "resumed" in {problem.code for problem in report.problems}
    assert files(out).keys() == files(converted).keys()


def test_the_executor_may_change(tiny: Path, converted: Path, tmp_path: Path) -> None:
    begin(tiny, tmp_path / "out")
    with ThreadPoolExecutor(1) as pool:
        report = quantize(tiny, tmp_path / "out", max_shard_size="1MB", executor=pool, progress=False)
    assert report.jobs_kept == 3
    assert read_tensors(tmp_path / "out") == read_tensors(converted)


# --- TRAPS 23: something else


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Recipe(block_scales="power_of_two"), "block_scales was amax, is power_of_two"),
        (Recipe().with_rule("dense", r"re:.*layers\.0\.mlp.*"), "recipe: ignore was"),
    ],
)
def test_another_recipe_does_not_continue(tiny: Path, tmp_path: Path, other: Recipe, says: str) -> None:
    staging = begin(tiny, tmp_path / "out")
    before = files(staging.path)
    with pytest.raises(ResumeError, match=says) as caught:
        finish(tiny, tmp_path / "out", other)
    assert len(caught.value.differences) == 1
    assert files(staging.path) == before
    assert finish(tiny, tmp_path / "out").jobs_kept == 3


def test_a_changed_source_does_not_continue(source: Path, tmp_path: Path) -> None:
    staging = begin(source, tmp_path / "out")
    read = sorted(source.glob("*.safetensors"))[0]
    os.utime(read, ns=(1, 1))
    before = files(staging.path)
    with pytest.raises(ResumeError, match=rf"source {read.name} was .* mtime .*, is .* mtime 1"):
        finish(source, tmp_path / "out")
    assert files(staging.path) == before


def test_other_versions_do_not_continue(tiny: Path, tmp_path: Path) -> None:
    staging = begin(tiny, tmp_path / "out")
    record = json.loads((staging.path / "plan.json").read_text())
    record["versions"]["llmcompressor"] = "0.14.0"
    (staging.path / "plan.json").write_text(json.dumps(record))
    with pytest.raises(ResumeError, match=r"version of llmcompressor was 0\.14\.0, is"):
        finish(tiny, tmp_path / "out")


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_work_of_unknown_origin_is_not_continued(tiny: Path, tmp_path: Path, text: str | None) -> None:
    staging = begin(tiny, tmp_path / "out", jobs=1)
    record = staging.path / "plan.json"
    record.unlink() if text is None else record.write_text(text)
    before = files(staging.path)
    with pytest.raises(ResumeError, match="nothing says what it was made from"):
        finish(tiny, tmp_path / "out", Recipe(block_scales="power_of_two"))
    assert files(staging.path) == before


# --- TRAPS 24: staged shards that are no longer what they were


@pytest.mark.parametrize("how", ["truncated", "altered", "header", "gone", "receipt", "receipt gone"])
def test_a_spoiled_staged_shard_is_made_again(tiny: Path, converted: Path, tmp_path: Path, how: str) -> None:
    staging = begin(tiny, tmp_path / "out")
    shard = sorted(staging.shards.glob("*.safetensors"))[1]
    raw = shard.read_bytes()
    if how == "truncated":
        shard.write_bytes(raw[:-10])
    elif how == "altered":
        shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif how == "header":
        times = shard.stat()
        shard.write_bytes(raw[:20] + b"X" + raw[21:])
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif how == "gone":
        shard.unlink()
    else:
        receipt = staging.path / "receipts" / "00002.json"
        receipt.write_text("{") if how == "receipt" else receipt.unlink()
    assert finish(tiny, tmp_path / "out").jobs_kept == 2
    assert read_tensors(tmp_path / "out") == read_tensors(converted)


def test_a_moved_file_time_alone_redoes_nothing(tiny: Path, tmp_path: Path) -> None:
    staging = begin(tiny, tmp_path / "out")
    for shard in staging.shards.glob("*.safetensors"):
        os.utime(shard)
    assert finish(tiny, tmp_path / "out").jobs_kept == 3


# --- TRAPS 25


def test_two_runs_on_one_output(tiny: Path, tmp_path: Path) -> None:
    staging = begin(tiny, tmp_path / "out")
    made = plan(tiny, save_directory=tmp_path / "out", max_shard_size="1MB")
    with open_run(made):
        before = files(staging.path)
        with pytest.raises(RunLockedError, match="another run is writing"):
            finish(tiny, tmp_path / "out")
        assert files(staging.path) == before
    assert finish(tiny, tmp_path / "out").ok


# --- failures


def spoil_scale(tensors: dict[str, Any]) -> None:
    dtype, shape, data = tensors[f"{EXPERT}.weight_scale"]
    tensors[f"{EXPERT}.weight_scale"] = (dtype, shape, data[:-1] + b"\xff")


def spoil_weight(bits: bytes) -> Any:
    def spoil(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[f"{SHARED}.weight"]
        tensors[f"{SHARED}.weight"] = (dtype, shape, data[:100] + bits + data[102:])

    return spoil


@pytest.mark.parametrize("engine", ["llm_compressor", "transcode"])
@pytest.mark.parametrize(
    ("tensor", "spoil", "subject"),
    [
        (f"{EXPERT}.weight_scale", spoil_scale, f"{EXPERT}.weight"),
        (f"{SHARED}.weight", spoil_weight(b"\xc0\x7f"), f"{SHARED}.weight"),
        (f"{SHARED}.weight", spoil_weight(b"\x80\xff"), f"{SHARED}.weight"),
    ],
    ids=["scale byte 255", "NaN", "-Inf"],
)
def test_trap_19_values_that_are_not_finite(
    tiny: Path,
    source: Path,
    converted: Path,
    tmp_path: Path,
    tensor: str,
    spoil: Any,
    subject: str,
    engine: Any,
) -> None:
    shard = shard_of(source, tensor)
    edit_shard(shard, spoil)
    with pytest.raises(JobError, match="NaN or infinite") as caught:
        finish(source, tmp_path / "out", engine=engine)
    assert caught.value.subject == subject
    assert not (tmp_path / "out").exists()
    staging = Staging.beside(tmp_path / "out")
    kept = len([*staging.receipts()])
    assert kept > 0
    # The bad shard is downloaded again. Finished jobs that had read its other parts stand in the way.
    read = {
        t.shard
        for job in plan(source, save_directory=tmp_path / "out").jobs
        for t in job.inputs
        if job.number <= kept
    }
    shutil.copy2(shard_of(tiny, tensor), shard)
    assert shard.name in read
    with pytest.raises(ResumeError, match=shard.name):
        finish(source, tmp_path / "out", engine=engine)
    assert len([*staging.receipts()]) == kept


def test_a_shard_no_job_has_read_may_be_replaced(
    tiny: Path, source: Path, converted: Path, tmp_path: Path
) -> None:
    begin(source, tmp_path / "out", jobs=2)
    last = sorted(source.glob("*.safetensors"))[-1]
    os.utime(last)
    report = finish(source, tmp_path / "out")
    assert report.jobs_kept == 2
    assert read_tensors(tmp_path / "out") == read_tensors(converted)


def test_trap_20_a_block_of_zeros_is_fine(source: Path, tmp_path: Path) -> None:
    def zero(tensors: dict[str, Any]) -> None:
        for name in (f"{EXPERT}.weight_packed", f"{SHARED}.weight"):
            if name in tensors:
                dtype, shape, data = tensors[name]
                tensors[name] = (dtype, shape, bytes(len(data)))

    for tensor in (f"{EXPERT}.weight_packed", f"{SHARED}.weight"):
        edit_shard(shard_of(source, tensor), zero)
    assert finish(source, tmp_path / "out").ok
    tensors = read_tensors(tmp_path / "out")
    for module in (EXPERT, SHARED):
        assert set(tensors[f"{module}.weight"][2]) == {0}
        assert set(tensors[f"{module}.weight_scale"][2]) == {0x00, 0x3C}  # bf16 0.0078125, finite, positive


def test_a_shard_that_becomes_unreadable_in_the_middle(source: Path, tmp_path: Path) -> None:
    begin(source, tmp_path / "out", jobs=1)
    shard = shard_of(source, "mm_projector.proj.0.weight")
    made = plan(source, save_directory=tmp_path / "out")

    class Spoiling(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            shard.write_bytes(shard.read_bytes()[:64])
            return super().submit(fn, *args, **kwargs)

    with pytest.raises(JobError) as caught:
        quantize(source, tmp_path / "out", executor=Spoiling(), progress=False)
    assert shard.name in caught.value.subject
    assert caught.value.job in {
        job.number for job in made.jobs if shard.name in {t.shard for t in job.inputs}
    }
    assert not (tmp_path / "out").exists()


@pytest.fixture
def little_disk(tmp_path: Path) -> Any:
    """A file system of 6 MB."""
    place = tmp_path / "little"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("engine", ["llm_compressor", "transcode"])
def test_trap_27_disk_full_in_the_middle(
    tiny: Path, converted: Path, little_disk: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    usage = shutil.disk_usage(little_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))
    with pytest.raises(JobError, match="the disk is full"):
        finish(tiny, little_disk / "out", engine=engine)
    assert not (little_disk / "out").exists()
    kept = len([*Staging.beside(little_disk / "out").receipts()])
    assert kept > 0
    subprocess.run(["mount", "-o", "remount,size=40m", str(little_disk)], check=True)
    assert finish(tiny, little_disk / "out", engine=engine).jobs_kept == kept
    assert read_tensors(little_disk / "out") == read_tensors(converted)


@pytest.mark.slow
def test_trap_28_a_worker_that_is_killed(tiny: Path, converted: Path, tmp_path: Path) -> None:
    scratch = Staging.beside(tmp_path / "out").scratch
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: scratch.is_dir() and any(scratch.iterdir()))
        job, pid, _ = next(scratch.iterdir()).name.split("-")
        os.kill(int(pid), signal.SIGKILL)
        killed.append(int(job))

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(JobError, match=r"its worker was killed.*\n.*lower max_shard_size") as caught:
        quantize(tiny, tmp_path / "out", max_shard_size="1MB", workers=2, progress=False)
    killer.join()
    assert [caught.value.job] == killed
    assert not (tmp_path / "out").exists()
    assert finish(tiny, tmp_path / "out").ok
    assert read_tensors(tmp_path / "out") == read_tensors(converted)


def test_nothing_is_published_that_validation_refuses(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimi_k3_fp8 import Problem, Report, ValidationError

    problem = Problem(code="tensor-missing", subject="x", message="gone")
    report = Report(
        checkpoint="x", level="tensors", tensors=0, quantized_modules=0, nbytes=0, problems=(problem,)
    )
    monkeypatch.setattr(api, "validate", lambda *_, **__: report)
    with pytest.raises(ValidationError, match="tensor-missing"):
        finish(tiny, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert finish(tiny, tmp_path / "out").jobs_run == 0


def test_two_workers_give_what_one_gives_and_log_beside_the_work(
    tiny: Path,
    converted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs: dict[str, str] = {}
    publish = api.publish

    def look(folder: Path, target: Path) -> None:
        logs.update({p.name: p.read_text() for p in Staging.beside(target).logs.iterdir()})
        publish(folder, target)

    monkeypatch.setattr(api, "publish", look)
    quantize(tiny, tmp_path / "out", max_shard_size="1MB", workers=2)
    assert read_tensors(tmp_path / "out") == read_tensors(converted)
    assert sorted(logs) == ["worker-0.log", "worker-1.log"]
    assert any("Quantizing" in text for text in logs.values())
    seen = capfd.readouterr()
    assert "Quantizing" not in seen.out + seen.err
    assert "out: 100%" in seen.err


def test_a_job_can_be_run_by_hand(tiny: Path, tmp_path: Path) -> None:
    """A task is all that a job needs, wherever it runs."""
    import pickle

    tasks: list[bytes] = []

    class Recording(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            assert fn is run_job
            tasks.append(pickle.dumps(args[0]))
            return super().submit(run_job, pickle.loads(tasks[-1]))

    report = quantize(tiny, tmp_path / "out", max_shard_size="1MB", executor=Recording(), progress=False)
    assert report.ok
    assert report.jobs_run == len(tasks) > 3
    assert max(map(len, tasks)) < 100_000
