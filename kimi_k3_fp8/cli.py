"""The command line: every command is one call of the Python API, with the same names and defaults.

People read tables and sentences, machines ask for --json. Whatever a user can cause ends in a few
lines on stderr and one of the exit codes that each --help lists.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from kimi_k3_fp8 import api, model_card, planning, serving, synthetic, validation
from kimi_k3_fp8.errors import KimiK3FP8Error, Problem, ProblemsError, RecipeError, errors_in
from kimi_k3_fp8.fidelity import Verify
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.planning import Engine, Plan
from kimi_k3_fp8.recipe import BlockScales, Recipe
from kimi_k3_fp8.validation import Level, Report

_EXIT_CODES = """\b
Exit codes: 0 fine, 1 problems were found, 2 wrong use, 130 interrupted (Ctrl-C).
A conversion that was interrupted or failed is continued by the same command."""

_REAL_MODEL = """
For the real model, 1.56 TB of MXFP4 that become 2.82 TB of FP8:
    kimi-k3-fp8 plan moonshotai/Kimi-K3
    kimi-k3-fp8 quantize moonshotai/Kimi-K3
    kimi-k3-fp8 validate Kimi-K3-FP8-BLOCK
    kimi-k3-fp8 serve Kimi-K3-FP8-BLOCK"""

#: Type and meaning of every option, by its name in the Python API.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "source": (str, "The folder of a checkpoint, or its id on the Hugging Face Hub."),
    "checkpoint": (str, "The folder of a finished checkpoint, or its id on the Hugging Face Hub."),
    "save_directory": (str, "Where the result appears, whole, at the end. [default: SOURCE-FP8-BLOCK, here]"),
    "recipe": (Path, "A YAML or JSON file, which the next five options change. [default: the published one]"),
    "block_scales": (BlockScales, "power_of_two keeps MXFP4 weights exactly. [default: amax]"),
    "dequantize_dtype": (Literal["bfloat16", "float16", "float32"], "What MXFP4 weights pass through."),
    "ignore": (list[str], "Modules to keep: a name, or re: and a pattern. Repeat it; replaces the list."),
    "without_rule": (list[str], "Drop the ignore rule of this name. Repeat it for more."),
    "accept": (list[str], "Overlook problems of this code. Repeat it for more."),
    "revision": (str, "Branch, tag or commit on the Hub."),
    "max_shard_size": (str, "Of an output shard, as 5GB or 500MB."),
    "devices": (str, "As cuda:0,cuda:1 or cpu. [default: every accelerator, or else the CPU]"),
    "workers": (int, "Processes. [default: what devices, or cores and memory, allow]"),
    "engine": (Engine, "transcode makes the same bytes of MXFP4 weights by table, much faster, on the CPU."),
    "level": (Level, "Compare the config alone, tensors' names and shapes too, or their values too."),
    "verify": (Verify, "How many modules are compared with the source's values: 1 in 64, or all."),
    "keep_source": (bool, "Keep downloaded shards in the cache of the Hugging Face Hub."),
    "prefetch": (int, "Source shards that are on disk at a time, where they are not kept."),
    "card": (bool, "Write a model card."),
    "overwrite": (bool, "Replace what is at SAVE_DIRECTORY."),
    "progress": (bool, "Show progress, in a terminal."),
    "as_json": (bool, "Print JSON, and nothing else on stdout."),
    "output": (Path, "Keep everything in this folder. [default: keep nothing]"),
}

_RECIPE_FIELDS = ("block_scales", "dequantize_dtype", "ignore", "accept")

#: How the advice of the Python API is written on a command line.
_IN_FLAGS = {
    r"recipe\.without_rule\(('[^']*')\)": r"--without-rule \1",
    r"accept=\['([\w-]+)'\]": r"--accept \1",
    r"\boverwrite=True": "--overwrite",
    r"\bmax_shard_size\b": "--max-shard-size",
}

app = typer.Typer(
    help="Kimi-K3 in FP8: plan, convert, prove and serve, on top of LLM Compressor.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # "[128, 128]" is no markup
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command that sys.argv holds, and exit."""
    app()


def _command(**defaults: Any) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Make a command, with these options, of a function that returns whether all is well."""

    def decorate(function: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(function)
        def run(**options: Any) -> None:
            try:
                code = 0 if function(**options) else 1
            except KeyboardInterrupt:
                kept = "; finished jobs are kept, and the same command continues"
                _show("interrupted" + kept * (function.__name__ == "quantize"), stderr=True)
                code = 130
            except BrokenPipeError:
                raise  # whoever read the output has seen enough
            except (KimiK3FP8Error, OSError, ValueError) as error:
                _fail(error, options.get("as_json", False))
                code = 2 if isinstance(error, (RecipeError, ValueError)) else 1
            raise typer.Exit(code)

        parameters = [_parameter(name, default) for name, default in defaults.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(epilog=_EXIT_CODES)(run)
        return function

    return decorate


def _parameter(name: str, default: Any) -> inspect.Parameter:
    kind, meaning = _OPTIONS[name]
    positional = default is inspect.Parameter.empty or name == "save_directory"
    spelled = ("--json",) if name == "as_json" else ()
    declared = typer.Argument(help=meaning) if positional else typer.Option(*spelled, help=meaning)
    annotation = Annotated[kind | None if default is None else kind, declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's parameters as options, with their defaults."""
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "executor":
            options[name] = parameter.default
        if name == "recipe":
            options |= dict.fromkeys((*_RECIPE_FIELDS, "without_rule"))
    return options


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the arguments of that function."""
    file, dropped = options.pop("recipe"), options.pop("without_rule")
    changes = {name: value for name in _RECIPE_FIELDS if (value := options.pop(name))}
    recipe = Recipe.from_file(file) if file else Recipe() if changes or dropped else None
    if recipe is not None:
        recipe = Recipe.model_validate(recipe.model_dump() | changes)
        try:
            recipe = recipe.without_rule(*dropped or ())
        except KeyError as error:
            raise ValueError(error.args[0]) from None
    if (devices := options.get("devices")) is not None:
        options["devices"] = devices.split(",")
    return options | {"recipe": recipe}


# --- the commands


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("kimi-k3-fp8"))
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None: ...


@_command(output=None)
def demo(output: Path | None) -> bool:
    """Convert a tiny synthetic Kimi-K3, validate it, and say how to convert the real one."""
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kimi-k3-fp8-")))
        source, result = folder / "Kimi-K3", folder / "Kimi-K3-FP8-BLOCK"
        _show("Writing a tiny Kimi-K3: the real names, dtypes and nesting, random values.")
        synthetic.write_checkpoint(source)
        _show("Planning its conversion:\n")
        _show_plan(planning.plan(source, save_directory=result))
        _show("\nConverting it, with LLM Compressor in processes of their own.")
        api.quantize(source, result, progress=False)
        _show("Validating the result, down to every value:\n")
        report = validation.validate(result, source=source, level="values")
        _show_report(report)
    _show(f"\nAll of it is in {folder}." if output else "\nNothing was kept; demo --output DIR keeps it.")
    _show(_REAL_MODEL)
    return report.ok


@_command(**_of(planning.plan), as_json=False)
def plan(as_json: bool, **options: Any) -> bool:
    """Say what quantize would do, and all that stands in its way. Creates nothing."""
    found = planning.plan(**_arguments(options))
    if as_json:
        _print_json(ok=found.ok, **found.to_dict())
    else:
        _show_plan(found)
    return found.ok


@_command(**_of(api.quantize), as_json=False)
def quantize(as_json: bool, progress: bool, **options: Any) -> bool:
    """Make an FP8_BLOCK checkpoint. Killed or failed, the same command continues."""
    report = api.quantize(**_arguments(options), progress=progress and sys.stderr.isatty())
    return _present(report, as_json)


@_command(**_of(validation.validate), as_json=False)
def validate(as_json: bool, **options: Any) -> bool:
    """Compare a finished checkpoint with what a recipe, by default its own, promises. Creates nothing."""
    return _present(validation.validate(**_arguments(options)), as_json)


# --- what is shown


def _show(text: str, *, stderr: bool = False) -> None:
    """Print text as wide as the terminal, or 80 columns where there is none. Long words stay whole;
    control characters are written as their codes, for a tensor may have any name."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=stderr)
    for line in text.split("\n"):
        safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        indent = " " * (len(safe) - len(safe.lstrip())) or "  "
        lines = textwrap.wrap(
            safe, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        shown = Text("\n".join(lines))
        shown.highlight_regex(r"^error\b|^\d+ problems?\b|: \d+ problems?\b", "bold red")
        shown.highlight_regex(r"^note\b", "yellow")
        shown.highlight_regex(r"(^|: )ok\b", "green")
        console.print(shown, soft_wrap=True)


def _show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; the last one is wrapped where there is no room."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, heading in enumerate(headings, 1):
        digits = all(row[number - 1][:1].isdigit() for row in rows)
        table.add_column(heading, justify="right" if digits else "left", no_wrap=number < len(headings))
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _show_plan(found: Plan) -> None:
    facts, _, _ = str(found).partition("\n\n")
    _show(f"{facts}\n")
    _show_table(found._HEADINGS, found._rows())
    errors = len(errors_in(found.problems))
    verdict = f"{errors} problem{'s' * (errors > 1)}" if errors else "ok, nothing stands in the way"
    _show("\n".join(["", *map(_told, found.problems), verdict]))


def _present(report: Report, as_json: bool) -> bool:
    if as_json:
        _print_json(ok=report.ok, **report.model_dump(mode="json"))
    else:
        _show_report(report)
    return report.ok


def _show_report(report: Report) -> None:
    _show("\n".join([str(report).partition("\n")[0], *map(_told, report.problems)]))
    if report.fidelity:
        rows = [(f.module_class, f"{f.modules:,} of {f.of_modules:,}", f.verdict) for f in report.fidelity]
        _show_table(("class", "compared", "values, against the source's"), rows)


def _print_json(**data: Any) -> None:
    print(json.dumps(data, indent=1))


def _fail(error: Exception, as_json: bool) -> None:
    problems = error.problems if isinstance(error, ProblemsError) else ()
    if as_json:
        listed = [problem.model_dump(mode="json") for problem in problems]
        _print_json(ok=False, error=type(error).__name__, message=str(error), problems=listed)
    lines = [f"error: {_in_flags(str(error))}"]
    if isinstance(error, ProblemsError):
        lines = [f"{error.headline}:", *map(_told, errors_in(problems))]
    elif isinstance(error, ValidationError):
        found = [
            (e["loc"][0] if e["loc"] else "", e["msg"].removeprefix("Value error, ")) for e in error.errors()
        ]
        lines = [f"error: --{str(name).replace('_', '-')}: {message}" for name, message in found]
    _show("\n".join(lines), stderr=True)


def _told(problem: Problem) -> str:
    text = f"{problem.severity} [{problem.code}] {problem.subject}\n    {problem.message}"
    return f"{text}\n    fix: {_in_flags(problem.fix)}" if problem.fix else text


def _in_flags(text: str) -> str:
    return functools.reduce(lambda text, flag: re.sub(*flag, text), _IN_FLAGS.items(), text)
