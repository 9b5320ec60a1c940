"""The command line: every command is one call of the Python API, with the same names and defaults.

People read tables and sentences, machines ask for --json. Whatever a user can cause ends in a few
lines on stderr and one of the exit codes that each --help lists.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, ValidationError

from kimi_k3_fp8 import api, model_card, planning, serving, synthetic, validation
from kimi_k3_fp8.assembly import RECORD_NAME
from kimi_k3_fp8.errors import KimiK3FP8Error, Problem, ProblemsError, RecipeError, errors_in
from kimi_k3_fp8.fidelity import Verify
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.model_card import CardDetails
from kimi_k3_fp8.planning import Engine, Plan
from kimi_k3_fp8.recipe import BlockScales, Recipe
from kimi_k3_fp8.serving import Layout, ServeOptions
from kimi_k3_fp8.validation import Level, Report

if TYPE_CHECKING:
    from rich.console import Console

_EXIT_CODES = """\b
Exit codes: 0 fine, 1 problems found, 2 wrong use, 130 interrupted (Ctrl-C).
An interrupted or failed conversion is continued by the same command."""

_REAL_MODEL = """
For the real model, 1.56 TB of MXFP4 that become 2.82 TB of FP8:
    kimi-k3-fp8 plan moonshotai/Kimi-K3
    kimi-k3-fp8 quantize moonshotai/Kimi-K3
    kimi-k3-fp8 validate Kimi-K3-FP8-BLOCK
    kimi-k3-fp8 serve Kimi-K3-FP8-BLOCK"""

#: Every option by its name in the Python API: its type, what to call its value, and its meaning.
_OPTIONS: dict[str, tuple[Any, str | None, str]] = {
    "source": (str, "SOURCE", "The folder of a Kimi-K3 checkpoint, or its id on the Hugging Face Hub."),
    "checkpoint": (str, "CHECKPOINT", "The folder of a converted checkpoint, or its id on the Hub."),
    "save_directory": (
        str,
        "SAVE_DIRECTORY",
        "Where the result appears. By default SOURCE + -FP8-BLOCK, here.",
    ),
    "recipe": (Path, "FILE", "A recipe in YAML or JSON, which the next five options change."),
    "block_scales": (BlockScales, None, "power_of_two keeps MXFP4 weights exactly; amax is as published."),
    "dequantize_dtype": (Literal["bfloat16", "float16", "float32"], None, "What MXFP4 weights pass through."),
    "ignore": (list[str], "PATTERN", "Keep these modules, and no others; may be repeated."),
    "accept": (list[str], "CODE", "Overlook problems of this code; may be repeated."),
    "without_rule": (list[str], "NAME", "Drop the ignore rule of this name; may be repeated."),
    "revision": (str, "REVISION", "Branch, tag or commit on the Hub."),
    "max_shard_size": (str, "SIZE", "The most bytes in an output shard, as 500MB."),
    "devices": (str, "NAMES", "As cuda:0,cuda:1. [default: every accelerator, else cpu]"),
    "workers": (int, "NUMBER", "Processes. [default: as many as devices, cores and memory allow]"),
    "engine": (Engine, None, "transcode makes the same bytes by table, much faster, on the CPU."),
    "level": (Level, None, "What is compared: the config; tensors' names and shapes too; values too."),
    "verify": (Verify, None, "Whose values are compared with the source's: 1 module in 64, or all."),
    "keep_source": (bool, None, "Keep what is downloaded in the cache of the Hub."),
    "prefetch": (int, "NUMBER", "The most source shards on disk at a time, or ahead in the cache."),
    "card": (bool, None, "Write a model card."),
    "overwrite": (bool, None, "Replace what is at SAVE_DIRECTORY."),
    "progress": (bool, None, "Show progress, in a terminal."),
    "as_json": (bool, None, "Print JSON, and nothing else on stdout."),
    "output": (Path, "DIR", "Keep everything in this folder. [default: keep nothing]"),
    "tensor_parallel_size": (int, "NUMBER", "GPUs that share each layer."),
    "pipeline_parallel_size": (int, "NUMBER", "Groups of such GPUs that share the layers."),
    "expert_parallel": (bool, None, "Whole routed experts on each GPU, not slices."),
    "nodes": (int, "NUMBER", "Machines."),
    "gpus": (int, "NUMBER", "GPUs in all, where no layout is given."),
    "gpu_memory": (str, "SIZE", "Memory of one GPU, as 141GB; else it is not looked at."),
    "form": (Literal["docker", "vllm"], None, "docker run, or plain vllm serve."),
    "model": (str, "MODEL", "Hub id or absolute path to serve. [default: the checkpoint's]"),
    "image": (str, "IMAGE", "Of docker."),
    "port": (int, "PORT", "Of the server."),
    "interface": (str, "NAME", "Network interface between nodes. [default: $IFACE_NAME]"),
    "master_address": (str, "ADDRESS", "Of node 0. [default: $HEAD_IP]"),
    "gpu_memory_utilization": (float, "FRACTION", "Share of a GPU's memory that vLLM may use."),
    "write": (bool, None, "Write it into the checkpoint's folder, as README.md."),
    "name": (str, "NAME", "Of the result, best as a Hub id. [default: its folder's]"),
    "base_model": (str, "MODEL", "Hub id of what it was made from."),
    "developers": (str, "NAME", "[default: the owner in the Hub id]"),
}
#: The Python API's advice, as it is written on a command line.
_IN_FLAGS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"\brecipe\.without_rule\('([^']*)'\)", lambda found: f"--without-rule {shlex.quote(found[1])}"),
    (r"\b(accept|level)=\[?'([\w-]+)'\]?", lambda found: f"--{found[1]} {found[2]}"),
    (r"\b(overwrite=True|source=\.\.\.)", lambda found: f"--{found[1].partition('=')[0]}"),
    (r"\bmax_shard_size\b", lambda found: "--max-shard-size"),
)

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
    kind, metavar, meaning = _OPTIONS[name]
    spelled = [f"--{name.removeprefix('as_').replace('_', '-')}"] if default is False else []
    positional = default is inspect.Parameter.empty or name == "save_directory"
    declare = typer.Argument if positional else functools.partial(typer.Option, *spelled)
    declared = declare(metavar=metavar, help=meaning)
    annotation = Annotated[kind | None if default is None else kind, declared]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's parameters as options, with their defaults."""
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "executor":
            options[name] = parameter.default
        if name == "recipe":
            options |= _fields(Recipe) | {"without_rule": None}
    return options


def _fields(model: type[BaseModel]) -> dict[str, None]:
    return dict.fromkeys(name for name in model.model_fields if name in _OPTIONS)


def _given(model: type[BaseModel], options: dict[str, Any]) -> dict[str, Any]:
    """Take those options out that are fields of a model; return what was given for them."""
    taken = {name: options.pop(name) for name in _fields(model)}
    return {name: value for name, value in taken.items() if value not in (None, [])}


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the arguments of the function they are of."""
    changes, dropped, file = _given(Recipe, options), options.pop("without_rule"), options.pop("recipe")
    recipe = Recipe.from_file(file) if file else Recipe() if changes or dropped else None
    try:
        if recipe is not None:
            recipe = Recipe.model_validate(recipe.model_dump() | changes).without_rule(*dropped or ())
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
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@_command(output=None)
def demo(output: Path | None) -> bool:
    """Convert and validate a tiny Kimi-K3, in a minute."""
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kimi-k3-fp8-")))
        source, result = folder / "Kimi-K3", folder / "Kimi-K3-FP8-BLOCK"
        _show("Writing a tiny Kimi-K3: the real names, dtypes and nesting, random values.")
        synthetic.write_checkpoint(source)
        _show("Planning its conversion:\n")
        _present(planning.plan(source, save_directory=result), False)
        _show("\nConverting it, with LLM Compressor in processes of their own.")
        api.quantize(source, result, progress=False)
        _show("Validating the result, down to every value:\n")
        report = validation.validate(result, source=source, level="values")
        _present(report, False)
    _show(f"\nAll of it is in {folder}." if output else "\nNothing was kept; demo --output DIR keeps it.")
    _show(_REAL_MODEL)
    return report.ok


@_command(**_of(planning.plan), as_json=False)
def plan(as_json: bool, **options: Any) -> bool:
    """Say what quantize would do, and all that stands in its way.

    Reads headers and this machine's free memory and disk; creates nothing. The recipe is the published
    one unless options change it.
    """
    return _present(planning.plan(**_arguments(options)), as_json)


@_command(**_of(api.quantize), as_json=False)
def quantize(as_json: bool, progress: bool, **options: Any) -> bool:
    """Make an FP8_BLOCK checkpoint of a Kimi-K3 checkpoint.

    The recipe is the published one unless options change it. Nothing is at SAVE_DIRECTORY until all of
    it is there.
    """
    return _present(api.quantize(**_arguments(options), progress=progress and sys.stderr.isatty()), as_json)


@_command(**_of(validation.validate), as_json=False)
def validate(as_json: bool, **options: Any) -> bool:
    """Compare a converted checkpoint with what a recipe promises.

    The recipe is the checkpoint's own record, or else the published one. Creates nothing.
    """
    return _present(validation.validate(**_arguments(options)), as_json)


@_command(
    checkpoint=inspect.Parameter.empty,
    tensor_parallel_size=None,
    pipeline_parallel_size=1,
    nodes=2,
    expert_parallel=False,
    gpus=16,
    gpu_memory=None,
    **_fields(ServeOptions),
)
def serve(checkpoint: str, gpus: int, gpu_memory: str | None, **options: Any) -> bool:
    """Print the command that serves a checkpoint with vLLM, for each node.

    Without --tensor-parallel-size, say which layouts of so many GPUs load.
    """
    wanted = ServeOptions(**_given(ServeOptions, options))
    if options["tensor_parallel_size"] is not None:
        served = serving.serve_commands(checkpoint, Layout(**options), wanted, gpu_memory=gpu_memory)
        print(served)
        return not served.problems
    fraction = wanted.gpu_memory_utilization
    found = serving.layouts(
        checkpoint, gpus, options["nodes"], gpu_memory=gpu_memory, memory_fraction=fraction
    )
    faults = [", ".join(problem.subject for problem in row.problems) for row in found]
    loads = [f"no: {fault}" if fault else "yes" for fault in faults]
    rows = [
        (str(row.layout), gigabytes(row.weight_bytes), text) for row, text in zip(found, loads, strict=True)
    ]
    _show_table(("layout", "weights a GPU", "loads"), rows)
    return any(not row.problems for row in found)


class _Record(BaseModel):
    """What a card needs of kimi_k3_fp8.json."""

    validation: dict[str, Any]


@_command(checkpoint=inspect.Parameter.empty, write=False, **_fields(CardDetails))
def card(checkpoint: str, write: bool, **options: Any) -> bool:
    """Print the model card of a converted checkpoint, or write it."""
    details, record = CardDetails(**_given(CardDetails, options)), Path(checkpoint, RECORD_NAME)
    found = _Record.model_validate_json(record.read_bytes()).validation if record.is_file() else None
    report = Report.model_validate({"checkpoint": checkpoint} | found) if found else None
    if write:
        _show(f"wrote {model_card.write_card(checkpoint, report=report, details=details)}")
    else:
        print(model_card.model_card(checkpoint, report=report, details=details))
    return True


# --- what is shown


def _console(stderr: bool = False) -> Console:
    from rich.console import Console  # --help and --json do without

    return Console(stderr=stderr, markup=False, highlight=False)


def _show(text: str, *, stderr: bool = False) -> None:
    """Print text as wide as the terminal, or 80 columns where there is none. Long words stay whole;
    control characters are written as their codes, for a tensor may have any name."""
    from rich.text import Text

    console = _console(stderr)
    for line in text.split("\n"):
        safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        indent = " " * (len(safe) - len(safe.lstrip())) or "  "
        wrap = textwrap.TextWrapper(console.width, subsequent_indent=indent, break_on_hyphens=False)
        wrap.break_long_words = False
        shown = Text(wrap.fill(safe))
        shown.highlight_regex(r"^error\b|\b[\d,]+ problems?$", "bold red")
        shown.highlight_regex(r"^note\b", "yellow")
        shown.highlight_regex(r"(^|: )ok\b", "green")
        console.print(shown, soft_wrap=True)


def _show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; the last one is wrapped where there is no room."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for number, heading in enumerate(headings, 1):
        last = number == len(headings)
        flush = not last and all(row[number - 1][:1].isdigit() for row in rows)
        table.add_column(heading, justify="right" if flush else "left", no_wrap=not last)
    for row in rows:
        table.add_row(*map(Text, row))
    _console().print(table)


def _present(found: Plan | Report, as_json: bool) -> bool:
    """Print a plan or a report; return whether it is without errors."""
    if as_json:
        data = found.to_dict() if isinstance(found, Plan) else found.model_dump(mode="json")
        print(json.dumps({"ok": found.ok, **data}, indent=1))
        return found.ok
    if isinstance(found, Plan):
        _show(str(found).partition("\n\n")[0] + "\n")
        _show_table(found.HEADINGS, found.rows())
        errors = len(errors_in(found.problems))
        verdict = f"{errors} problem{'s' * (errors > 1)}" if errors else "ok, nothing stands in the way"
        _show("\n".join(["", *map(_told, found.problems), verdict]))
    else:
        _show("\n".join([str(found).partition("\n")[0], *map(_told, found.problems)]))
        if found.fidelity:
            rows = [(record.module_class, record.verdict) for record in found.fidelity]
            _show_table(("class", "values, against the source's"), rows)
    return found.ok


def _fail(error: Exception, as_json: bool) -> None:
    """Say on stderr what is wrong, and on stdout too for a machine."""
    problems = error.problems if isinstance(error, ProblemsError) else ()
    if as_json:
        listed = [problem.model_dump(mode="json") for problem in problems]
        data = {"ok": False, "error": type(error).__name__, "message": str(error), "problems": listed}
        print(json.dumps(data, indent=1))
    lines = [f"error: {_in_flags(str(error))}"]
    if isinstance(error, ProblemsError):
        lines = [f"{error.headline}:", *map(_told, errors_in(problems))]
    elif isinstance(error, ValidationError):
        wrong = [([".".join(map(str, e["loc"])).replace("_", "-")], e["msg"]) for e in error.errors()]
        lines = [
            ": ".join(["error", *filter(None, name), msg.removeprefix("Value error, ")])
            for name, msg in wrong
        ]
    _show("\n".join(lines), stderr=True)


def _told(problem: Problem) -> str:
    text = f"{problem.severity} [{problem.code}] {problem.subject}\n    {problem.message}"
    return f"{text}\n    fix: {_in_flags(problem.fix)}" if problem.fix else text


def _in_flags(text: str) -> str:
    for pattern, flag in _IN_FLAGS:
        text = re.sub(pattern, flag, text)
    return text
