"""The card: valid for the Hub and for a Markdown linter, and true of the checkpoint it is on."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Inline, read_tensors
from huggingface_hub import ModelCard, ModelCardData
from hypothesis import given, settings
from hypothesis import strategies as st
from pymarkdown.api import PyMarkdownApi

import kimi_k3_fp8
from kimi_k3_fp8 import Plan, Recipe, Report, plan, quantize, validate
from kimi_k3_fp8.architecture import Dimensions
from kimi_k3_fp8.fidelity import Fidelity
from kimi_k3_fp8.model_card import CARD_NAME, SOURCE_CARD_NAME, CardDetails, model_card, write_card
from kimi_k3_fp8.serving import Layout, ServeOptions, check_layout
from kimi_k3_fp8.synthetic import write_checkpoint

POWER_OF_TWO = Recipe(block_scales="power_of_two")
#: The tiny model is too narrow to be cut.
ONE_GPU = CardDetails(layout=Layout(1), released=datetime.date(2026, 7, 27))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan for the real model with few experts."""
    folder = tmp_path_factory.mktemp("real")
    source = write_checkpoint(folder / "Kimi-K3", "full", dimensions=Dimensions(experts=4))
    return plan(source, save_directory=folder / "Kimi-K3-FP8-BLOCK")


def blocks(card: ModelCard | str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", str(card), re.MULTILINE | re.DOTALL)


def section(card: ModelCard | str, title: str) -> str:
    return str(card).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def lint(path: Path) -> list[str]:
    linter = PyMarkdownApi().disable_rule_by_identifier("md013")  # tables and commands are long lines
    found = linter.enable_extension_by_identifier("front-matter").scan_path(str(path))
    assert not found.pragma_errors
    return [f"{f.line_number}: {f.rule_id} {f.rule_description}" for f in found.scan_failures]


def compared(*, differing: int, modules: int = 9, of_modules: int = 9) -> Report:
    record = Fidelity(
        module_class="routed experts",
        modules=modules,
        of_modules=of_modules,
        elements=12345,
        differing=differing,
        squared_error=float(differing),
        squared_value=100.0,
        largest_error=0.25 if differing else 0.0,
    )
    return Report(
        checkpoint="",
        level="tensors",
        tensors=0,
        quantized_modules=0,
        nbytes=0,
        problems=(),
        fidelity=(record,),
    )


# --- valid


@pytest.mark.parametrize("recipe", [Recipe(), POWER_OF_TWO], ids=lambda recipe: recipe.block_scales)
def test_hub_and_linter_accept_it(output: Path, recipe: Recipe) -> None:
    path = write_card(output, recipe=recipe, report=compared(differing=3), details=ONE_GPU)
    assert lint(path) == []
    card = ModelCard.load(path)
    assert card.data.to_dict() == yaml.safe_load(path.read_text().split("---\n")[1])
    assert ModelCardData(**card.data.to_dict()).to_yaml() == card.data.to_yaml()
    assert card.data.to_dict() == {
        "base_model": "moonshotai/Kimi-K3",
        "library_name": "compressed-tensors",
        "license": "other",
        "license_name": "kimi-k3",
        "pipeline_tag": "image-text-to-text",
        "tags": ["fp8", "vllm", "llm-compressor", "compressed-tensors", "conversational"],
    }


def test_the_linter_would_object(tmp_path: Path) -> None:
    (tmp_path / "bad.md").write_text("# One\n\n\n\n# Two\n")
    assert lint(tmp_path / "bad.md")


def test_the_card_of_the_published_recipe(real: Plan) -> None:
    card = model_card(real, details=CardDetails(name="RedHatAI/Kimi-K3-FP8-BLOCK", released=ONE_GPU.released))
    titles = re.findall(r"^## (.*)$", card.text, re.MULTILINE)
    expected = ["Model Overview", "Model Optimizations", "Deployment", "Creation", "Fidelity", "License"]
    assert titles == expected
    overview = section(card, "Model Overview")
    for statement in (
        "**Model Architecture:** KimiK3ForConditionalGeneration",
        "**Input:** Text / Image",
        "**Output:** Text",
        "**Weight quantization:** FP8",
        "**Activation quantization:** FP8",
        "**Release Date:** 2026-07-27",
        "**Version:** 1.0",
        "**Model Developers:** RedHatAI",
    ):
        assert f"- {statement}\n" in overview
    optimizations = section(card, "Model Optimizations")
    assert f"{len(real.quantized_modules):,} linear modules" in optimizations
    counts = {m.module_class: 0 for m in real.modules if m.quantized}
    for module in real.modules:
        counts[module.module_class] = counts.get(module.module_class, 0) + module.quantized
    for kind, count in counts.items():
        assert (f"| {kind} | {count:,} |" in optimizations) == (count > 0)
    for rule in real.recipe.ignore:
        assert f"- `{rule.pattern}`: " in optimizations
    assert "[LICENSE](LICENSE)" in section(card, "License")


def test_without_vision_there_is_no_image(tmp_path: Path) -> None:
    dimensions = Dimensions(layers=2, mla_layers=(1,), experts=1, vision_blocks=0)
    source = write_checkpoint(tmp_path / "K3", "full", dimensions=dimensions)
    recipe = Recipe().without_rule("vision tower", "projector")
    card = model_card(plan(source, recipe, save_directory=tmp_path / "out"))
    assert "  - **Input:** Text\n" in card.text


# --- true


def test_nothing_is_called_exact_unmeasured(converted: Path) -> None:
    for recipe in (Recipe(), POWER_OF_TWO):
        for report in (None, compared(differing=7), compared(differing=0, modules=3)):
            assert "exact" not in str(model_card(converted, recipe, report, ONE_GPU))
        measured = model_card(converted, recipe, compared(differing=0), ONE_GPU)
        assert "exact" in section(measured, "Fidelity")


def test_the_fidelity_table(converted: Path) -> None:
    report = compared(differing=1)
    (record,) = report.fidelity
    rows = re.findall(
        r"^\| (.*) \|$", section(model_card(converted, None, report, ONE_GPU), "Fidelity"), re.M
    )
    assert len(rows) == 3
    assert len({row.count(" | ") for row in rows}) == 1
    assert rows[2].split(" | ") == [
        "routed experts",
        "9 of 9",
        "12,345",
        "1",
        "10.000%",
        "0.25",
        record.verdict,
    ]
    assert "not compared" in section(model_card(converted, details=ONE_GPU), "Fidelity")


def test_scales_are_described_as_they_are(converted: Path) -> None:
    amax, power = (
        section(model_card(converted, recipe, details=ONE_GPU), "Model Optimizations")
        for recipe in (Recipe(), POWER_OF_TWO)
    )
    assert "is its largest magnitude / 448" in amax
    assert "rounds those weights once more" in amax
    assert "smallest power of two" in power
    assert "these do not change" in power


def test_the_recipe_is_the_recorded_one(converted: Path, tiny: Path, tmp_path: Path) -> None:
    assert "smallest power of two" not in model_card(converted, details=ONE_GPU).text
    work = plan(tiny, POWER_OF_TWO, save_directory=tmp_path / "out")
    assert "smallest power of two" in model_card(work, details=ONE_GPU).text


# --- commands that load


def test_the_commands_load(real: Plan) -> None:
    card = model_card(real, details=CardDetails(name="you/K3", layout=Layout(16, nodes=2)))
    commands = blocks(card, "bash")
    assert len(commands) == 2
    for text in commands:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        size = {int(n) for n in re.findall(r"--tensor-parallel-size (\d+)", text)}
        stages = {int(n) for n in re.findall(r"--pipeline-parallel-size (\d+)", text)}
        assert check_layout(real, Layout(*size, *stages, 2)) == ()
        assert [f"--node-rank {node}" in text for node in range(3)] == [True, True, False]
        assert "#" not in re.sub(r"^# node \d of \d$", "", text, flags=re.MULTILINE)
        assert " you/K3 " in text
    deployment = section(card, "Deployment")
    assert "`$IFACE_NAME`" in deployment
    assert "`$HEAD_IP`" in deployment
    assert "MODEL_DIR" not in deployment
    (row,) = re.findall(r"^\| TP 16 on 2 nodes \|.*$", deployment, re.MULTILINE)
    assert "no, dense mlp" in row
    assert "wrong weights" in row


def test_a_folder_that_is_not_on_the_hub(converted: Path) -> None:
    deployment = section(model_card(converted, details=ONE_GPU), "Deployment")
    assert "`$MODEL_DIR` is the absolute path of this folder" in deployment
    assert "-v $MODEL_DIR:$MODEL_DIR" in deployment
    assert str(converted) not in deployment
    options = ServeOptions(model="you/K3")
    deployment = section(model_card(converted, details=CardDetails(options=options)), "Deployment")
    assert "MODEL_DIR" not in deployment


# --- creation

PATTERN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(
    lambda t: "re:" + re.escape(t)
)


@given(
    ignore=st.lists(PATTERN, max_size=3, unique=True) | st.just(Recipe().ignore_patterns),
    scales=st.sampled_from(["amax", "power_of_two"]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
@settings(deadline=None, max_examples=30)
def test_the_call_makes_this_recipe(converted: Path, ignore: list[str], scales: Any, dtype: Any) -> None:
    recipe = Recipe(ignore=ignore, block_scales=scales, dequantize_dtype=dtype, accept=("not-kimi-k3",))
    card = model_card(converted, recipe, details=ONE_GPU)
    call, script = blocks(card, "python")
    compile(script, "script", "exec")
    names: dict[str, Any] = {}
    # All but the last line, which converts.
    exec(compile(call.rstrip().rpartition("\n")[0], "call", "exec"), names)
    assert names["recipe"].fingerprint == recipe.fingerprint
    assert names["recipe"].accept == recipe.accept
    assert call.rstrip().endswith(f"quantize('moonshotai/Kimi-K3', {converted.name!r}, recipe)")


@pytest.mark.parametrize("recipe", [Recipe(), POWER_OF_TWO], ids=lambda recipe: recipe.block_scales)
def test_call_and_script_make_the_same_tensors(
    tiny: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are run as the card has them, but for the devices and the workers."""
    details = ONE_GPU.model_copy(update={"base_model": str(tiny), "name": "me/made"})
    call, script = blocks(model_card(plan(tiny, recipe), details=details), "python")
    devices = 'device=[f"cuda:{i}" for i in range(7)]'
    assert devices in script
    for name, text in (("call", call), ("script", script.replace(devices, 'device="cpu"'))):
        place = tmp_path / name
        place.mkdir()
        monkeypatch.chdir(place)
        with monkeypatch.context() as patch:
            patch.setattr(kimi_k3_fp8, "quantize", lambda *a: quantize(*a, executor=Inline(), progress=False))
            exec(compile(text, name, "exec"), {})
    assert read_tensors(tmp_path / "call" / "made") == read_tensors(tmp_path / "script" / "made")
    config = json.loads((tmp_path / "script" / "made" / "config.json").read_text())
    assert "quantization_config" in config["text_config"]  # as the card warns


# --- written


def test_the_source_readme_is_kept(tiny: Path, output: Path) -> None:
    source = (tiny / "README.md").read_bytes()
    assert (output / CARD_NAME).read_bytes() == source
    first = write_card(output, details=ONE_GPU).read_text()
    assert (output / SOURCE_CARD_NAME).read_bytes() == source
    assert f"[{SOURCE_CARD_NAME}]({SOURCE_CARD_NAME})" in first
    assert "# Kimi-K3-FP8-BLOCK\n" in first
    # Written again, and after an interrupted run has copied the source's README once more.
    shutil.copyfile(tiny / "README.md", output / CARD_NAME)
    for _ in range(2):
        assert write_card(output, details=ONE_GPU).read_text() == first
        assert (output / SOURCE_CARD_NAME).read_bytes() == source
    assert validate(output, source=tiny).ok


def test_no_readme_is_thrown_away(output: Path) -> None:
    write_card(output, details=ONE_GPU)
    (output / CARD_NAME).write_text("my own words\n")
    with pytest.raises(FileExistsError, match=SOURCE_CARD_NAME):
        write_card(output, details=ONE_GPU)
    assert (output / CARD_NAME).read_text() == "my own words\n"


def test_without_a_source_readme_nothing_is_linked(output: Path) -> None:
    (output / CARD_NAME).unlink()
    for _ in range(2):
        card = write_card(output, details=ONE_GPU)
        assert SOURCE_CARD_NAME not in card.read_text()
        assert not (output / SOURCE_CARD_NAME).exists()
        assert lint(card) == []


def test_odd_names_stay_text(converted: Path, tmp_path: Path) -> None:
    odd = "a|b <c> `d` *e* [f](g)"
    recipe = Recipe().with_rule(odd, "re:.*`odd``name.*", odd)
    path = tmp_path / "card.md"
    details = ONE_GPU.model_copy(update={"name": odd, "developers": odd})
    path.write_text(str(model_card(converted, recipe, details=details)))
    assert lint(path) == []
    from markdown_it import MarkdownIt

    shown = MarkdownIt().enable("table").parse(path.read_text())
    texts = ["".join(c.content for c in token.children or ()) for token in shown if token.type == "inline"]
    assert odd in texts
    assert f"Model Developers: {odd}" in texts
    assert f"re:.*`odd``name.*: {odd}" in texts
