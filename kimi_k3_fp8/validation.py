"""Validation: is a checkpoint what its recipe promises? The answer is a Report.

Works on any FP8_BLOCK Kimi-K3 checkpoint, whoever made it. Nothing is raised for a bad checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from kimi_k3_fp8 import errors
from kimi_k3_fp8.architecture import infer_dimensions, tensors
from kimi_k3_fp8.assembly import RECORD_NAME
from kimi_k3_fp8.checkpoint import Checkpoint, TensorInfo, find_source, read_checkpoint
from kimi_k3_fp8.decisions import expected_tensors
from kimi_k3_fp8.errors import Problem, errors_in, note, shortened
from kimi_k3_fp8.fidelity import Fidelity, Verify, fidelity_problems, measure, sampled
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.recipe import Recipe
from kimi_k3_fp8.tables import compact, html_table, text_table

Level = Literal["config", "tensors", "values"]

#: Dtype and shape of each tensor by its name.
_Tensors = dict[str, tuple[str, tuple[int, ...]]]

#: Keys of compressed-tensors' config that say how it was made, not how it is to be read.
_ONLY_NOTED = frozenset({"version", "observer", "observer_kwargs", "global_compression_ratio"})


class Report(BaseModel):
    """What validation found in a checkpoint. Sizes are bytes.

    `jobs_run` and `jobs_kept` say, after `quantize`, how many jobs ran and how many an earlier call
    had finished.
    """

    model_config = ConfigDict(frozen=True)

    checkpoint: str
    level: Level
    tensors: int
    quantized_modules: int
    nbytes: int
    problems: tuple[Problem, ...]
    fidelity: tuple[Fidelity, ...] = ()
    jobs_run: int | None = None
    jobs_kept: int | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error; notes do not count."""
        return not errors_in(self.problems)

    def raise_for_problems(self) -> None:
        """Raise ValidationError with every finding, if there is an error among them."""
        if not self.ok:
            raise errors.ValidationError(self.problems)

    def _headline(self) -> str:
        found = len(errors_in(self.problems))
        verdict = "ok" if self.ok else f"{found} problem{'s' * (found > 1)}"
        return (
            f"{self.checkpoint}: {verdict} (level {self.level}; {self.tensors:,} tensors, "
            f"{self.quantized_modules:,} modules in FP8, {gigabytes(self.nbytes)})"
        )

    _HEADINGS: ClassVar = ("class", "compared", "elements", "differ", "rel. RMS error", "largest", "verdict")

    def _fidelity_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                record.module_class,
                f"{record.modules:,} of {record.of_modules:,}",
                compact(record.elements),
                compact(record.differing),
                f"{record.relative_rms_error:.2%}",
                f"{record.largest_error:.2g}",
                "exact" if record.exact else "sampled" if record.modules < record.of_modules else "",
            )
            for record in self.fidelity
        ]

    def __str__(self) -> str:
        lines = [self._headline(), *map(str, self.problems)]
        if self.fidelity:
            lines += ["", text_table(self._HEADINGS, self._fidelity_rows())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(p.severity, p.code, p.subject, p.message, p.fix) for p in self.problems]
        table = html_table(("", "code", "subject", "found", "what to do"), rows) if rows else ""
        values = html_table(self._HEADINGS, self._fidelity_rows()) if self.fidelity else ""
        return f"<p>{self._headline()}</p>{table}{values}"


def validate(
    checkpoint: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    revision: str | None = None,
    source: str | os.PathLike[str] | Checkpoint | None = None,
    level: Level = "tensors",
    verify: Verify = "full",
) -> Report:
    """Compare a finished checkpoint with what a recipe promises.

    checkpoint: its folder, or its id on the Hugging Face Hub, of which `revision` names a commit.

    recipe: by default the one the checkpoint's own kimi_k3_fp8.json names, else the published one.
    source: the checkpoint it was made from; without it, the modules a Kimi-K3 of these dimensions
        must have are taken from the architecture.
    level: "config" compares the saved quantization_config with the expected one; "tensors" every
        tensor's name, dtype and shape besides, the index, and the files' lengths, from headers alone.
        "values" dequantizes both sides besides and compares them; it needs the source.
    verify: at level "values", whether all quantized modules are compared or a "sampled" 1 in 64.
    Raises SourceError where there is no such checkpoint, ValueError for a level that cannot be.
    """
    if level not in get_args(Level):
        raise ValueError(f"level is one of {', '.join(get_args(Level))}, not {level!r}")
    if level == "values" and source is None:
        raise ValueError("level='values' compares with the source: say source=...")
    found = read_checkpoint(find_source(checkpoint, revision))
    recipe = recipe or recorded_recipe(found) or Recipe()
    problems = [problem for problem in found.problems if problem.severity == "error"]
    problems += check_config(found, recipe)
    fidelity: tuple[Fidelity, ...] = ()
    if level != "config":
        base = (
            source
            if source is None or isinstance(source, Checkpoint)
            else read_checkpoint(find_source(source))
        )
        expected = _expected(found, recipe, base)
        problems += check_tensors(found, expected)
        problems += _check_files(found, base)
        if level == "values" and base is not None:
            fidelity = _compare_values(found, base, expected, verify)
            problems += fidelity_problems(fidelity)
    return Report(
        checkpoint=str(checkpoint),
        level=level,
        tensors=len(found.tensors),
        quantized_modules=sum(t.dtype == "F8_E4M3" for t in found.tensors.values()),
        nbytes=found.nbytes,
        problems=shortened(problems),
        fidelity=fidelity,
    )


def _compare_values(
    found: Checkpoint, source: Checkpoint, expected: _Tensors, verify: Verify
) -> tuple[Fidelity, ...]:
    names = [n.removesuffix(".weight") for n, (dtype, _) in expected.items() if dtype == "F8_E4M3"]
    inputs, outputs = source.tensors.values(), found.tensors.values()
    return measure(source.files, inputs, found.files, outputs, sampled(names, verify))


def recorded_recipe(checkpoint: Checkpoint) -> Recipe | None:
    """The recipe in a checkpoint's kimi_k3_fp8.json, if it has one that can be read."""
    if RECORD_NAME not in checkpoint.side_files:
        return None
    try:
        return Recipe.model_validate(json.loads(checkpoint.files.read(RECORD_NAME))["recipe"])
    except (ValueError, ValidationError, KeyError, TypeError):
        return None


# --- config.json


def check_config(checkpoint: Checkpoint, recipe: Recipe) -> Iterator[Problem]:
    """The saved quantization_config against the expected one, by meaning, on the raw JSON."""
    configs = checkpoint.quantization_configs()
    found = configs.pop("quantization_config", None)
    for path in configs:
        yield Problem(
            code="config-leftover",
            subject=f"config.json: {path}",
            message="it contradicts or repeats the quantization_config at top level, and text-only "
            "loaders read it first",
            fix=f"remove {path} from config.json",
        )
    if not isinstance(found, dict):
        yield Problem(
            code="config-missing",
            subject="config.json: quantization_config",
            message="there is none at top level, so loaders would take the weights as unquantized",
            fix="write Recipe.expected_quantization_config() there",
        )
        return
    expected = dict(recipe.expected_quantization_config())
    found = dict(found)
    groups = (expected.pop("config_groups"), found.pop("config_groups", None))
    ignores = (expected.pop("ignore"), found.pop("ignore", None))
    yield from _compare("quantization_config", expected, found)
    yield from _compare_groups(*groups)
    yield from _compare_ignores(*ignores)


def _compare(path: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Problem]:
    for key in dict.fromkeys((*expected, *found)):
        want, have = expected.get(key), found.get(key)
        if want == have or (not want and not have and want is not False and have is not False):
            continue  # equal, or both say nothing: null, {} and an absent key mean the same
        if isinstance(want, dict) and isinstance(have, dict):
            yield from _compare(f"{path}.{key}", want, have)
        elif key in _ONLY_NOTED or (key == "format" and have is None):
            yield note("config-differs", f"{path}.{key}", "loaders do not mind", expected=want, found=have)
        else:
            yield _mismatch(f"{path}.{key}", want, have)


def _mismatch(path: str, expected: Any, found: Any) -> Problem:
    return Problem(
        code="config-mismatch",
        subject=f"config.json: {path}",
        message=f"expected {expected!r}, found {found!r}",
        fix="write Recipe.expected_quantization_config() there, or validate with the recipe it was made by",
        expected=expected,
        found=found,
    )


def _compare_groups(expected: Mapping[str, Any], found: Any) -> Iterator[Problem]:
    path = "quantization_config.config_groups"
    ((name, scheme),) = expected.items()
    if (
        not isinstance(found, dict)
        or len(found) != 1
        or not all(isinstance(scheme, dict) for scheme in found.values())
    ):
        yield _mismatch(path, dict(expected), found)
        return
    ((other, have),) = found.items()
    if other != name:
        yield note("config-differs", path, "the group's name is free", expected=name, found=other)
    yield from _compare(f"{path}.{other}", scheme, have)


def _compare_ignores(expected: list[str], found: Any) -> Iterator[Problem]:
    path = "quantization_config.ignore"
    if not isinstance(found, list) or set(map(str, found)) != set(expected):
        yield _mismatch(path, expected, found)
    elif found != expected:
        yield note("config-differs", path, "the order is free", expected=expected, found=found)


# --- tensors and files


def check_tensors(checkpoint: Checkpoint, expected: _Tensors) -> Iterator[Problem]:
    """Every tensor's name, dtype and shape against what the recipe makes of the source's modules."""
    have = checkpoint.tensors
    unreadable = {p.subject for p in checkpoint.problems if p.code.startswith("shard-")}
    for name, (dtype, shape) in expected.items():
        tensor = have.get(name)
        if tensor is None:
            if not unreadable:
                packed = f"{name.rpartition('.')[0]}.weight_packed"
                yield (
                    _packed_left(packed)
                    if packed in have
                    else Problem(
                        code="tensor-missing",
                        subject=name,
                        message=f"{dtype} {list(shape)} must be there, and is in no shard",
                        fix="convert again, or download the shards again",
                        expected=[dtype, list(shape)],
                    )
                )
        elif tensor.dtype != dtype:
            yield _wrong("tensor-dtype", tensor, dtype, tensor.dtype)
        elif tensor.shape != shape:
            yield _wrong("tensor-shape", tensor, list(shape), list(tensor.shape))
    for name, tensor in have.items():
        if name not in expected and tensor.parameter != "weight_packed":
            yield Problem(
                code="tensor-unexpected",
                subject=name,
                message=f"{tensor.dtype} {list(tensor.shape)} in {tensor.shard} has no place here",
                fix="convert again, or validate with the recipe it was made by",
            )


def _packed_left(name: str) -> Problem:
    return Problem(
        code="packed-left",
        subject=name,
        message="it is still MXFP4, which the quantization_config does not describe",
        fix="convert again; every MXFP4 weight must become FP8",
    )


def _wrong(code: str, tensor: TensorInfo, expected: Any, found: Any) -> Problem:
    return Problem(
        code=code,
        subject=tensor.name,
        message=f"expected {expected}, found {found} in {tensor.shard}",
        fix="convert again, or validate with the recipe it was made by",
        expected=expected,
        found=found,
    )


def _expected(checkpoint: Checkpoint, recipe: Recipe, source: Checkpoint | None) -> _Tensors:
    if source is not None:
        kind: Any = "mxfp4" if source.quantization_configs() else "plain"
        return expected_tensors(source.tensors.values(), recipe, kind)
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors.values()}
    config = checkpoint.config.get("text_config")
    layers = config.get("num_hidden_layers") if isinstance(config, Mapping) else None
    dimensions = infer_dimensions(shapes, layers=layers)
    specs = (TensorInfo(s.name, s.dtype, s.shape, "", 0, s.nbytes) for s in tensors(dimensions))
    return expected_tensors(specs, recipe, "mxfp4")


def _check_files(checkpoint: Checkpoint, source: Checkpoint | None) -> Iterator[Problem]:
    total = checkpoint.nbytes
    complete = not errors_in(checkpoint.problems)
    if checkpoint.index_name and complete and checkpoint.total_size != total:
        yield Problem(
            code="total-size",
            subject=checkpoint.index_name,
            message=f"total_size is {checkpoint.total_size}, the tensors have {total} bytes",
            fix=f"write {total} there",
            expected=total,
            found=checkpoint.total_size,
        )
    for shard in checkpoint.shards.values():
        if shard.metadata.get("format") != "pt":
            yield note(
                "metadata-format",
                shard.name,
                "its header has no 'format: pt', which older transformers insist on",
            )
    have = {*checkpoint.side_files}
    needed = dict.fromkeys(_code_files(checkpoint), "auto_map names it")
    if source is not None:
        needed |= dict.fromkeys(source.side_files, "the source has it")
    for name, reason in needed.items():
        if name not in have:
            yield Problem(
                code="file-missing",
                subject=name,
                message=f"{reason}, and it is not there",
                fix="copy it from the source",
            )


def _code_files(checkpoint: Checkpoint) -> Iterator[str]:
    """Python files that the auto_map of config.json and of the tokenizer's config name."""
    configs: list[Any] = [checkpoint.config]
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        if name in checkpoint.side_files:
            try:
                configs.append(json.loads(checkpoint.files.read(name)))
            except ValueError:
                configs.append({})
    for config in configs:
        auto_map = config.get("auto_map") if isinstance(config, Mapping) else None
        for entry in auto_map.values() if isinstance(auto_map, Mapping) else ():
            for reference in entry if isinstance(entry, list) else [entry]:
                if isinstance(reference, str) and "--" not in reference:
                    yield reference.rpartition(".")[0].replace(".", "/") + ".py"
