"""The command line: the Python API's names, exit codes, few lines for each failure, Ctrl-C."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Inline, edit_json, read_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kimi_k3_fp8 import Problem, Recipe, Report, api, errors, model_card, planning, serving, validation
from kimi_k3_fp8.cli import app, main
from kimi_k3_fp8.errors import CODES, KimiK3FP8Error, ProblemsError
from kimi_k3_fp8.staging import Staging

COMMANDS = ["demo", "plan", "quantize", "validate", "serve", "card"]
#: Where each command's function of the Python API is looked up, and the least arguments it takes.
API = {
    "plan": (planning, "plan", ["Kimi-K3"]),
    "quantize": (api, "quantize", ["Kimi-K3"]),
    "validate": (validation, "validate", ["Kimi-K3"]),
    "serve": (serving, "layouts", ["Kimi-K3"]),
    "card": (model_card, "model_card", ["Kimi-K3"]),
}
SIGNATURES = {command: inspect.signature(getattr(*API[command][:2])) for command in API}
MODULE = [sys.executable, "-m", "kimi_k3_fp8"]


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """80 columns, whatever the tests run in, and a working folder where nothing is."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def run(*arguments: str | Path, **environment: str) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def instead(monkeypatch: pytest.MonkeyPatch, command: str, outcome: Any) -> dict[str, Any]:
    """Put in place of a command's function one that raises or returns this; collect its arguments."""
    module, name, _ = API[command]
    called: dict[str, Any] = {}

    def function(*positional: Any, **named: Any) -> Any:
        called.update(SIGNATURES[command].bind(*positional, **named).arguments)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(module, name, function)
    return called


def report(*problems: Problem) -> Report:
    return Report(
        checkpoint="Kimi-K3", level="tensors", tensors=1, quantized_modules=1, nbytes=1, problems=problems
    )


# --- help


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    for code in ("0 fine", "1 problems found", "2 wrong use", "130 interrupted"):
        assert code in result.stdout
    if not command:
        assert [name for name in COMMANDS if f"\n  {name} " in result.stdout] == COMMANDS


@pytest.mark.parametrize("command", ["plan", "quantize", "validate"])
def test_every_parameter_of_the_api_is_an_option_with_its_default(command: str) -> None:
    text = re.sub(r"\s+", " ", run(command, "--help").stdout)
    for parameter in SIGNATURES[command].parameters.values():
        if parameter.name == "executor":
            assert "executor" not in text
        elif parameter.name in ("source", "checkpoint", "save_directory") and parameter.kind != (
            parameter.KEYWORD_ONLY
        ):
            assert parameter.name.upper() in text
        elif parameter.name != "save_directory":
            option = f"--{parameter.name.replace('_', '-')}"
            assert option in text
            if isinstance(parameter.default, (str, int)) and not isinstance(parameter.default, bool):
                described = text[text.index(f"{option} ") :]
                assert f"[default: {parameter.default}]" in described[: described.find(" --", 3)]
    for field in set(Recipe.model_fields) - {"scheme"}:
        assert f"--{field.replace('_', '-')}" in text


def test_version_and_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    monkeypatch.setattr(sys, "argv", ["kimi-k3-fp8", "--version"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip() == version("kimi-k3-fp8")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["plan", "TINY"], ["validate", "TINY"]]
)
def test_neither_help_nor_plan_imports_torch(arguments: list[str], tiny: Path) -> None:
    code = (
        "import sys\nfrom kimi_k3_fp8.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'llmcompressor', 'compressed_tensors', 'transformers'} & set(sys.modules)\n"
        "print('imported', sorted(heavy))"
    )
    words = [str(tiny) if word == "TINY" else word for word in arguments]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported []"


# --- options become arguments


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (
            "plan",
            "Kimi-K3 out --revision main --max-shard-size 1MB --devices cuda:0,cuda:1 --workers 3 "
            "--engine transcode --no-keep-source --prefetch 2 --overwrite --block-scales power_of_two "
            "--dequantize-dtype float32 --ignore lm_head --ignore re:.*[ab]$ --accept not-kimi-k3",
            {
                "source": "Kimi-K3",
                "save_directory": "out",
                "revision": "main",
                "max_shard_size": "1MB",
                "devices": ["cuda:0", "cuda:1"],
                "workers": 3,
                "engine": "transcode",
                "keep_source": False,
                "prefetch": 2,
                "overwrite": True,
                "recipe": Recipe(
                    ignore=["lm_head", "re:.*[ab]$"],
                    block_scales="power_of_two",
                    dequantize_dtype="float32",
                    accept=["not-kimi-k3"],
                ),
            },
        ),
        (
            "quantize",
            "Kimi-K3 out --verify full --no-card",
            {
                "source": "Kimi-K3",
                "save_directory": "out",
                "verify": "full",
                "card": False,
                "progress": False,
            },
        ),
        (
            "validate",
            "out --source Kimi-K3 --revision main --level config --verify sampled",
            {
                "checkpoint": "out",
                "source": "Kimi-K3",
                "revision": "main",
                "level": "config",
                "verify": "sampled",
            },
        ),
    ],
    ids=["plan", "quantize", "validate"],
)
def test_options_become_arguments(
    command: str, words: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead(monkeypatch, command, errors.SourceError("enough"))
    run(command, *words.split())
    parameters = SIGNATURES[command].parameters
    assert {n: value for n, value in called.items() if value != parameters[n].default} == expected


@pytest.mark.parametrize("command", ["plan", "quantize", "validate"])
def test_without_options_the_defaults_of_the_api_hold(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = SIGNATURES[command].parameters
    called = instead(monkeypatch, command, errors.SourceError("enough"))
    run(command, *API[command][2])
    for option, value in called.items():
        if parameters[option].default is not inspect.Parameter.empty and option != "progress":
            assert value == parameters[option].default, option
    assert called.get("progress", False) is False  # there is no terminal


def test_every_choice_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is on by default can be turned off, and the other way round."""
    parameters = SIGNATURES["quantize"].parameters
    flags = [p for p in parameters.values() if isinstance(p.default, bool) and p.name != "progress"]
    assert {"overwrite", "card"} <= {flag.name for flag in flags}
    for flag in flags:
        called = instead(monkeypatch, "quantize", errors.SourceError("enough"))
        run("quantize", "Kimi-K3", f"--{'no-' * flag.default}{flag.name.replace('_', '-')}")
        assert called[flag.name] is not flag.default


def test_recipe_from_a_file_changed_by_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = Recipe(dequantize_dtype="float16").without_rule("projector").save(tmp_path / "recipe.yaml")
    called = instead(monkeypatch, "plan", errors.SourceError("enough"))
    run("plan", "Kimi-K3", "--recipe", kept)
    assert called["recipe"] == Recipe.from_file(kept)
    run("plan", "Kimi-K3", "--recipe", kept, "--without-rule", "head", "--block-scales", "power_of_two")
    assert called["recipe"] == Recipe(
        ignore=[rule for rule in Recipe().ignore if rule.name not in ("projector", "head")],
        dequantize_dtype="float16",
        block_scales="power_of_two",
    )


# --- what goes wrong


def exceptions() -> Iterator[tuple[Exception, int]]:
    """One of each class of this library's exceptions, and what else a user can cause, with exit codes."""
    problem = Problem(code="pair-shape", subject="re:.*[abc]", message="[/x] it is", fix="[bold]mend it")
    special: dict[type, tuple[Any, ...]] = {
        errors.JobError: (3, "x.weight", "it broke [/x]", "mend re:.*[abc]"),
        errors.EngineError: ("x.weight", "it broke [/x]", "mend re:.*[abc]"),
        errors.ResumeError: ("it was begun with [red]", ("a", "b")),
    }
    classes: list[type[KimiK3FP8Error]] = [KimiK3FP8Error]
    for kind in classes:
        classes += kind.__subclasses__()
        arguments = ([problem],) if issubclass(kind, ProblemsError) else ("[/x] re:.*[abc]",)
        yield kind(*special.get(kind, arguments)), 2 if issubclass(kind, errors.RecipeError) else 1
    yield ValueError("5XB [/x] is not a size"), 2
    yield PermissionError(13, "Permission denied", "[/x]"), 1
    try:
        Recipe(ignore="lm_head")  # type: ignore[arg-type]
    except ValueError as error:
        yield error, 2


@pytest.mark.parametrize("command", API)
@pytest.mark.parametrize(("error", "code"), [*exceptions()], ids=lambda value: type(value).__name__)
def test_exceptions(command: str, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, command, error)
    result = run(command, *API[command][2])
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert 1 <= len(result.stderr.splitlines()) <= 6
    if isinstance(error, ProblemsError):
        said = [str(value) for p in error.problems for value in (p.code, p.subject, p.message, p.fix)]
    else:
        said = re.findall(r"\[/x\]|re:\.\*\[abc\]|\[red\]|job 3|Permission denied|lm_head", str(error))
    assert said
    for words in said:
        assert words in result.stderr


def test_every_exception_was_met() -> None:
    met = {type(error) for error, _ in exceptions()}
    assert {
        kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, KimiK3FP8Error)
    } <= met


@pytest.mark.parametrize("severity", ["error", "note"])
@pytest.mark.parametrize("code", CODES)
def test_problems(code: str, severity: errors.Severity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised or listed, a problem is a few lines that say code, subject, what and how to mend it."""
    problem = Problem(
        code=code, subject="re:.*[abc]", message="it is [/x] and so on", fix="[bold]mend", severity=severity
    )
    listed = instead(monkeypatch, "validate", report(problem))
    result = run("validate", "Kimi-K3")
    assert listed
    assert result.exit_code == (1 if severity == "error" else 0)
    lines = result.stdout.splitlines()
    assert lines[1:] == [
        f"{severity} [{code}] re:.*[abc]",
        "    it is [/x] and so on",
        "    fix: [bold]mend",
    ]
    instead(monkeypatch, "quantize", errors.PlanError([problem]))
    result = run("quantize", "Kimi-K3")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1:] == (lines[1:] if severity == "error" else [])


def test_real_problems_speak_of_flags(tiny: Path) -> None:
    """The Python API's advice is written as it is typed here."""
    result = run("plan", tiny, tiny / "out", "--max-shard-size", "1", "--ignore", "re:.*lm_heed")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "--without-rule 're:.*lm_heed'" in text
    assert "--accept must-stay-unquantized" in text
    assert "=" not in "".join(re.findall(r"fix:[^\[]*", text))
    result = run("validate", tiny, "--level", "values")
    assert result.exit_code == 2
    assert "--level values" in result.stderr
    assert "--source" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Usage"),
        (["plna"], 2, "plan"),
        (["plan"], 2, "SOURCE"),
        (["plan", "TINY", "--nonsense"], 2, "--nonsense"),
        (["plan", "nowhere"], 1, "nowhere"),
        (["plan", "TINY", "--max-shard-size", "5XB"], 2, "5XB"),
        (["plan", "TINY", "--max-shard-size", "0"], 2, "'0' is not a size"),
        (["plan", "TINY", "--devices", "cuda:99"], 2, "cuda:99"),
        (["plan", "TINY", "--workers", "0"], 2, "at least 1"),
        (["plan", "TINY", "--workers", "many"], 2, "--workers"),
        (["plan", "TINY", "--engine", "steam"], 2, "steam"),
        (["plan", "TINY", "--accept", "everything"], 2, "error: accept"),
        (["plan", "TINY", "--ignore", "re:*[/x]"], 2, "'re:*[/x]' is not a regular expression"),
        (["plan", "TINY", "--without-rule", "tail"], 2, "no ignore rule named 'tail'"),
        (["plan", "TINY", "--recipe", "absent.yaml"], 2, "absent.yaml"),
        (["quantize", "TINY", "TINY"], 1, "output-overlaps"),
        (["validate", "nowhere"], 1, "nowhere"),
        (["serve", "TINY", "--tensor-parallel-size", "0"], 2, "at least 1"),
        (["serve", "TINY", "--tensor-parallel-size", "8", "--port", "99999"], 2, "error: port"),
        (["card", "nowhere"], 1, "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use(arguments: list[str], code: int, said: str, tiny: Path) -> None:
    result = run(*(tiny if word == "TINY" else word for word in arguments))
    assert result.exit_code == code
    assert said in result.output
    assert "Traceback" not in result.output


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, "quantize", KeyboardInterrupt())
    result = run("quantize", "Kimi-K3")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "the same command continues" in result.stderr
    instead(monkeypatch, "plan", KeyboardInterrupt())
    result = run("plan", "Kimi-K3")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


# --- for machines


def test_json(tiny: Path, converted: Path, output: Path) -> None:
    made = json.loads(run("plan", tiny, "--json").stdout)
    assert made.pop("ok") is True
    assert made["quantized_modules"] == len(planning.plan(tiny).quantized_modules)
    found = json.loads(run("validate", converted, "--json").stdout)
    assert found.pop("ok") is True
    assert Report.model_validate(found) == validation.validate(str(converted))
    edit_json(output / "config.json", lambda config: config.pop("quantization_config"))
    bad = run("validate", output, "--json")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["ok"] is False
    assert [problem["code"] for problem in json.loads(bad.stdout)["problems"]] == ["config-missing"]


def test_json_of_a_conversion_and_of_its_failure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "quantize", functools.partial(api.quantize, executor=Inline()))
    made = run("quantize", tiny, "--json")
    assert made.exit_code == 0, made.stderr
    found = json.loads(made.stdout)
    assert (found.pop("ok"), found["jobs_run"]) == (True, 1)
    assert Report.model_validate(found).checkpoint == str(Path("Kimi-K3-FP8-BLOCK").absolute())
    again = run("quantize", tiny, "--json")
    assert again.exit_code == 1
    said = json.loads(again.stdout)
    assert (said["ok"], said["error"]) == (False, "PlanError")
    assert [problem["code"] for problem in said["problems"]] == ["output-exists"]
    assert "--overwrite" in again.stderr
    nowhere = run("plan", "nowhere", "--json")
    assert json.loads(nowhere.stdout)["error"] == "SourceError"


# --- for people


def test_plan_and_validate_create_nothing(tiny: Path, converted: Path) -> None:
    before = [sorted(folder.rglob("*")) for folder in (tiny.parent, converted.parent, Path.cwd())]
    assert run("plan", tiny).exit_code == 0
    assert run("validate", converted, "--source", tiny, "--level", "values").exit_code == 0
    assert [sorted(folder.rglob("*")) for folder in (tiny.parent, converted.parent, Path.cwd())] == before


def test_the_plan_is_a_table_of_80_columns(tiny: Path) -> None:
    (Path.cwd() / "Kimi-K3").symlink_to(tiny)
    result = run(
        "plan", "Kimi-K3", "--ignore", "re:.*self_attn.*|.*lm_head|.*a_rule_with_a_name_of_its_own_length"
    )
    words_longer_than_a_line = [word for word in result.stdout.split() if len(word) > 70]
    for line in result.stdout.splitlines():
        assert len(line.rstrip()) <= 80 or any(word in line for word in words_longer_than_a_line), line
    made = planning.plan(tiny)
    result = run("plan", tiny)
    for kind in {module.module_class for module in made.modules}:
        assert re.search(rf"^{kind} +\d", result.stdout, re.MULTILINE)
    assert "\x1b" not in result.stdout


def test_colours_are_for_terminals(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("plan", tiny).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("plan", tiny, TERM="xterm").stdout
    assert "\x1b[" in coloured
    assert stable(re.sub(r"\x1b\[[\d;]*m", "", coloured)) == stable(plain)


def test_a_name_cannot_reach_the_terminal_as_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = Problem(code="pair-shape", subject="a\x1b[2J\x07\u202e\udcff", message="b\rc", fix="d\x9b")
    instead(monkeypatch, "validate", report(evil))
    assert run("validate", "x").stdout.splitlines()[1:] == [
        r"error [pair-shape] a\x1b[2J\x07\u202e\udcff",
        r"    b\rc",
        r"    fix: d\x9b",
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab[]/:.-* "), min_size=1, max_size=300), columns=st.integers(30, 200))
def test_text_is_wrapped_between_words(text: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, "plan", errors.SourceError(text))
    lines = run("plan", "x", COLUMNS=str(columns)).stderr.splitlines()
    assert " ".join(lines).split() == ["error:", *text.split()]
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)


def test_values_are_shown_in_words(tiny: Path, converted: Path) -> None:
    result = run("validate", converted, "--source", tiny, "--level", "values")
    found = validation.validate(converted, source=tiny, level="values").fidelity
    assert found
    for record in found:
        assert re.search(rf"^{record.module_class} +{re.escape(record.verdict)}", result.stdout, re.MULTILINE)


# --- serve and card


def test_serve_lists_layouts_and_prints_commands(converted: Path) -> None:
    result = run("serve", converted, "--gpus", "2", "--nodes", "1")
    rows = serving.layouts(converted, 2, 1)
    lines = result.stdout.splitlines()[1:]
    assert [line.split("  ")[0] for line in lines] == [str(row.layout) for row in rows]
    assert [line.rstrip().endswith("yes") for line in lines] == [not row.problems for row in rows]
    assert result.exit_code == (0 if any(not row.problems for row in rows) else 1)
    for row in rows:
        size, stages = row.layout.tensor_parallel_size, row.layout.pipeline_parallel_size
        flags = ["--expert-parallel"] * row.layout.expert_parallel
        result = run("serve", converted, "--tensor-parallel-size", str(size), "--pipeline-parallel-size",
                     str(stages), "--nodes", "1", "--form", "vllm", "--port", "9000", *flags)  # fmt: skip
        options = serving.ServeOptions(form="vllm", port=9000)
        assert result.stdout == f"{serving.serve_commands(converted, row.layout, options)}\n"
        assert result.exit_code == (1 if row.problems else 0)


def test_card(output: Path) -> None:
    printed = run("card", output, "--name", "you/Kimi-K3", "--developers", "You [x]")
    assert printed.exit_code == 0
    assert "# you/Kimi-K3" in printed.stdout
    recorded = json.loads((output / "kimi_k3_fp8.json").read_text())["validation"]["fidelity"]
    for record in recorded:
        assert f"| {record['module_class']} | {record['modules']:,} of" in printed.stdout
    written = run("card", output, "--name", "you/Kimi-K3", "--write")
    assert written.exit_code == 0
    assert str(output / "README.md") in "".join(written.stdout.split())
    assert "# you/Kimi-K3" in (output / "README.md").read_text()
    (output / "kimi_k3_fp8.json").write_text("[]")
    assert run("card", output).exit_code == 2


# --- whole processes


def test_piped_output_is_plain(tiny: Path) -> None:
    (Path.cwd() / "Kimi-K3").symlink_to(tiny)
    command = [*MODULE, "quantize", "Kimi-K3", "--engine", "transcode", "--verify", "off"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not re.search(r"[^\n -~]", done.stdout)


def test_a_reader_that_goes_away(tiny: Path) -> None:
    process = subprocess.Popen([*MODULE, "plan", tiny], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.mark.slow
def test_interrupted_and_continued_by_the_same_command(tiny: Path, converted: Path) -> None:
    command = [*MODULE, "quantize", str(tiny), "out", "--max-shard-size", "200kB"]
    staging = Staging.beside(Path("out").absolute())
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would this one if the tests are one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: any(staging.receipts()) and any(staging.scratch.iterdir()))
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "interrupted; finished jobs are kept, and the same command continues\n"
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert not Path("out").exists()
    kept = len(list(staging.receipts()))
    assert kept

    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["jobs_kept"] == kept
    assert read_tensors(Path("out")) == read_tensors(converted)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


@pytest.mark.slow
def test_demo_takes_less_than_a_minute() -> None:
    done = subprocess.run([*MODULE, "demo", "--output", "kept"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert validation.validate("kept/Kimi-K3-FP8-BLOCK", source="kept/Kimi-K3").ok
    for command in ("plan", "quantize", "validate", "serve"):
        assert f"    kimi-k3-fp8 {command} " in done.stdout
    again = run("demo", "--output", "kept")
    assert again.exit_code == 1
    assert "exists and is not an empty folder" in again.stderr


def test_demo_keeps_nothing_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(api, "quantize", functools.partial(api.quantize, executor=Inline()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    result = run("demo")
    assert result.exit_code == 0, result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_session_in_the_readme(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README shows is what comes out, but for what depends on the machine."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    session = "".join(re.findall(r"^```console\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    parts = re.split(r"^\$ kimi-k3-fp8 (.*)\n", session, flags=re.MULTILINE)
    commands = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert {command.split()[0] for command in commands} == {"plan", "quantize", "validate"}
    monkeypatch.setattr(api, "quantize", functools.partial(api.quantize, executor=Inline()))
    shutil.copytree(tiny, "Kimi-K3")
    for command, shown in commands.items():
        result = run(*command.split())
        assert result.exit_code == 0, result.output
        assert stable(result.stdout.replace(str(Path.cwd()), "/data")) == stable(shown)


def stable(text: str) -> list[str]:
    """The words, without the machine's cores, free memory and disk."""
    machine = r"^(workers|memory): .*\n(  .*\n)*"
    return re.sub(machine, "", text, flags=re.MULTILINE).split()
