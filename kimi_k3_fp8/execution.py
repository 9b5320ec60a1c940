"""Execution: jobs become staged shards, on this machine's workers or on any executor.

A job needs nothing but its `Task`; what it leaves is one shard and, last, one receipt. So a run can be
killed anywhere and continued by the same call, and jobs can run in any process on any machine that
sees the source and the staging folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from tqdm.std import tqdm as tqdm_base

from kimi_k3_fp8.checkpoint import Files, Folder, TensorInfo, lay_out
from kimi_k3_fp8.errors import EngineError, JobError, ResumeError, RunLockedError
from kimi_k3_fp8.fidelity import Fidelity, Verify, fidelity_problems, measure, quantized_modules, sampled
from kimi_k3_fp8.planning import METADATA, Engine, Job, Plan
from kimi_k3_fp8.recipe import Recipe
from kimi_k3_fp8.staging import Receipt, Staging, sha256_of


@dataclass(frozen=True, slots=True)
class Task:
    """Everything one job needs, small enough to be sent to another machine.

    device: torch's name for the device to use, or None for the first accelerator the process sees.
    """

    job: Job
    files: Files
    staging: Staging
    recipe: Recipe
    engine: Engine
    verify: Verify
    source_config: dict[str, Any] | None
    device: str | None


@contextmanager
def open_run(plan: Plan) -> Iterator[Staging]:
    """The staging folder of a plan, locked for this process; created, or continued if it is there.

    Raises RunLockedError while another process holds it, ResumeError if it was begun with anything
    else that decides bytes. Neither touches what is staged.
    """
    staging = Staging.beside(plan.save_directory)
    staging.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(staging.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunLockedError(
            f"another run is writing {plan.save_directory} (it holds {staging.lock}); "
            "wait for it, or save to another folder"
        ) from None
    try:
        record = plan.record()
        begun = staging.record()
        if begun is None and staging.has_receipts():
            raise ResumeError(
                f"{staging.path} holds finished work, but its plan.json is gone or cannot be read, so "
                "nothing says what it was made from. Remove that folder to begin anew, or save to another."
            )
        if begun is not None and (differences := begun.differences(record, _unread(plan, staging))):
            listed = "\n".join(f"    {difference}" for difference in differences)
            raise ResumeError(
                f"{staging.path} holds work that was made from something else:\n{listed}\n"
                "    Call again with what it was begun with, save to another folder, "
                "or remove that folder to begin anew. Nothing in it was touched.",
                differences,
            )
        shutil.rmtree(staging.scratch, ignore_errors=True)
        staging.begin(record)
        yield staging
    finally:
        lock.release()


def _unread(plan: Plan, staging: Staging) -> set[str]:
    """Source shards that no finished job has read: they may be replaced, as a bad download must be."""
    jobs = {job.shard: job for job in plan.jobs}
    finished = (jobs[receipt.shard] for receipt in staging.receipts() if receipt.shard in jobs)
    return {*plan.checkpoint.shards} - {tensor.shard for job in finished for tensor in job.inputs}


def execute(
    plan: Plan,
    staging: Staging,
    *,
    executor: Executor | None = None,
    verify: Verify = "sampled",
    progress: bool = True,
) -> tuple[list[Receipt], int]:
    """Run the jobs that have no receipt yet. Returns every job's receipt, and how many ran just now.

    Raises JobError for the first job that failed, after the jobs beside it have ended. What is
    finished stays, and the next call goes on from there.
    """
    done = {receipt.job: receipt for receipt in staging.receipts()}
    waiting = [job for job in plan.jobs if job.number not in done]
    configs = plan.checkpoint.quantization_configs()
    source_config = next(iter(configs.values())) if plan.source_format == "mxfp4" else None

    total = sum(job.bytes_out for job in plan.jobs)
    bar = tqdm(
        desc=plan.save_directory.name,
        total=total,
        initial=total - sum(job.bytes_out for job in waiting),
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, _source(plan, staging, waiting, progress) as (files, submit):

        def task(job: Job, device: str | None) -> Task:
            return Task(job, files, staging, plan.recipe, plan.engine, verify, source_config, device)

        for receipt in _run(plan, waiting, task, submit, executor, staging):
            done[receipt.job] = receipt
            bar.update(plan.jobs[receipt.job - 1].bytes_out)
    return [done[job.number] for job in plan.jobs], len(waiting)


_MakeTask = Callable[[Job, "str | None"], Task]
_Submit = Callable[[Executor, Task], "Future[Receipt]"]


@contextmanager
def _source(
    plan: Plan, staging: Staging, waiting: Sequence[Job], progress: bool
) -> Iterator[tuple[Files, _Submit]]:
    """Where the workers find the source, and how a job is submitted: from the Hub, once it is here."""
    files = plan.checkpoint.files
    if isinstance(files, Folder):
        yield files, lambda executor, task: executor.submit(run_job, task)
        return
    from kimi_k3_fp8.hub import HubFiles, Shelf

    assert isinstance(files, HubFiles)
    with Shelf(
        files,
        staging.source,
        {job.number: job.source_shards for job in waiting},
        places=plan.prefetch,
        keep=plan.keep_source,
        progress=progress,
    ) as shelf:
        yield (
            shelf.files,
            lambda executor, task: shelf.submit(executor, task.job.number, run_job, task),
        )


def _run(
    plan: Plan,
    waiting: Sequence[Job],
    task: _MakeTask,
    submit: _Submit,
    executor: Executor | None,
    staging: Staging,
) -> Iterator[Receipt]:
    if not waiting:
        return
    if executor is not None:
        futures = {submit(executor, task(job, None)): job for job in waiting}
        yield from _collect(futures, lambda _: None)
        return
    assert plan.workers is not None  # a plan without workers has an error and is never run
    queue = iter(waiting)
    with _local_workers(plan, staging, len(waiting)) as workers:
        busy: dict[Future[Receipt], Job] = {}
        owner: dict[Future[Receipt], tuple[Executor, str]] = {}

        def start(worker: tuple[Executor, str]) -> None:
            if (job := next(queue, None)) is not None:
                with _children_ignore_interrupts():
                    future = submit(worker[0], task(job, worker[1]))
                busy[future], owner[future] = job, worker

        for worker in workers:
            start(worker)
        yield from _collect(busy, lambda future: start(owner[future]))


def _collect(
    futures: dict[Future[Receipt], Job], finished: Callable[[Future[Receipt]], None]
) -> Iterator[Receipt]:
    """Receipts as jobs end. After a failure no further job starts; those that run may end."""
    failure: BaseException | None = None
    try:
        while futures:
            ended, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in ended:
                job = futures.pop(future)
                if future.cancelled():
                    continue
                error = future.exception()
                if error is None:
                    if failure is None:
                        finished(future)
                    yield future.result()
                elif failure is None:
                    failure = _explained(error, job)
                    # A cancelled future may never tell that it was: it is not waited for.
                    for other in [f for f in futures if f not in ended and f.cancel()]:
                        del futures[other]
    finally:
        for future in futures:
            future.cancel()
    if failure is not None:
        raise failure


def _explained(error: BaseException, job: Job) -> BaseException:
    if isinstance(error, (JobError, KeyboardInterrupt)):
        return error
    if isinstance(error, EngineError):
        failed = JobError(job.number, error.subject, error.message, error.fix)
    elif isinstance(error, BrokenExecutor):
        failed = JobError(
            job.number,
            job.shard,
            "its worker was killed, most likely because memory ran out",
            "lower max_shard_size (for a new run) or workers, then call again: finished jobs are kept",
        )
    else:
        failed = JobError(job.number, job.shard, f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


# --- this machine's workers


@contextmanager
def _local_workers(plan: Plan, staging: Staging, most: int) -> Iterator[list[tuple[Executor, str]]]:
    """One process each, so that a worker that dies takes only its own job with it.

    loky's processes do not import the caller's __main__ again: a plain script or a notebook works
    without an `if __name__ == "__main__"`.
    """
    from loky import ProcessPoolExecutor

    assert plan.workers is not None
    workers = [
        (
            ProcessPoolExecutor(
                max_workers=1,
                initializer=_start_worker,
                initargs=(staging.logs / f"worker-{number}.log", os.getpid()),
                env=_environment(plan.workers.threads),
            ),
            device,
        )
        for number, device in enumerate(plan.workers.devices[:most])
    ]
    finished = False
    try:
        yield workers
        finished = True
    finally:
        for executor, _ in workers:
            executor.shutdown(wait=True, kill_workers=not finished)


def _environment(threads: int) -> dict[str, str]:
    """A worker's share of the cores, and an allocator that gives freed matrices back at once: glibc's
    own threshold grows until they stay in its heap, a quarter more memory a worker."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "TQDM_MININTERVAL": "5",
    }


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """A worker that starts meanwhile inherits it: Ctrl-C is for the parent, which then ends the worker.

    One pressed in these milliseconds is lost. Only the main thread may say so; in another one a Ctrl-C
    can show a starting worker's traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _start_worker(log: Path, parent: int) -> None:
    """Keep what LLM Compressor prints out of the terminal, and never outlive the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm_base.set_lock(
        threading.RLock()
    )  # not one between processes, which a killed worker would leave behind
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# --- one job, in whatever process


def run_job(task: Task) -> Receipt:
    """Make one shard and its receipt. Imports torch; everything it needs is in the task.

    Raises JobError naming the job and the tensor or file. Whatever happens, the staging folder holds
    the finished shard with its receipt, or neither.
    """
    job, started = task.job, time.monotonic()
    scratch = task.staging.scratch / f"{job.number:05}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        shard = scratch / job.shard
        header = _make_shard(task, shard, scratch)
        found = _verified(task, scratch)
        os.replace(shard, task.staging.shards / job.shard)
        stat = (task.staging.shards / job.shard).stat()
        receipt = Receipt(
            job=job.number,
            shard=job.shard,
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            header_sha256=hashlib.sha256(header[8:]).hexdigest(),
            sha256=sha256_of(task.staging.shards / job.shard),
            engine=task.engine,
            seconds=time.monotonic() - started,
            fidelity=found,
        )
        task.staging.keep(receipt)
        return receipt
    except EngineError as error:
        raise JobError(job.number, error.subject, error.message, error.fix) from error
    except JobError:
        raise
    except Exception as error:
        raise _job_error(job, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _job_error(job: Job, error: Exception) -> JobError:
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
    if full:
        return JobError(
            job.number,
            job.shard,
            f"the disk is full ({error})",
            "free space, then call again: finished jobs are kept",
        )
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return JobError(
            job.number,
            job.shard,
            f"memory ran out ({error})",
            "lower max_shard_size (for a new run) or workers, then call again: finished jobs are kept",
        )
    sources = ", ".join(sorted({tensor.shard for tensor in job.inputs}))
    return JobError(
        job.number,
        sources,
        f"{type(error).__name__}: {error}",
        "see the logs in the staging folder; finished jobs are kept",
    )


def _make_shard(task: Task, shard: Path, scratch: Path) -> bytes:
    """Write the shard's file as the plan lays it out, flushed to disk. Returns its header."""
    job = task.job
    header, _ = lay_out(job.shard, [(t.name, t.dtype, t.shape) for t in job.outputs], METADATA)
    places = {tensor.name: tensor for tensor in job.outputs}
    with open(shard, "wb") as file:
        file.write(header)
        file.truncate(len(header) + job.bytes_out)
        inputs = list(job.inputs)
        if task.engine == "transcode" and task.recipe.dequantize_dtype == "bfloat16":
            inputs = _transcode(task, inputs, places, file.fileno())
        if inputs:
            _convert(task, inputs, places, file.fileno(), scratch)
        if places:
            raise EngineError(next(iter(places)), "the engine did not make this tensor")
        os.fsync(file.fileno())
    return header


def _verified(task: Task, folder: Path) -> tuple[Fidelity, ...]:
    """Compare what was just written with the source. Raises EngineError for values that cannot be."""
    names = sampled(quantized_modules(task.job.outputs), task.verify)
    if not names:
        return ()
    found = measure(task.files, task.job.inputs, Folder(folder), task.job.outputs, names)
    for problem in fidelity_problems(found):
        raise EngineError(problem.subject, problem.message, problem.fix)
    return found


def _transcode(
    task: Task, inputs: Sequence[TensorInfo], places: dict[str, TensorInfo], descriptor: int
) -> list[TensorInfo]:
    """Write the MXFP4 modules that the table covers; return the inputs that are left."""
    import torch

    from kimi_k3_fp8.engine.transcode import transcode

    def read(tensor: TensorInfo) -> torch.Tensor:
        data = bytearray(tensor.nbytes)
        with open(task.files.fetch(tensor.shard), "rb") as file:
            file.seek(tensor.start)
            file.readinto(data)
        return torch.frombuffer(data, dtype=torch.uint8).reshape(tensor.shape)

    by_name = {tensor.name: tensor for tensor in inputs}
    made = set()
    for packed in inputs:
        module, parameter = packed.module, packed.parameter
        if parameter != "weight_packed" or f"{module}.weight" not in places:
            continue
        scale = by_name[f"{module}.weight_scale"]
        result = transcode(read(packed), read(scale), task.recipe.block_scales)
        if result is None:
            continue  # outside the table's range: LLM Compressor's own arithmetic decides
        for name, tensor in zip(("weight", "weight_scale"), result, strict=True):
            place = places.pop(f"{module}.{name}")
            _write(descriptor, place.start, tensor.view(torch.uint8).numpy().data.cast("B"))
        made.add(module)
    return [tensor for tensor in inputs if tensor.module not in made]


def _convert(
    task: Task,
    inputs: Sequence[TensorInfo],
    places: dict[str, TensorInfo],
    descriptor: int,
    scratch: Path,
) -> None:
    """Have LLM Compressor make these tensors, and copy them to their places."""
    from kimi_k3_fp8.engine import llm_compressor

    device = task.device or llm_compressor.default_device()
    fetch, config = task.files.fetch, task.source_config
    held = llm_compressor.convert(inputs, fetch, task.recipe, config, scratch, device)
    for name, (path, tensor) in held.items():
        place = places.pop(name, None)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            planned = f"{place.dtype} {list(place.shape)}" if place else "no such tensor"
            made = f"LLM Compressor made {tensor.dtype} {list(tensor.shape)}"
            raise EngineError(name, f"{made}, planned was {planned}", "please report this")
        with open(path, "rb") as file:
            file.seek(tensor.start)
            if tensor.parameter == "weight_scale" and held[f"{tensor.module}.weight"][1].dtype == "F8_E4M3":
                _write(descriptor, place.start, _sound_scale(tensor, file.read(tensor.nbytes)))
                continue
            for offset in range(0, tensor.nbytes, _CHUNK):
                chunk = file.read(min(_CHUNK, tensor.nbytes - offset))
                _write(descriptor, place.start + offset, chunk)


_CHUNK = 1 << 24


def _write(descriptor: int, start: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _sound_scale(tensor: TensorInfo, data: bytes) -> bytes:
    """The block scales' bytes, if all of them are finite. Raises EngineError naming the module.

    A NaN or an infinity anywhere in a block makes its scale NaN or infinite.
    """
    import numpy as np

    integers, exponent = {
        "BF16": (np.uint16, 0x7F80),
        "F16": (np.uint16, 0x7C00),
        "F32": (np.uint32, 0x7F800000),
    }[tensor.dtype]
    blocks = np.frombuffer(data, integers).reshape(tensor.shape)
    unsound = np.argwhere((blocks & exponent) == exponent)
    if len(unsound):
        row, column = unsound[0]
        raise EngineError(
            f"{tensor.module}.weight",
            f"NaN or infinite values in {len(unsound)} of its {blocks.size} blocks, the first at "
            f"block [{row}, {column}] of 128 x 128; an MXFP4 scale byte of 255 is NaN too",
            "download that shard again and compare its checksum; such a weight cannot be quantized",
        )
    return data
