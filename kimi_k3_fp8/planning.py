"""Plan: everything known before any work, from headers alone.

The plan holds the one list of what is quantized. Jobs, shards, memory, disk and the validation of the
result all follow from it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.constants import HF_HUB_CACHE

from kimi_k3_fp8.checkpoint import (
    DTYPE_BITS,
    Checkpoint,
    Folder,
    TensorInfo,
    find_source,
    lay_out,
    read_checkpoint,
)
from kimi_k3_fp8.decisions import (
    DTYPE_NAMES,
    ModulePlan,
    SourceFormat,
    Unit,
    by_module,
    decide,
    find_source_format,
    rule_problems,
)
from kimi_k3_fp8.errors import PlanError, Problem, errors_in, note, shortened
from kimi_k3_fp8.machine import (
    WORKER_BYTES,
    Machine,
    Workers,
    choose_workers,
    gigabytes,
    parse_size,
    read_machine,
)
from kimi_k3_fp8.recipe import Recipe
from kimi_k3_fp8.staging import RunRecord, Staging, current_versions
from kimi_k3_fp8.tables import compact, html_table, text_table

Engine = Literal["llm_compressor", "transcode"]

METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Job:
    """A dependency-closed set of tensors that becomes one output shard. Sizes are bytes."""

    number: int
    shard: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    header_size: int
    peak_memory_bytes: int

    @property
    def bytes_in(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs)

    @property
    def bytes_out(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs)

    @property
    def source_shards(self) -> tuple[str, ...]:
        """The source's shards that it reads."""
        return tuple(dict.fromkeys(tensor.shard for tensor in self.inputs))


@dataclass(frozen=True)
class Plan:
    """All that a run will do and all that stands in its way. Printing it shows a summary.

    checkpoint, recipe, save_directory, engine, keep_source, prefetch: what was asked for.
    modules: every module, and why it is quantized or kept. jobs: in the order of the output's shards.
    workers: which devices work, on jobs of how many bytes, and why; None if not even one fits.
    source_format: "mxfp4", or "plain" for a source that is not quantized.
    max_shard_bytes, disk_needed, disk_free: bytes. problems: notes included.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    save_directory: Path
    engine: Engine
    modules: tuple[ModulePlan, ...]
    jobs: tuple[Job, ...]
    workers: Workers | None
    source_format: SourceFormat
    max_shard_bytes: int
    keep_source: bool
    prefetch: int
    disk_needed: int
    disk_free: int
    problems: tuple[Problem, ...]

    @property
    def quantized_modules(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules if module.quantized)

    @cached_property
    def output_tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the output by name: dtype, shape, shard, and its place in that shard."""
        return {tensor.name: tensor for job in self.jobs for tensor in job.outputs}

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors; the index's total_size."""
        return sum(job.bytes_out for job in self.jobs)

    @property
    def output_file_bytes(self) -> int:
        """Bytes of all output shards as files, headers included."""
        return sum(job.bytes_out + job.header_size for job in self.jobs)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the block scales among the output tensors."""
        quantized = set(self.quantized_modules)
        return sum(
            tensor.nbytes
            for job in self.jobs
            for tensor in job.outputs
            if tensor.parameter == "weight_scale" and tensor.module in quantized
        )

    @property
    def peak_memory_bytes(self) -> int:
        """Most host memory that one job needs, its worker included."""
        return max((job.peak_memory_bytes for job in self.jobs), default=0)

    @property
    def job_bytes(self) -> int:
        """The most bytes of tensors that a job of several modules writes."""
        return self.workers.job_bytes if self.workers else self.max_shard_bytes

    def record(self) -> RunRecord:
        """What decides the output's bytes, as a run keeps it to be continued by."""
        return RunRecord(
            source=self.checkpoint.source,
            identity=self.checkpoint.identity(),
            recipe=self.recipe,
            versions=current_versions(),
            job_bytes=self.job_bytes,
        )

    @property
    def ok(self) -> bool:
        return not errors_in(self.problems)

    def raise_for_problems(self) -> None:
        """Raise PlanError with every problem, if there is an error among them."""
        if not self.ok:
            raise PlanError(self.problems)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data: every module, job, output tensor and problem."""
        return {
            "source": self.checkpoint.source,
            "source_format": self.source_format,
            "save_directory": str(self.save_directory),
            "recipe": self.recipe.model_dump(mode="json"),
            "fingerprint": self.recipe.fingerprint,
            "engine": self.engine,
            "output_bytes": self.output_bytes,
            "output_file_bytes": self.output_file_bytes,
            "scale_bytes": self.scale_bytes,
            "output_tensors": sum(len(job.outputs) for job in self.jobs),
            "quantized_modules": len(self.quantized_modules),
            "peak_memory_bytes": self.peak_memory_bytes,
            "disk_needed": self.disk_needed,
            "disk_free": self.disk_free,
            "workers": self.workers.reason if self.workers else None,
            "left_out": dict(self.checkpoint.left_out),
            "problems": [problem.model_dump(mode="json") for problem in self.problems],
            "modules": [module._asdict() for module in self.modules],
            "jobs": [
                {
                    "number": job.number,
                    "shard": job.shard,
                    "peak_memory_bytes": job.peak_memory_bytes,
                    "inputs": [tensor.name for tensor in job.inputs],
                    "outputs": [
                        {"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes}
                        for t in job.outputs
                    ],
                }
                for job in self.jobs
            ],
        }

    def save(self, path: str | Path) -> Path:
        """Write `to_dict()` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return Path(path)

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each module class and decision, under `HEADINGS`."""
        totals: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
        for module in self.modules:
            decision = "FP8" if module.quantized else "same"
            totals[module.module_class, decision, module.rule] += Counter(
                modules=1, parameters=module.parameters, into=module.bytes_in, out=module.bytes_out
            )
        return [
            (
                kind,
                f"{total['modules']:,}",
                compact(total["parameters"]),
                f"{compact(total['into'])}B",
                f"{compact(total['out'])}B",
                decision,
                rule,
            )
            for (kind, decision, rule), total in totals.items()
        ]

    HEADINGS = ("class", "modules", "params", "in", "out", "", "because")

    def _facts(self) -> list[str]:
        return [
            f"{self.checkpoint.source} -> {self.save_directory}",
            f"{len(self.quantized_modules):,} modules to FP8, {len(self.output_tensors):,} tensors, "
            f"{gigabytes(self.output_bytes)} in {len(self.jobs)} shard{'s' * (len(self.jobs) != 1)}",
            f"workers: {self.workers.reason if self.workers else 'none fits'}",
            f"memory: at most {gigabytes(self.peak_memory_bytes)} a job; "
            f"disk: {gigabytes(self.disk_needed)} needed, {gigabytes(self.disk_free)} free",
        ]

    def __str__(self) -> str:
        parts = [*self._facts(), "", text_table(self.HEADINGS, self.rows())]
        if self.problems:
            parts += ["", *map(str, self.problems)]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = "".join(f"<p>{line}</p>" for line in self._facts())
        problems = [(p.severity, p.code, p.subject, p.message, p.fix) for p in self.problems]
        table = html_table(("", "code", "subject", "problem", "what to do"), problems)
        return facts + html_table(self.HEADINGS, self.rows()) + (table if problems else "")


def plan(
    source: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    save_directory: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    max_shard_size: int | str = "5GB",
    devices: Sequence[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    engine: Engine = "llm_compressor",
    keep_source: bool = True,
    prefetch: int | None = None,
    overwrite: bool = False,
) -> Plan:
    """Say all that `quantize` with the same arguments will do, and all that stands in its way.

    Reads headers, file sizes and this machine's free memory and disk; creates nothing.
    source, recipe: what to make of which checkpoint; the published recipe by default.
    save_directory: where the result would appear; it is looked at, not made.
    revision, devices, workers, executor, engine, keep_source, prefetch, overwrite: as for `quantize`.
        An executor's workers are elsewhere, so this machine's memory does not limit the jobs.
    max_shard_size: the most bytes of tensors in an output shard, written like "5GB"; the job may be
        smaller where memory is short. A module that is larger by itself gets a shard of its own.
    Raises SourceError where there is no source, ValueError for a size, a device or a number of
    workers that cannot be. Everything else that is wrong is in the plan's `.problems`.
    """
    with _no_garbage_collection():
        checkpoint = read_checkpoint(find_source(source, revision))
    name = Path(os.fspath(source).rstrip("/")).name or "checkpoint"
    target = Path(save_directory) if save_directory is not None else Path(f"{name}-FP8-BLOCK")
    return make_plan(
        checkpoint,
        recipe or Recipe(),
        target.expanduser().absolute(),
        machine=read_machine(),
        max_shard_bytes=parse_size(max_shard_size),
        devices=devices,
        workers=workers,
        executor=executor,
        engine=engine,
        keep_source=keep_source,
        prefetch=prefetch,
        overwrite=overwrite,
    )


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    save_directory: Path,
    *,
    machine: Machine,
    max_shard_bytes: int,
    devices: Sequence[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    engine: Engine = "llm_compressor",
    keep_source: bool = True,
    prefetch: int | None = None,
    overwrite: bool = False,
) -> Plan:
    """The plan for a checkpoint on a given machine: nothing is looked up but the output path."""
    if engine not in ("llm_compressor", "transcode"):
        raise ValueError(f"engine is 'llm_compressor' or 'transcode', not {engine!r}")
    problems = list(checkpoint.problems)
    source_format, found = find_source_format(checkpoint, recipe)
    problems += found

    modules, units = [], []
    with _no_garbage_collection():
        for name, held in by_module(checkpoint.tensors.values()).items():
            module, unit, found = decide(name, held, recipe, source_format)
            modules.append(module)
            units.append(unit)
            problems += found
        problems += rule_problems(checkpoint, recipe, modules)
    staging = Staging.beside(save_directory)
    begun = staging.record()
    most = begun.job_bytes if begun else max_shard_bytes
    chosen: Workers | None
    if executor is not None:
        chosen = Workers((), 1, most, f"those of the executor; jobs of at most {gigabytes(most)} of output")
    else:
        chosen = choose_workers(
            machine,
            max_job_bytes=most,
            fixed=begun is not None,
            total_bytes=sum(unit.bytes_out for unit in units),
            bytes_per_output_byte=_bytes_per_output_byte(recipe),
            extra_bytes=max((unit.transient_bytes for unit in units), default=0),
            devices=devices,
            workers=workers,
        )
    job_bytes = chosen.job_bytes if chosen else most
    with _no_garbage_collection():
        jobs = tuple(_cut_jobs(units, job_bytes))
    largest = max((len(job.source_shards) for job in jobs), default=1)
    prefetch = largest + 2 if prefetch is None else prefetch
    downloads = _downloads(checkpoint)
    if downloads and prefetch < largest:
        problems.append(_prefetch_problem(prefetch, largest))
    problems += [
        note(
            "tensor-exceeds-shard",
            unit.outputs[0][0].rpartition(".")[0],
            f"it is {gigabytes(unit.bytes_out)}, more than {gigabytes(most)}: it gets a shard of its own",
        )
        for unit in units
        if unit.bytes_out > most
    ]
    if begun is not None:
        problems.append(_resumed(staging, begun.job_bytes, max_shard_bytes))
    if chosen is None:
        problems.append(_memory_problem(machine, jobs, devices))
    at_once = max(1, len(chosen.devices)) if chosen else 1
    scratch = at_once * max((job.bytes_out for job in jobs), default=0)
    needed = sum(job.bytes_out + job.header_size for job in jobs) + scratch + _side_bytes(checkpoint)
    place = _existing(save_directory)
    if not keep_source:
        needed += sum(sorted(downloads.values())[-prefetch:])
    elif downloads and _existing(Path(HF_HUB_CACHE)).stat().st_dev == place.stat().st_dev:
        needed += sum(downloads.values())
    free = shutil.disk_usage(place).free + staging.staged_bytes()
    problems += _place_problems(checkpoint, save_directory, needed, free, overwrite)
    return Plan(
        checkpoint=checkpoint,
        recipe=recipe,
        save_directory=save_directory,
        engine=engine,
        modules=tuple(modules),
        jobs=jobs,
        workers=chosen,
        source_format=source_format,
        max_shard_bytes=max_shard_bytes,
        keep_source=keep_source,
        prefetch=prefetch,
        disk_needed=needed,
        disk_free=free,
        problems=_accepted(shortened(problems), recipe),
    )


# --- the jobs, the place, the memory


def _accepted(problems: Sequence[Problem], recipe: Recipe) -> tuple[Problem, ...]:
    return tuple(
        problem.model_copy(update={"severity": "note"}) if problem.code in recipe.accept else problem
        for problem in problems
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small tuples live through planning; looking through them again and again for cycles,
    of which there are none, costs a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _bytes_per_output_byte(recipe: Recipe) -> float:
    """Memory of a job for each byte of its output: packed source, dequantized weight, FP8 weight."""
    return 0.6 + DTYPE_BITS[DTYPE_NAMES[recipe.dequantize_dtype]] / 8 + 1.0


def _cut_jobs(units: Sequence[Unit], job_bytes: int) -> Iterator[Job]:
    cuts: list[list[Unit]] = []
    size = job_bytes + 1
    for unit in units:
        if size + unit.bytes_out > job_bytes:
            cuts.append([])
            size = 0
        cuts[-1].append(unit)
        size += unit.bytes_out
    for number, cut in enumerate(cuts, 1):
        shard = f"model-{number:05}-of-{len(cuts):05}.safetensors"
        outputs = [output for unit in cut for output in unit.outputs if output[1] in DTYPE_BITS]
        header, placed = lay_out(shard, outputs, METADATA)
        inputs = tuple(tensor for unit in cut for tensor in unit.inputs)
        peak = WORKER_BYTES + sum(u.memory_bytes for u in cut) + max(u.transient_bytes for u in cut)
        yield Job(number, shard, inputs, placed, len(header), peak)


def _resumed(staging: Staging, job_bytes: int, max_shard_bytes: int) -> Problem:
    size = f", and keeps its jobs of {gigabytes(job_bytes)}" if job_bytes != max_shard_bytes else ""
    return note("resumed", str(staging.path), f"the run continues from here{size}")


def _memory_problem(machine: Machine, jobs: Sequence[Job], devices: Sequence[str] | None) -> Problem:
    peak = max((job.peak_memory_bytes for job in jobs), default=0)
    there = ", ".join(f"{device.name} {gigabytes(device.free_bytes)}" for device in machine.accelerators)
    return Problem(
        code="memory-too-small",
        subject=", ".join(devices) if devices else there or "cpu",
        message=f"a job needs up to {gigabytes(peak)}, and free are {gigabytes(machine.free_bytes)} "
        f"of host memory{f' and {there}' if there else ''}",
        fix="lower max_shard_size, free memory, or ask for another device",
    )


def _prefetch_problem(prefetch: int, largest: int) -> Problem:
    return Problem(
        code="prefetch-too-small",
        subject="prefetch",
        message=f"only {prefetch} source shards may be on disk at once, but a job reads {largest}",
        fix=f"say prefetch={largest} or more, or lower max_shard_size (for a new run)",
        expected=largest,
        found=prefetch,
    )


def _downloads(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of each shard that has yet to be downloaded."""
    if isinstance(checkpoint.files, Folder):
        return {}
    from kimi_k3_fp8.hub import HubFiles

    files = checkpoint.files
    return files.absent(checkpoint.shards) if isinstance(files, HubFiles) else {}


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _side_bytes(checkpoint: Checkpoint) -> int:
    sizes = checkpoint.files.sizes()
    index = sizes.get(checkpoint.index_name or "", 0)
    return index + sum(sizes.get(name, 0) for name in checkpoint.side_files)


def _place_problems(
    checkpoint: Checkpoint, target: Path, needed: int, free: int, overwrite: bool
) -> Iterator[Problem]:
    if isinstance(checkpoint.files, Folder):
        source, place = checkpoint.files.path.resolve(), target.resolve()
        if source == place or source in place.parents or place in source.parents:
            yield Problem(
                code="output-overlaps",
                subject=str(target),
                message=f"the output and the source {source} lie within each other",
                fix="save beside the source, not in or around it",
            )
    if (target.is_dir() and any(target.iterdir()) and not overwrite) or target.is_file():
        yield Problem(
            code="output-exists",
            subject=str(target),
            message="there is something at the output path already",
            fix="move it away, save elsewhere, or say overwrite=True",
        )
    if needed > free:
        yield Problem(
            code="disk-too-small",
            subject=str(target.parent),
            message=f"the run needs {gigabytes(needed)}, and {gigabytes(free)} are free",
            fix="free disk space, or save to a larger disk",
        )
