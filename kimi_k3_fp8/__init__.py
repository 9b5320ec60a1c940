"""Kimi-K3 in FP8, on top of LLM Compressor: plan, convert, prove and serve.

    from kimi_k3_fp8 import quantize

    report = quantize("moonshotai/Kimi-K3")

Importing this loads neither torch nor llmcompressor; the work imports them where it runs.
"""

from kimi_k3_fp8.api import quantize
from kimi_k3_fp8.errors import (
    EngineError,
    JobError,
    KimiK3FP8Error,
    PlanError,
    Problem,
    ProblemsError,
    RecipeError,
    ResumeError,
    RunError,
    RunLockedError,
    SourceError,
    ValidationError,
)
from kimi_k3_fp8.fidelity import Fidelity
from kimi_k3_fp8.planning import Plan, plan
from kimi_k3_fp8.recipe import IgnoreRule, Recipe
from kimi_k3_fp8.serving import Layout, ServeOptions, check_layout, layouts, serve_commands
from kimi_k3_fp8.validation import Report, validate

__all__ = [
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
