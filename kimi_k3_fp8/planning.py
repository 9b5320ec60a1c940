"""Plan: everything known before any work, from headers alone.

The plan holds the one list of what is quantized. Jobs, shards, memory, disk and the validation of the
result all follow from it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kimi_k3_fp8.architecture import ALWAYS_UNQUANTIZED, FUSED_GROUPS, MXFP4_GROUP, module_class
from kimi_k3_fp8.checkpoint import (
    DTYPE_BITS,
    Checkpoint,
    Folder,
    TensorInfo,
    find_source,
    lay_out,
    read_checkpoint,
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
from kimi_k3_fp8.recipe import BLOCK, Recipe
from kimi_k3_fp8.staging import RunRecord, Staging, current_versions
from kimi_k3_fp8.tables import compact, html_table, text_table

Engine = Literal["llm_compressor", "transcode"]
SourceFormat = Literal["mxfp4", "plain"]

METADATA = {"format": "pt"}
#: Dtypes of weights that FP8_BLOCK is made from.
QUANTIZABLE = ("BF16", "F16", "F32")
#: Bytes per element that LLM Compressor needs for a moment to dequantize or quantize one matrix.
TRANSIENT_BYTES = 24
_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ModulePlan(NamedTuple):
    """What becomes of one module. `rule` is the ignore rule that keeps it, or why it is quantized.
    `parameters` counts elements (an MXFP4 weight's logical ones, scales not)."""

    name: str
    module_class: str
    quantized: bool
    rule: str
    parameters: int
    bytes_in: int
    bytes_out: int


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


@dataclass(frozen=True)
class Plan:
    """All that a run will do and all that stands in its way. Printing it shows a summary."""

    checkpoint: Checkpoint
    recipe: Recipe
    save_directory: Path
    engine: Engine
    modules: tuple[ModulePlan, ...]
    jobs: tuple[Job, ...]
    workers: Workers | None
    source_format: SourceFormat
    max_shard_bytes: int
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

    def _rows(self) -> list[tuple[str, ...]]:
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

    _HEADINGS = ("class", "modules", "params", "in", "out", "", "because")

    def _facts(self) -> list[str]:
        return [
            f"{self.checkpoint.source} -> {self.save_directory}",
            f"{len(self.quantized_modules):,} modules to FP8, {len(self.output_tensors):,} tensors, "
            f"{gigabytes(self.output_bytes)} in {len(self.jobs)} shards",
            f"workers: {self.workers.reason if self.workers else 'none fits'}",
            f"memory: at most {gigabytes(self.peak_memory_bytes)} a job; "
            f"disk: {gigabytes(self.disk_needed)} needed, {gigabytes(self.disk_free)} free",
        ]

    def __str__(self) -> str:
        parts = [*self._facts(), "", text_table(self._HEADINGS, self._rows())]
        if self.problems:
            parts += ["", *map(str, self.problems)]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = "".join(f"<p>{line}</p>" for line in self._facts())
        problems = [(p.severity, p.code, p.subject, p.message, p.fix) for p in self.problems]
        table = html_table(("", "code", "subject", "problem", "what to do"), problems)
        return facts + html_table(self._HEADINGS, self._rows()) + (table if problems else "")


def plan(
    source: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    save_directory: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    devices: Sequence[str] | None = None,
    workers: int | None = None,
    engine: Engine = "llm_compressor",
    overwrite: bool = False,
) -> Plan:
    """Say all that `quantize` with the same arguments will do, and all that stands in its way.

    Reads headers, file sizes and this machine's free memory and disk; creates nothing.
    max_shard_size: the most bytes of tensors in an output shard, written like "5GB"; the job may be
        smaller where memory is short. A module that is larger by itself gets a shard of its own.
    Raises SourceError where there is no source, ValueError for a size, a device or a number of
    workers that cannot be. Everything else that is wrong is in the plan's `.problems`.
    """
    checkpoint = read_checkpoint(find_source(source))
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
        engine=engine,
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
    engine: Engine = "llm_compressor",
    overwrite: bool = False,
) -> Plan:
    """The plan for a checkpoint on a given machine: nothing is looked up but the output path."""
    if engine not in ("llm_compressor", "transcode"):
        raise ValueError(f"engine is 'llm_compressor' or 'transcode', not {engine!r}")
    problems = list(checkpoint.problems)
    source_format, source_problems = _source_format(checkpoint, recipe)
    problems += source_problems

    modules, units = [], []
    by_module: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        by_module[tensor.module].append(tensor)
    for name, held in by_module.items():
        module, unit, found = _plan_module(name, held, recipe, source_format)
        modules.append(module)
        units.append(unit)
        problems += found
    problems += _rule_problems(checkpoint, recipe, modules)

    staging = Staging.beside(save_directory)
    begun = staging.record()
    chosen = choose_workers(
        machine,
        max_job_bytes=begun.job_bytes if begun else max_shard_bytes,
        fixed=begun is not None,
        bytes_per_output_byte=_bytes_per_output_byte(recipe),
        extra_bytes=max((unit.transient_bytes for unit in units), default=0),
        devices=devices,
        workers=workers,
    )
    job_bytes = chosen.job_bytes if chosen else max_shard_bytes
    jobs = tuple(_cut_jobs(units, job_bytes))
    problems += [
        note(
            "tensor-exceeds-shard",
            unit.outputs[0][0].rpartition(".")[0],
            f"it is {gigabytes(unit.bytes_out)}, more than {gigabytes(job_bytes)}: "
            "it gets a shard of its own",
        )
        for unit in units
        if unit.bytes_out > job_bytes
    ]
    if begun is not None:
        problems.append(_resumed(staging, begun.job_bytes, max_shard_bytes))
    if chosen is None:
        problems.append(_memory_problem(machine, jobs, devices))
    scratch = max((job.bytes_out for job in jobs), default=0) * (len(chosen.devices) if chosen else 1)
    needed = sum(job.bytes_out + job.header_size for job in jobs) + scratch + _side_bytes(checkpoint)
    free = shutil.disk_usage(_existing(save_directory)).free + staging.staged_bytes()
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
        disk_needed=needed,
        disk_free=free,
        problems=_accepted(shortened(problems), recipe),
    )


# --- what the source is


def _source_format(checkpoint: Checkpoint, recipe: Recipe) -> tuple[SourceFormat, list[Problem]]:
    problems = []
    config = checkpoint.config
    if config and config.get("model_type") != "kimi_k3":
        problems.append(
            Problem(
                code="not-kimi-k3",
                subject="config.json",
                message="this is no Kimi-K3: model_type is "
                f"{config.get('model_type')!r}, architectures {config.get('architectures')!r}",
                fix="for another model give your own ignore list and accept=['not-kimi-k3']",
            )
        )
    configs = checkpoint.quantization_configs()
    if not configs:
        packed = [t.name for t in checkpoint.tensors.values() if t.parameter == "weight_packed"]
        problems += [
            Problem(
                code="source-quantization",
                subject=name,
                message="it is packed, but config.json holds no quantization_config to unpack it by",
                fix="use the model's own config.json",
            )
            for name in packed
        ]
        return "plain", problems
    (path, found), *others = configs.items()
    problems += [
        Problem(
            code="conflicting-configs",
            subject=f"config.json: {other}",
            message=f"it differs from {path}, and nothing says which one the weights follow",
            fix="use the model's own config.json",
        )
        for other, value in others
        if value != found
    ]
    problems += _mxfp4_problems(path, found)
    return "mxfp4", problems


def _mxfp4_problems(path: str, config: Any) -> Iterator[Problem]:
    """Nothing if a quantization config is the MXFP4 that Kimi-K3 is published in."""
    expected = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4_GROUP,
        "symmetric": True,
    }
    groups = config.get("config_groups") if isinstance(config, dict) else None
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    scheme = schemes[0] if len(schemes) == 1 and isinstance(schemes[0], dict) else {}
    weights = scheme.get("weights") or {}
    wrong = {key: weights.get(key) for key, value in expected.items() if weights.get(key) != value}
    layout = scheme.get("format") or (config.get("format") if isinstance(config, dict) else None)
    if layout != "mxfp4-pack-quantized":
        wrong["format"] = layout
    if "Linear" not in (scheme.get("targets") or []):
        wrong["targets"] = scheme.get("targets")
    if wrong:
        seen = ", ".join(f"{key} {value!r}" for key, value in wrong.items())
        yield Problem(
            code="source-quantization",
            subject=f"config.json: {path}",
            message=f"only MXFP4 in one group (mxfp4-pack-quantized, groups of 32) is converted; found {seen}",
            fix="start from moonshotai/Kimi-K3 as published, or from an unquantized copy",
            expected=expected,
            found=weights,
        )


# --- what becomes of each module


def expected_tensors(
    tensors: Iterable[TensorInfo], recipe: Recipe, source_format: SourceFormat
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a recipe makes of a source's tensors: dtype and shape of every output tensor by name."""
    by_module: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        by_module[tensor.module].append(tensor)
    return {
        name: (dtype, shape)
        for module, held in by_module.items()
        for name, dtype, shape in _plan_module(module, held, recipe, source_format)[1].outputs
    }


class _Unit(NamedTuple):
    """A module's tensors: never split over jobs. Outputs are (name, dtype, shape)."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    bytes_out: int
    memory_bytes: int
    transient_bytes: int


def _plan_module(
    name: str, held: list[TensorInfo], recipe: Recipe, source_format: SourceFormat
) -> tuple[ModulePlan, _Unit, list[Problem]]:
    parameters = {tensor.parameter: tensor for tensor in held}
    packed, weight = parameters.get("weight_packed"), parameters.get("weight")
    rule = recipe.rule_for(name)
    problems: list[Problem] = []
    if packed is not None or (source_format == "mxfp4" and _orphan_scale(parameters, rule is not None)):
        shape, found = _pair_shape(name, parameters)
        problems += found
        if rule is not None and packed is not None:
            problems.append(
                Problem(
                    code="ignores-packed",
                    subject=rule.pattern,
                    message=f"it keeps {name} as it is, which would stay MXFP4 under a config of FP8",
                    fix=f"drop or narrow the ignore rule {rule.name!r}",
                )
            )
        quantized, why = rule is None and shape is not None, "MXFP4 weight"
        consumed = {"weight_packed", "weight_scale"}
    else:
        quantized = weight is not None and rule is None and not name.endswith("norm")
        shape, why, consumed = weight.shape if weight else None, "weight", {"weight"}
    scale_dtype = weight.dtype if weight else _DTYPE_NAMES[recipe.dequantize_dtype]
    if quantized and shape is not None:
        problems += _matrix_problems(name, shape, weight)
        quantized = len(shape) == 2 or not problems
    if not quantized:
        why = rule.name if rule else "norm" if name.endswith("norm") else "no weight"
        consumed = set()
    outputs = [(t.name, t.dtype, t.shape) for t in held if t.parameter not in consumed]
    if quantized and shape is not None and len(shape) == 2:
        blocks = (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
        outputs += [
            (f"{name}.weight", "F8_E4M3", shape),
            (f"{name}.weight_scale", scale_dtype, blocks),
        ]
    problems += [
        Problem(
            code="name-collision",
            subject=output,
            message="the source already has a tensor of this name, which the output needs for itself",
            fix="use the model's own shards",
        )
        for output, count in Counter(output[0] for output in outputs).items()
        if count > 1
    ]
    problems += [
        Problem(
            code="unknown-dtype",
            subject=tensor.name,
            message=f"its dtype {tensor.dtype!r} is not one that safetensors 0.8 defines",
            fix="update this library, or leave the tensor out of the checkpoint",
        )
        for tensor in held
        if tensor.dtype not in DTYPE_BITS
    ]
    bytes_in = sum(tensor.nbytes for tensor in held)
    bytes_out = sum(DTYPE_BITS.get(dtype, 8) * prod(size) // 8 for _, dtype, size in outputs)
    elements = prod(shape) if shape is not None else 0
    rest = sum(prod(t.shape) for t in held if t.parameter not in ("weight", "weight_packed", "weight_scale"))
    width = DTYPE_BITS[_DTYPE_NAMES[recipe.dequantize_dtype]] // 8
    alive = bytes_in + (bytes_out + (elements * width if packed else 0) if quantized else 0)
    module = ModulePlan(name, module_class(name), quantized, why, elements + rest, bytes_in, bytes_out)
    transient = elements * TRANSIENT_BYTES if quantized else 0
    return module, _Unit(tuple(held), tuple(outputs), bytes_out, alive, transient), problems


def _orphan_scale(parameters: Mapping[str, TensorInfo], ignored: bool) -> bool:
    """A weight_scale with no weight of any kind beside it, in a module that is not ignored."""
    return "weight_scale" in parameters and "weight" not in parameters and not ignored


def _pair_shape(
    name: str, parameters: Mapping[str, TensorInfo]
) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """The logical shape [out, in] of an MXFP4 pair, or what is wrong with it."""
    packed, scale = parameters.get("weight_packed"), parameters.get("weight_scale")
    if packed is None or scale is None:
        have, lack = (
            ("weight_scale", "weight_packed") if packed is None else ("weight_packed", "weight_scale")
        )
        return None, [
            Problem(
                code="pair-incomplete",
                subject=f"{name}.{have}",
                message=f"its partner {name}.{lack} is in no shard",
                fix="download the shards again from one revision; an MXFP4 weight needs both",
            )
        ]
    right = (
        packed.dtype == scale.dtype == "U8"
        and len(packed.shape) == len(scale.shape) == 2
        and packed.shape[0] == scale.shape[0]
        and 2 * packed.shape[1] == MXFP4_GROUP * scale.shape[1]
    )
    if right:
        return (packed.shape[0], 2 * packed.shape[1]), []
    unsupported = {packed.dtype, scale.dtype} - {"U8"}
    return None, [
        Problem(
            code="unsupported-dtype" if unsupported else "pair-shape",
            subject=f"{name}.weight_packed",
            message=f"{packed.dtype} {list(packed.shape)} and its scale {scale.dtype} "
            f"{list(scale.shape)} are no MXFP4 pair: U8 [out, in / 2] and U8 [out, in / 32]",
            fix="download the shards again, or see whether the model has changed its format",
        )
    ]


def _matrix_problems(name: str, shape: tuple[int, ...], weight: TensorInfo | None) -> Iterator[Problem]:
    subject = weight.name if weight else f"{name}.weight_packed"
    keep = f"add an ignore rule for it, e.g. {name!r}"
    if weight is not None and weight.dtype not in QUANTIZABLE:
        yield Problem(
            code="unsupported-dtype",
            subject=subject,
            message=f"it would be quantized, but {weight.dtype} is none of {', '.join(QUANTIZABLE)}",
            fix=keep,
        )
    if len(shape) != 2:
        yield Problem(
            code="not-a-matrix",
            subject=subject,
            message=f"it would be quantized, but its shape {list(shape)} is not [out, in]",
            fix=keep,
        )
    elif any(size % block for size, block in zip(shape, BLOCK, strict=True)):
        yield Problem(
            code="not-block-multiple",
            subject=subject,
            message=f"its shape {list(shape)} is not a multiple of the block {list(BLOCK)}",
            fix=keep,
        )


# --- what the recipe means for this checkpoint


def _rule_problems(
    checkpoint: Checkpoint, recipe: Recipe, modules: Sequence[ModulePlan]
) -> Iterator[Problem]:
    names = [module.name for module in modules]
    if modules and not any(module.quantized for module in modules):
        yield Problem(
            code="nothing-to-quantize",
            subject="ignore",
            message="every module is kept as it is, so there is nothing to do",
            fix="drop some ignore rules",
        )
    for rule in recipe.ignore:
        if names and not any(rule.matches(name) for name in names):
            yield Problem(
                code="ignore-unmatched",
                subject=rule.pattern,
                message=f"the ignore rule {rule.name!r} matches no module; the nearest is {_nearest(rule.pattern, names)}",
                fix=f"mend the pattern, or drop the rule: recipe.without_rule({rule.name!r})",
            )
    yield from _source_ignore_problems(checkpoint, modules)
    never = re.compile("|".join(f"(?:{kind.pattern})" for kind in ALWAYS_UNQUANTIZED))
    for module in modules:
        if module.quantized and never.match(module.name):
            kind = next(k for k in ALWAYS_UNQUANTIZED if re.match(k.pattern, module.name))
            yield Problem(
                code="must-stay-unquantized",
                subject=module.name,
                message=f"the recipe would quantize it, but {kind.reason} ({kind.source})",
                fix="put the ignore rule back, or accept=['must-stay-unquantized'] if you mean it",
            )
    yield from _fused_problems(modules)


def _source_ignore_problems(checkpoint: Checkpoint, modules: Sequence[ModulePlan]) -> Iterator[Problem]:
    """The dequantizer leaves alone what the source's own config ignores."""
    config = next(iter(checkpoint.quantization_configs().values()), {})
    ignored = config.get("ignore") if isinstance(config, dict) else None
    packed = [module.name for module in modules if module.rule == "MXFP4 weight"]
    for pattern in ignored or []:
        regex = re.compile(pattern[3:] if pattern.startswith("re:") else re.escape(pattern) + r"\Z")
        if hit := next((name for name in packed if regex.match(name)), None):
            yield Problem(
                code="ignores-packed",
                subject=pattern,
                message=f"the source's own quantization_config ignores {hit}, which is packed all the same",
                fix="use the model's own config.json",
            )


def _fused_problems(modules: Sequence[ModulePlan]) -> Iterator[Problem]:
    families: dict[str, dict[str, ModulePlan]] = defaultdict(dict)
    for module in modules:
        parent, _, last = module.name.rpartition(".")
        families[parent][last] = module
    for parent, children in families.items():
        for group in FUSED_GROUPS:
            members = [children[last] for last in group.members if last in children]
            if len({member.quantized for member in members}) > 1 and re.search(group.where, parent):
                kept = [m.name.rpartition(".")[2] for m in members if not m.quantized]
                yield Problem(
                    code="fused-group-split",
                    subject=f"{parent}.{{{','.join(m.name.rpartition('.')[2] for m in members)}}}",
                    message=f"only {', '.join(kept)} would be kept, but {group.source}",
                    fix="ignore all of the group or none of it",
                )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    kinds = {re.sub(r"\d+", "0", name): name for name in reversed(names)}
    text = re.sub(r"\\.|[^\w.]|^re:", "", pattern.replace(r"\.", ".")).strip(".")
    parts = {part: name for kind, name in kinds.items() for part in (kind, *kind.split("."))}
    close = difflib.get_close_matches(text, [*parts], n=1, cutoff=0.0)
    return parts[close[0]] if close else names[0]


def _accepted(problems: Sequence[Problem], recipe: Recipe) -> tuple[Problem, ...]:
    return tuple(
        problem.model_copy(update={"severity": "note"}) if problem.code in recipe.accept else problem
        for problem in problems
    )


# --- the jobs, the place, the memory


def _bytes_per_output_byte(recipe: Recipe) -> float:
    """Memory of a job for each byte of its output: packed source, dequantized weight, FP8 weight."""
    return 0.6 + DTYPE_BITS[_DTYPE_NAMES[recipe.dequantize_dtype]] / 8 + 1.0


def _cut_jobs(units: Sequence[_Unit], job_bytes: int) -> Iterator[Job]:
    cuts: list[list[_Unit]] = []
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
