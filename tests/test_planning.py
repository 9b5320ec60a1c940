"""Plan: everything known before any work, and what cannot work refused, all at once."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Inline,
    edit_json,
    edit_shard,
    read_tensors,
    read_tensors_of,
    reindex,
    shard_of,
    write_shard,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_k3_fp8 import Plan, PlanError, Recipe, SourceError, plan, quantize
from kimi_k3_fp8.architecture import Dimensions
from kimi_k3_fp8.checkpoint import Folder, read_checkpoint
from kimi_k3_fp8.machine import Machine
from kimi_k3_fp8.planning import make_plan
from kimi_k3_fp8.synthetic import write_checkpoint

LAYER = "language_model.model.layers.1"
EXPERT = f"{LAYER}.block_sparse_moe.experts.2.w1"
SHARED = f"{LAYER}.block_sparse_moe.shared_experts.gate_proj"
Found = set[tuple[str, str]]


def refused(source: Path, recipe: Recipe | None = None, save: Path | None = None, **more: Any) -> Found:
    """Code and subject of each error; and that nothing was created."""
    parent = source.parent
    save = save or parent / "out"
    before = sorted(parent.rglob("*"))
    with pytest.raises(PlanError) as caught:
        quantize(source, save, recipe, progress=False, **more)
    assert sorted(parent.rglob("*")) == before
    assert all(problem.fix for problem in caught.value.problems if problem.severity == "error")
    return {(p.code, p.subject) for p in caught.value.problems if p.severity == "error"}


def codes(found: Found) -> set[str]:
    return {code for code, _ in found}


# --- what a good plan says


def test_a_plan_names_every_module_with_the_rule_that_decided(tiny: Path, tmp_path: Path) -> None:
    made = plan(tiny, save_directory=tmp_path / "out")
    held = read_tensors(tiny)
    assert {module.name for module in made.modules} == {name.rpartition(".")[0] for name in held}
    rules = {module.name: (module.quantized, module.rule) for module in made.modules}
    assert rules[EXPERT] == (True, "MXFP4 weight")
    assert rules[SHARED] == (True, "weight")
    assert rules[f"{LAYER}.self_attn.q_proj"] == (False, "attention")
    assert rules[f"{LAYER}.block_sparse_moe.gate"] == (False, "router")
    assert rules[f"{LAYER}.input_layernorm"] == (False, "norm")
    assert made.ok
    assert not list(tmp_path.iterdir())


def test_every_output_tensor_is_known_down_to_its_place(tiny: Path, converted: Path) -> None:
    made = plan(tiny, save_directory=converted.parent / "again", max_shard_size="1MB")
    written = read_checkpoint(Folder(converted))
    assert made.output_tensors == dict(written.tensors)
    assert made.output_bytes == written.total_size
    assert made.output_file_bytes == sum(p.stat().st_size for p in converted.glob("*.safetensors"))
    scales = [t for t in written.tensors.values() if t.parameter == "weight_scale"]
    assert made.scale_bytes == sum(tensor.nbytes for tensor in scales)


def test_shards_stay_within_the_size_asked_for_and_modules_stay_together(tiny: Path, tmp_path: Path) -> None:
    made = plan(tiny, save_directory=tmp_path / "out", max_shard_size="200kB")
    alone = {p.subject for p in made.problems if p.code == "tensor-exceeds-shard"}
    for job in made.jobs:
        modules = {tensor.module for tensor in job.outputs}
        assert job.bytes_out <= 200_000 or (len(modules) == 1 and modules <= alone)
    owner: dict[str, int] = {}
    for job in made.jobs:
        for tensor in job.inputs:
            assert owner.setdefault(tensor.module, job.number) == job.number


def test_a_plan_prints_saves_and_renders(tiny: Path, tmp_path: Path) -> None:
    made = plan(tiny, save_directory=tmp_path / "out")
    text = str(made)
    assert "routed experts" in text
    assert "MXFP4 weight" in text
    assert max(map(len, text.partition("class")[2].splitlines())) <= 80
    saved = json.loads(made.save(tmp_path / "plan.json").read_text())
    assert saved["output_bytes"] == made.output_bytes
    assert sum(len(job["outputs"]) for job in saved["jobs"]) == saved["output_tensors"]
    assert len(saved["modules"]) == len(made.modules)
    assert made._repr_html_().count("<tr>") > 8


def test_planning_loads_no_torch(tiny: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"import sys, kimi_k3_fp8; kimi_k3_fp8.plan({str(tiny)!r}); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == "False"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_full_size_plan_has_the_published_figures(tmp_path: Path) -> None:
    """FACTS of the published checkpoint: 2819.87 GB of tensors, 2819.94 GB of files."""
    source = write_checkpoint(tmp_path / "Kimi-K3", size="full")
    checkpoint = read_checkpoint(Folder(source))
    machine = Machine((), 64, 2 * 10**12)
    made = make_plan(checkpoint, Recipe(), tmp_path / "out", machine=machine, max_shard_bytes=5 * 10**9)
    assert len(made.quantized_modules) == 247_759
    assert len(made.output_tensors) == 497_683
    assert made.output_bytes == 2_819_870_867_584
    assert made.scale_bytes == 334_515_328
    assert made.output_file_bytes == pytest.approx(2819.94e9, rel=1e-4)
    fewest = math.ceil(made.output_bytes / 5e9)
    assert fewest <= len(made.jobs) <= fewest + 4
    assert all(job.bytes_out <= 5e9 for job in made.jobs)
    kinds: dict[str, int] = {}
    for module in made.modules:
        if module.quantized:
            kinds[module.module_class] = kinds.get(module.module_class, 0) + 1
    assert kinds == {
        "routed experts": 247_296,
        "shared experts": 276,
        "latent projections": 184,
        "dense mlp": 3,
    }
    assert {problem.code for problem in made.problems if problem.severity == "error"} == {"disk-too-small"}


# --- the source (TRAPS 1 to 12)


def test_trap_1_index_names_an_absent_shard(source: Path) -> None:
    shard = shard_of(source, f"{EXPERT}.weight_packed")
    shard.unlink()
    assert ("shard-missing", shard.name) in refused(source)


def test_trap_2_index_and_shard_disagree(source: Path) -> None:
    shard = shard_of(source, f"{LAYER}.input_layernorm.weight")

    def rename(tensors: dict[str, Any]) -> None:
        tensors[f"{LAYER}.surprise.weight"] = tensors.pop(f"{LAYER}.input_layernorm.weight")

    edit_shard(shard, rename)
    found = refused(source)
    assert ("index-mismatch", f"{LAYER}.input_layernorm.weight") in found
    assert ("index-mismatch", f"{LAYER}.surprise.weight") in found


@pytest.mark.parametrize("lost", ["weight_packed", "weight_scale"])
def test_trap_3_half_a_pair(source: Path, lost: str) -> None:
    edit_shard(shard_of(source, f"{EXPERT}.{lost}"), lambda tensors: tensors.pop(f"{EXPERT}.{lost}"))
    reindex(source)
    kept = {"weight_packed", "weight_scale"} - {lost}
    assert refused(source) >= {("pair-incomplete", f"{EXPERT}.{kept.pop()}")}


def test_trap_3_shapes_that_do_not_pair(source: Path) -> None:
    name = f"{EXPERT}.weight_scale"

    def shorten(tensors: dict[str, Any]) -> None:
        dtype, (rows, columns), data = tensors[name]
        tensors[name] = (dtype, [rows // 2, columns], data[: len(data) // 2])

    edit_shard(shard_of(source, name), shorten)
    assert refused(source) >= {("pair-shape", f"{EXPERT}.weight_packed")}


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda raw: raw[:-1], "shard-truncated"),
        (lambda raw: raw + b"\0", "shard-truncated"),
        (lambda raw: raw[:5], "shard-truncated"),
        (lambda raw: (len(raw)).to_bytes(8, "little") + raw[8:], "shard-unreadable"),
        (lambda raw: (2**63).to_bytes(8, "little") + raw[8:], "shard-unreadable"),
        (lambda raw: raw[:8] + b"x" + raw[9:], "shard-unreadable"),
        (lambda raw: raw.replace(b'"BF16"', b'"BF61"', 1), "unknown-dtype"),
        (lambda raw: raw.replace(b'"BF16"', b'"F32" ', 1), "shard-unreadable"),
    ],
    ids=["short", "long", "no header", "header too long", "absurd header", "not JSON", "dtype", "size"],
)
def test_trap_5_shards_that_are_not_whole(source: Path, spoil: Callable[[bytes], bytes], code: str) -> None:
    shard = shard_of(source, f"{EXPERT}.weight_packed")
    shard.write_bytes(spoil(shard.read_bytes()))
    found = refused(source)
    assert code in codes(found)
    assert code == "unknown-dtype" or (code, shard.name) in found


def test_trap_7_no_safetensors_only_pickles(source: Path) -> None:
    for path in source.glob("*.safetensors*"):
        path.unlink()
    (source / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n")
    assert ("no-safetensors", str(source)) in refused(source)


def test_shards_without_an_index(source: Path) -> None:
    (source / "model.safetensors.index.json").unlink()
    assert ("index-unreadable", "model.safetensors.index.json") in refused(source)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"weight_map": {"a": 1}}', '{"weight_map": []}', "{}"])
def test_an_index_that_cannot_be_read(source: Path, text: str) -> None:
    (source / "model.safetensors.index.json").write_text(text)
    assert ("index-unreadable", "model.safetensors.index.json") in refused(source)


def test_trap_8_extra_shards_are_left_out_and_said(source: Path) -> None:
    write_shard(source / "extra.safetensors", [("x.weight", "F32", [1], b"abcd")])
    made = plan(source, save_directory=source.parent / "out")
    assert made.ok
    assert ("left-out", "extra.safetensors") in {(p.code, p.subject) for p in made.problems}
    assert "x.weight" not in made.output_tensors


@pytest.mark.parametrize(
    "name",
    ["../evil.safetensors", "/etc/x.safetensors", "a\\..\\b.safetensors", "C:x.safetensors", "weights.bin"],
)
def test_trap_9_shard_names_that_lead_elsewhere(source: Path, name: str) -> None:
    tensor = f"{LAYER}.input_layernorm.weight"
    edit_json(
        source / "model.safetensors.index.json", lambda index: index["weight_map"].update({tensor: name})
    )
    assert ("unsafe-name", name) in refused(source)


@pytest.mark.parametrize("dtype", ["F8_E8M0", "I8", "F8_E4M3"])
def test_trap_10_a_dtype_that_cannot_be_quantized(source: Path, dtype: str) -> None:
    def change(tensors: dict[str, Any]) -> None:
        _, shape, data = tensors[f"{SHARED}.weight"]
        tensors[f"{SHARED}.weight"] = (dtype, shape, data[: len(data) // 2])

    edit_shard(shard_of(source, f"{SHARED}.weight"), change)
    assert refused(source) >= {("unsupported-dtype", f"{SHARED}.weight")}


def test_trap_10_scales_in_a_new_dtype(source: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        _, shape, data = tensors[f"{EXPERT}.weight_scale"]
        tensors[f"{EXPERT}.weight_scale"] = ("F8_E8M0", shape, data)

    edit_shard(shard_of(source, f"{EXPERT}.weight_scale"), change)
    assert refused(source) >= {("unsupported-dtype", f"{EXPERT}.weight_packed")}


def test_trap_11_another_model(source: Path, tmp_path: Path) -> None:
    edit_json(
        source / "config.json", lambda c: c.update(model_type="llama", architectures=["LlamaForCausalLM"])
    )
    with pytest.raises(PlanError, match=r"llama.*LlamaForCausalLM"):
        plan(source, save_directory=tmp_path / "out").raise_for_problems()
    assert refused(source) == {("not-kimi-k3", "config.json")}
    accepted = Recipe(accept=["not-kimi-k3"])
    assert plan(source, accepted, save_directory=tmp_path / "out").ok


def test_trap_11_a_source_in_another_quantization(source: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        group = config["text_config"]["quantization_config"]["config_groups"]["group_0"]
        group["weights"]["num_bits"] = 8
        group["format"] = "float-quantized"

    edit_json(source / "config.json", change)
    assert refused(source) >= {("source-quantization", "config.json: text_config.quantization_config")}


def test_trap_11_an_already_converted_source(output: Path) -> None:
    assert "source-quantization" in codes(refused(output))


def test_trap_12_packed_weights_without_any_config(source: Path) -> None:
    edit_json(source / "config.json", lambda config: config["text_config"].pop("quantization_config"))
    assert "source-quantization" in codes(refused(source))


def test_trap_12_configs_at_two_places(source: Path, tmp_path: Path) -> None:
    edit_json(
        source / "config.json",
        lambda c: c.update(quantization_config=c["text_config"]["quantization_config"]),
    )
    assert plan(source, save_directory=tmp_path / "out").ok
    edit_json(source / "config.json", lambda c: c["quantization_config"].update(ignore=[]))
    assert refused(source) == {("conflicting-configs", "config.json: text_config.quantization_config")}


def test_trap_12_a_source_config_that_cannot_be_followed(source: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"]["ignore"] = ["re:(", 5]

    edit_json(source / "config.json", spoil)
    subjects = {f"config.json: ignore entry {entry!r}" for entry in ("re:(", 5)}
    assert refused(source) == {("source-quantization", subject) for subject in subjects}


@pytest.mark.parametrize("value", [None, [], [1], "x", 5])
def test_oddly_typed_json_is_no_accident(source: Path, converted: Path, tmp_path: Path, value: Any) -> None:
    """Null or another type where a list or an object is usual: taken as absent, from plan to report."""

    def spoil(config: dict[str, Any]) -> None:
        config["auto_map"] = value
        config["text_config"]["quantization_config"]["ignore"] = None

    edit_json(source / "config.json", spoil)
    edit_json(source / "model.safetensors.index.json", lambda index: index.update(metadata=value))
    quantize(source, tmp_path / "out", executor=Inline(), progress=False)
    assert read_tensors(tmp_path / "out") == read_tensors(converted)


def test_no_config_at_all(source: Path) -> None:
    (source / "config.json").unlink()
    assert ("config-unreadable", "config.json") in refused(source)


def test_no_source_at_all(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        plan(tmp_path / "nothing" / "here" / "at-all")
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="is a file"):
        quantize(tmp_path / "file")


# --- the recipe (TRAPS 13 to 18)


def test_trap_13_a_pattern_that_matches_nothing(source: Path) -> None:
    recipe = Recipe().with_rule("typo", "re:.*self_atn.*")
    assert refused(source, recipe) == {("ignore-unmatched", "re:.*self_atn.*")}
    with pytest.raises(PlanError, match=r"nearest is .*self_attn"):
        plan(source, recipe).raise_for_problems()


@pytest.mark.parametrize(
    ("rule", "subject"),
    [
        ("head", "language_model.lm_head"),
        ("router", f"{LAYER}.block_sparse_moe.gate"),
        ("attn residual", f"{LAYER}.self_attention_res_proj"),
        ("mlp residual", f"{LAYER}.mlp_res_proj"),
        ("output residual", "language_model.model.output_attn_res_proj"),
        ("embeddings", "language_model.model.embed_tokens"),
        ("projector", "mm_projector.proj.0"),
        ("vision tower", "vision_tower.encoder.blocks.0.wo"),
    ],
)
def test_trap_15_what_must_stay_unquantized(source: Path, rule: str, subject: str) -> None:
    assert ("must-stay-unquantized", subject) in refused(source, Recipe().without_rule(rule))


def test_trap_15_can_be_overridden(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(accept=["must-stay-unquantized"]).without_rule("head")
    made = plan(source, recipe, save_directory=tmp_path / "out")
    assert made.ok
    assert "language_model.lm_head" in made.quantized_modules


def test_trap_16_an_ignore_over_packed_modules(source: Path) -> None:
    recipe = Recipe().with_rule("second experts", r"re:.*experts\.2\..*")
    assert refused(source, recipe) == {("ignores-packed", r"re:.*experts\.2\..*")}


def test_trap_16_the_sources_own_config_ignores_packed_modules(source: Path) -> None:
    def add(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"]["ignore"].append(r"re:.*experts\.1\..*")

    edit_json(source / "config.json", add)
    assert refused(source) == {("ignores-packed", r"re:.*experts\.1\..*")}


@pytest.mark.parametrize(
    ("pattern", "group"),
    [
        (r"re:.*layers\.0\.mlp\.gate_proj", "language_model.model.layers.0.mlp.{gate_proj,up_proj}"),
        (
            r"re:.*layers\.1\..*shared_experts\.up_proj",
            f"{LAYER}.block_sparse_moe.shared_experts.{{gate_proj,up_proj}}",
        ),
    ],
)
def test_trap_17_half_of_a_fused_group(source: Path, pattern: str, group: str) -> None:
    assert refused(source, Recipe().with_rule("half", pattern)) == {("fused-group-split", group)}


def test_trap_17_in_attention_and_experts(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "K3", quantized_experts=False)
    attention = r"re:.*self_attn\.(?!q_proj).*"
    recipe = Recipe().with_rule("attention", attention).with_rule("w1", r"re:.*experts\.0\.w1")
    found = refused(source, recipe)
    assert ("fused-group-split", f"{LAYER}.self_attn.{{q_proj,k_proj,v_proj,b_proj,f_a_proj}}") in found
    assert ("fused-group-split", f"{LAYER}.block_sparse_moe.experts.0.{{w1,w3}}") in found
    recipe = Recipe().with_rule("attention", r"re:.*self_attn\.(?!q_a_proj).*")
    mla = "language_model.model.layers.3.self_attn.{q_a_proj,kv_a_proj_with_mqa,g_proj}"
    assert ("fused-group-split", mla) in refused(source, recipe)


def test_trap_18_a_dimension_that_is_no_multiple_of_the_block(source: Path) -> None:
    recipe = Recipe().with_rule("attention", r"re:.*self_attn\.(?!b_proj).*")
    found = refused(source, recipe)
    assert ("not-block-multiple", f"{LAYER}.self_attn.b_proj.weight") in found
    with pytest.raises(PlanError, match=r"\[2, 256\]"):
        plan(source, recipe).raise_for_problems()


def test_a_weight_that_is_no_matrix(source: Path) -> None:
    recipe = Recipe().with_rule("attention", r"re:.*self_attn\.(?!q_conv1d).*")
    assert ("not-a-matrix", f"{LAYER}.self_attn.q_conv1d.weight") in refused(source, recipe)


def test_nothing_to_quantize(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "K3", quantized_experts=False)
    assert refused(source, Recipe(ignore=["re:.*"])) == {("nothing-to-quantize", "ignore")}


def test_a_leftover_scale_beside_a_plain_weight(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "K3", quantized_experts=False)
    scale = f"{SHARED}.weight_scale"
    edit_shard(shard_of(source, f"{SHARED}.weight"), lambda t: t.update({scale: ("F32", [1], b"abcd")}))
    reindex(source)
    assert refused(source) == {("name-collision", scale)}


def test_all_problems_come_at_once(source: Path) -> None:
    recipe = Recipe().without_rule("head").with_rule("typo", "re:.*self_atn.*")
    shard_of(source, "mm_projector.proj.0.weight").unlink()
    assert {"must-stay-unquantized", "ignore-unmatched", "shard-missing"} <= codes(refused(source, recipe))


def test_many_alike_are_counted_not_listed(source: Path) -> None:
    made = plan(
        source,
        Recipe().without_rule("vision tower", "projector", "mlp residual"),
        save_directory=source.parent / "out",
    )
    same = [p for p in made.problems if p.code == "must-stay-unquantized"]
    assert len(same) == 10
    assert "more like this" in same[-1].message


# --- the place (TRAPS 26 and 27)


def test_trap_26_output_exists(source: Path, tmp_path: Path) -> None:
    save = tmp_path / "there"
    save.mkdir()
    assert plan(source, save_directory=save).ok
    (save / "file").write_text("mine")
    assert refused(source, save=save) == {("output-exists", str(save))}
    assert plan(source, save_directory=save, overwrite=True).ok
    assert refused(source, save=save / "file", overwrite=True) >= {("output-exists", str(save / "file"))}


def test_trap_26_overwriting_replaces_the_whole_folder(tiny: Path, converted: Path, tmp_path: Path) -> None:
    save = tmp_path / "there"
    save.mkdir()
    (save / "file").write_text("old")
    quantize(tiny, save, max_shard_size="1MB", executor=Inline(), progress=False, overwrite=True)
    assert not (save / "file").exists()
    assert read_tensors(save) == read_tensors(converted)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_trap_26_output_and_source_overlap(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for save in (source, source / "out", source.parent, tmp_path / "link" / "out"):
        assert "output-overlaps" in codes(refused(source, save=save, overwrite=True))


def test_trap_27_disk_too_small(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    found = refused(source)
    assert found == {("disk-too-small", str(source.parent))}
    with pytest.raises(PlanError, match=r"needs .* MB, and 1.00 MB are free"):
        plan(source, save_directory=tmp_path / "out").raise_for_problems()


def test_memory_too_small(tiny: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(Folder(tiny))
    machine = Machine((), 2, 500_000_000)
    made = make_plan(checkpoint, Recipe(), tmp_path / "out", machine=machine, max_shard_bytes=5 * 10**9)
    assert [(p.code, p.subject) for p in made.problems] == [("memory-too-small", "cpu")]


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_shard_size": "5XB"},
        {"max_shard_size": 0},
        {"workers": 0},
        {"devices": ["cuda:99"]},
        {"engine": "fast"},
    ],
)
def test_arguments_that_cannot_be(tiny: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not a size|at least 1|no device|engine is"):
        quantize(tiny, tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


# --- the plan is what is written (property)

DROPPABLE = [rule.name for rule in Recipe().ignore]


@st.composite
def checkpoints_and_recipes(draw: st.DrawFn) -> tuple[Dimensions, bool, Recipe, int]:
    layers = draw(st.integers(1, 3))
    every = list(range(layers))
    dimensions = Dimensions(
        layers=layers,
        mla_layers=tuple(draw(st.lists(st.sampled_from(every), unique=True))),
        dense_layers=tuple(draw(st.lists(st.sampled_from(every), unique=True))),
        vocabulary=128 * draw(st.integers(1, 2)),
        hidden=128 * draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 2)),
        q_lora_rank=128,
        kv_lora_rank=128,
        experts=draw(st.integers(1, 3)),
        latent=128 * draw(st.integers(1, 2)),
        expert_intermediate=128 * draw(st.integers(1, 2)),
        shared_intermediate=128,
        dense_intermediate=128 * draw(st.integers(1, 2)),
        vision_blocks=draw(st.integers(0, 1)),
        vision_hidden=128,
        vision_attention=128,
        vision_intermediate=128,
        vision_grid=4,
    )
    more = draw(
        st.sampled_from([None, r"re:.*shared_experts.*", r"re:.*routed_expert_up_proj", r"re:.*\.mlp\..*"])
    )
    recipe = Recipe(accept=["must-stay-unquantized"])
    recipe = recipe.without_rule(*draw(st.lists(st.sampled_from(["head", "embeddings"]), unique=True)))
    if more:
        recipe = recipe.with_rule("more", more)
    return dimensions, draw(st.booleans()), recipe, draw(st.integers(10_000, 2_000_000))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(checkpoints_and_recipes())
def test_the_plan_is_what_quantize_writes(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Dimensions, bool, Recipe, int]
) -> None:
    dimensions, packed, recipe, shard_bytes = case
    folder = tmp_path_factory.mktemp("property")
    source = write_checkpoint(folder / "K3", dimensions=dimensions, values="random", quantized_experts=packed)
    unmatched = {
        p.subject
        for p in plan(source, recipe, save_directory=folder / "x").problems
        if p.code == "ignore-unmatched"
    }
    recipe = recipe.without_rule(*(rule.name for rule in recipe.ignore if rule.pattern in unmatched))
    made: Plan = plan(source, recipe, save_directory=folder / "out", max_shard_size=shard_bytes)
    if {p.code for p in made.problems if p.severity == "error"} == {"nothing-to-quantize"}:
        return
    quantize(source, folder / "out", recipe, max_shard_size=shard_bytes, executor=Inline(), progress=False)
    written = {
        name: (dtype, tuple(shape), len(data), path.name)
        for path in (folder / "out").glob("*.safetensors")
        for name, (dtype, shape, data) in read_tensors_of(path).items()
    }
    planned = {t.name: (t.dtype, t.shape, t.nbytes, t.shard) for t in made.output_tensors.values()}
    assert written == planned
    shutil.rmtree(folder)
