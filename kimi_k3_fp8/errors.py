"""Findings are data (`Problem`); exceptions happen only at the edges.

    KimiK3FP8Error
    ├── RecipeError        a recipe file that cannot be read or does not hold a recipe
    ├── SourceError        a source that cannot be reached at all (no folder, no repository, no network)
    ├── ProblemsError      something was looked at and found wanting; `.problems` says what
    │   ├── PlanError          before any work: nothing was created
    │   └── ValidationError    after the work: the checkpoint is not what the recipe promises
    └── RunError           a run that cannot go on; finished work is kept, the same call continues
        ├── RunLockedError     another process is writing the same output
        ├── ResumeError        what is staged was made from something else
        ├── EngineError        an engine cannot make what the plan asks for; `.subject` says of what
        └── JobError           one job failed; `.job` and `.subject` say which and on what

A wrong argument to a constructor (`Recipe(ignore="lm_head")`) is pydantic's own ValidationError, a
ValueError, as for every pydantic model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

Severity = Literal["error", "note"]

#: Every code a Problem can carry, and what it means. Codes are stable: match on them.
CODES: dict[str, str] = {
    # the source
    "no-safetensors": "the source holds no safetensors weights",
    "config-unreadable": "config.json is missing or not a JSON object",
    "index-unreadable": "the safetensors index is missing where it is needed, or not readable",
    "index-mismatch": "the index and the shards disagree on which tensors there are",
    "shard-missing": "the index names a shard that is not there",
    "shard-truncated": "a shard is shorter or longer than its own header says",
    "shard-unreadable": "a shard's header cannot be understood",
    "unsafe-name": "a file name leads out of the checkpoint's folder",
    "unknown-dtype": "a dtype this library does not know",
    "unsupported-dtype": "a tensor to quantize has a dtype that cannot be quantized",
    "pair-incomplete": "an MXFP4 weight without its scale, or a scale without its weight",
    "pair-shape": "an MXFP4 weight and its scale whose shapes or dtypes do not belong together",
    "not-kimi-k3": "the source is not a Kimi-K3 checkpoint",
    "source-quantization": "the source is quantized in a way this library does not convert",
    "conflicting-configs": "config.json holds several quantization configs that disagree",
    "left-out": "a file of the source that will not be part of the output",
    # the recipe, against this source
    "ignore-unmatched": "an ignore rule that matches nothing in the checkpoint",
    "ignores-packed": "an ignore rule that would leave MXFP4 weights packed",
    "must-stay-unquantized": "a module that is served unquantized would become FP8",
    "fused-group-split": "modules that are fused at load would be quantized only in part",
    "not-block-multiple": "a weight to quantize whose shape is not a multiple of the block",
    "not-a-matrix": "a weight to quantize that is not two-dimensional",
    "name-collision": "two output tensors would have the same name",
    "nothing-to-quantize": "no module would be quantized",
    "tensor-exceeds-shard": "one module alone is larger than the largest shard asked for",
    # the place and the machine
    "output-exists": "the output path exists and is not empty",
    "output-overlaps": "the output path and the source overlap",
    "disk-too-small": "the disk has less free space than the run needs",
    "prefetch-too-small": "fewer source shards may be on disk than one job reads",
    "memory-too-small": "no worker fits into the memory there is",
    # a finished checkpoint
    "config-missing": "config.json holds no quantization_config at its top level",
    "config-mismatch": "the saved quantization_config contradicts the expected one",
    "config-leftover": "a second quantization config lies beside the real one",
    "config-differs": "a difference in the saved quantization_config that changes nothing",
    "tensor-missing": "a tensor that must be there is not",
    "tensor-unexpected": "a tensor that has no place in this checkpoint",
    "tensor-dtype": "a tensor has another dtype than it must have",
    "tensor-shape": "a tensor has another shape than it must have",
    "packed-left": "an MXFP4 weight was left packed",
    "total-size": "the index's total_size is not the sum of the tensors' bytes",
    "metadata-format": "a shard's header lacks the format metadata that loaders look for",
    "file-missing": "a file that config.json's auto_map or the tokenizer needs is not there",
    # the run
    "resumed": "the run continues an earlier one",
    # serving
    "layout-does-not-load": "a parallel layout that vLLM refuses for this checkpoint",
    "layout-silently-wrong": "a parallel layout that vLLM loads with wrong weights, without an error",
    "layout-too-large": "a parallel layout that puts more weights on a GPU than it has memory for",
    # values
    "non-finite": "NaN or infinite values in what was or would be quantized",
    "values-differ": "stored values are farther from the source's than the recipe allows",
}


class Problem(BaseModel):
    """One finding: what, where, and how to mend it.

    `subject` is the tensor, file, pattern or config path it is about. `expected` and `found` are
    filled where two values were compared. A "note" never stops anything.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    subject: str
    message: str
    fix: str = ""
    severity: Severity = "error"
    expected: Any = None
    found: Any = None

    @field_validator("code")
    @classmethod
    def _known(cls, code: str) -> str:
        if code not in CODES:
            raise ValueError(f"unknown problem code {code!r}")
        return code

    def __str__(self) -> str:
        text = f"{self.severity} [{self.code}] {self.subject}: {self.message}"
        return f"{text}\n    {self.fix}" if self.fix else text


def note(code: str, subject: str, message: str, **more: Any) -> Problem:
    """A Problem that informs and stops nothing."""
    return Problem(code=code, subject=subject, message=message, severity="note", **more)


def errors_in(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple(problem for problem in problems if problem.severity == "error")


def shortened(problems: Iterable[Problem], most: int = 10) -> tuple[Problem, ...]:
    """At most `most` Problems of each code; the last one says how many more there are."""
    kept: dict[str, list[Problem]] = {}
    counts: dict[str, int] = {}
    for problem in problems:
        counts[problem.code] = counts.get(problem.code, 0) + 1
        if counts[problem.code] <= most:
            kept.setdefault(problem.code, []).append(problem)
    for code, shown in kept.items():
        if counts[code] > most:
            more = f"{shown[-1].message} (and {counts[code] - most:,} more like this)"
            shown[-1] = shown[-1].model_copy(update={"message": more})
    return tuple(problem for shown in kept.values() for problem in shown)


class KimiK3FP8Error(Exception):
    """The root of this library's exceptions."""


class RecipeError(KimiK3FP8Error):
    """A recipe file that cannot be read or does not hold a recipe."""


class SourceError(KimiK3FP8Error):
    """A source that cannot be reached."""


class ProblemsError(KimiK3FP8Error):
    """Something was looked at and found wanting. `problems` holds every finding, notes included."""

    headline = "problems were found"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        errors = errors_in(self.problems)
        lines = [f"{self.headline} ({len(errors)}):", *(str(problem) for problem in errors)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class PlanError(ProblemsError):
    """The plan found problems. Nothing was created."""

    headline = "this cannot work as it stands, and nothing was created"


class ValidationError(ProblemsError):
    """A checkpoint is not what its recipe promises."""

    headline = "the checkpoint is not what the recipe promises"


class RunError(KimiK3FP8Error):
    """A run that cannot go on. What is finished is kept; the same call continues."""


class RunLockedError(RunError):
    """Another process is writing the same output."""


class ResumeError(RunError):
    """What is staged was made from something else; `differences` says what."""

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.differences)


class EngineError(RunError):
    """An engine cannot make what the plan asks for. `subject` is the tensor or file it is about."""

    def __init__(self, subject: str, message: str, fix: str = "") -> None:
        self.subject, self.message, self.fix = subject, message, fix
        super().__init__(f"{subject}: {message}" + (f"\n    {fix}" if fix else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.subject, self.message, self.fix)


class JobError(RunError):
    """One job failed. `job` is its number, `subject` the tensor or file it failed on."""

    def __init__(self, job: int, subject: str, message: str, fix: str = "") -> None:
        self.job, self.subject, self.message, self.fix = job, subject, message, fix
        text = f"job {job} failed on {subject}: {message}"
        super().__init__(f"{text}\n    {fix}" if fix else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job, self.subject, self.message, self.fix)
