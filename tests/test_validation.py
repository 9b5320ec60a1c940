"""`validate` says ok of a good checkpoint, and finds each thing that can be wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import edit_json, edit_shard, read_tensors_of, reindex, shard_of

from kimi_k3_fp8 import Problem, Recipe, Report, SourceError, ValidationError, validate

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w1"
SHARED = "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_proj"
NORM = "language_model.model.layers.1.input_layernorm.weight"


def errors(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for problem in report.problems:
        if problem.severity == "error":
            found.setdefault(problem.code, []).append(problem.subject)
    return found


def edit_config(output: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    edit_json(output / "config.json", edit)


def test_our_output_is_ok_at_every_level(tiny: Path, converted: Path) -> None:
    for level in ("config", "tensors"):
        report = validate(converted, level=level)
        assert report.ok
        assert report.problems == ()
        report.raise_for_problems()
    assert validate(converted, source=tiny).problems == ()


def test_the_plain_scripts_output_has_only_its_leftover(tiny: Path, plain: Path) -> None:
    """Any FP8_BLOCK Kimi-K3 is understood; the script's own faults are what is found."""
    report = validate(plain, source=tiny)
    assert errors(report) == {"config-leftover": ["config.json: text_config.quantization_config"]}
    assert {p.code for p in report.problems if p.severity == "note"} == {"metadata-format"}


# --- deliberate corruptions, one each


def test_flipped_dtype(output: Path) -> None:
    def flip(tensors: dict[str, Any]) -> None:
        _, shape, data = tensors[f"{EXPERT}.weight"]
        tensors[f"{EXPERT}.weight"] = ("F8_E5M2", shape, data)

    edit_shard(shard_of(output, f"{EXPERT}.weight"), flip)
    assert errors(validate(output)) == {"tensor-dtype": [f"{EXPERT}.weight"]}


def test_missing_scale(output: Path) -> None:
    edit_shard(shard_of(output, f"{EXPERT}.weight"), lambda tensors: tensors.pop(f"{EXPERT}.weight_scale"))
    reindex(output)
    assert errors(validate(output)) == {"tensor-missing": [f"{EXPERT}.weight_scale"]}


def test_wrong_scale_shape(output: Path) -> None:
    name = f"{EXPERT}.weight_scale"

    def turn(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, [*reversed(shape)] if shape[0] != shape[1] else [1, 2], data[: 2 * 2])

    edit_shard(shard_of(output, name), turn)
    reindex(output)
    assert errors(validate(output)) == {"tensor-shape": [name]}


def test_wrong_weight_shape_in_one_layer(output: Path) -> None:
    name = f"{SHARED}.weight"

    def flatten(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, [shape[0] // 2, shape[1] * 2], data)

    edit_shard(shard_of(output, name), flatten)
    assert errors(validate(output)) == {"tensor-shape": [name]}


def test_dropped_tensor(output: Path) -> None:
    edit_shard(shard_of(output, NORM), lambda tensors: tensors.pop(NORM))
    reindex(output)
    assert errors(validate(output)) == {"tensor-missing": [NORM]}


def test_dropped_last_layer(output: Path) -> None:
    last = json.loads((output / "config.json").read_text())["text_config"]["num_hidden_layers"] - 1
    for path in output.glob("*.safetensors"):
        edit_shard(path, lambda t: [t.pop(name) for name in [*t] if f".layers.{last}." in name])
    reindex(output)
    found = errors(validate(output))
    assert set(found) == {"tensor-missing"}
    assert all(f".layers.{last}." in subject for subject in found["tensor-missing"])


def test_extra_tensor(output: Path) -> None:
    extra = "language_model.model.layers.1.mtp.weight"
    shard = shard_of(output, NORM)
    edit_shard(shard, lambda tensors: tensors.update({extra: ("F32", [1], b"abcd")}))
    reindex(output)
    assert errors(validate(output)) == {"tensor-unexpected": [extra]}


def test_index_pointing_elsewhere(output: Path) -> None:
    right = shard_of(output, NORM).name
    wrong = next(p.name for p in sorted(output.glob("*.safetensors")) if p.name != right)
    edit_json(output / "model.safetensors.index.json", lambda i: i["weight_map"].update({NORM: wrong}))
    found = errors(validate(output))
    assert set(found) == {"index-mismatch", "tensor-missing"}
    assert found["index-mismatch"] == [NORM, NORM]


def test_wrong_total_size(output: Path) -> None:
    edit_json(output / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=1))
    assert errors(validate(output)) == {"total-size": ["model.safetensors.index.json"]}


def test_leftover_nested_config(output: Path) -> None:
    edit_config(output, lambda c: c["text_config"].update(quantization_config=c["quantization_config"]))
    found = {"config-leftover": ["config.json: text_config.quantization_config"]}
    assert errors(validate(output, level="config")) == found


def test_mxfp4_left_packed(output: Path, tiny: Path) -> None:
    packed = {
        n: v for n, v in read_tensors_of(shard_of(tiny, f"{EXPERT}.weight_packed")).items() if EXPERT in n
    }

    def put_back(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(EXPERT)]:
            tensors.pop(name)
        tensors.update(packed)

    edit_shard(shard_of(output, f"{EXPERT}.weight"), put_back)
    reindex(output)
    assert errors(validate(output))["packed-left"] == [f"{EXPERT}.weight_packed"]


def test_changed_ignore_list(output: Path) -> None:
    edit_config(output, lambda config: config["quantization_config"]["ignore"].pop())
    assert errors(validate(output)) == {"config-mismatch": ["config.json: quantization_config.ignore"]}


def test_changed_group_size(output: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["FP8_BLOCK"]["input_activations"]["group_size"] = 64

    edit_config(output, change)
    (problem,) = validate(output, level="config").problems
    assert problem.code == "config-mismatch"
    assert problem.subject.endswith("input_activations.group_size")
    assert (problem.expected, problem.found) == (128, 64)


def test_truncated_shard(output: Path) -> None:
    path = shard_of(output, NORM)
    path.write_bytes(path.read_bytes()[:-1])
    assert errors(validate(output)) == {"shard-truncated": [path.name]}


def test_shard_that_is_longer(output: Path) -> None:
    path = shard_of(output, NORM)
    path.write_bytes(path.read_bytes() + b"\0")
    assert errors(validate(output)) == {"shard-truncated": [path.name]}


def test_missing_shard(output: Path) -> None:
    path = shard_of(output, NORM)
    path.unlink()
    assert errors(validate(output))["shard-missing"] == [path.name]


def test_missing_config(output: Path) -> None:
    edit_config(output, lambda config: config.pop("quantization_config"))
    assert errors(validate(output, level="config")) == {
        "config-missing": ["config.json: quantization_config"]
    }


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_unreadable_config(output: Path, text: str) -> None:
    (output / "config.json").write_text(text)
    assert errors(validate(output, level="config"))["config-unreadable"] == ["config.json"]


def test_missing_custom_code(output: Path) -> None:
    (output / "modeling_kimi_k3.py").unlink()
    assert errors(validate(output)) == {"file-missing": ["modeling_kimi_k3.py"]}


def test_missing_tokenizer_file_is_found_against_the_source(output: Path, tiny: Path) -> None:
    (output / "tiktoken.model").unlink()
    assert errors(validate(output, source=tiny)) == {"file-missing": ["tiktoken.model"]}


# --- what is only noted


@pytest.mark.parametrize(
    "edit",
    [
        lambda q: q.update(version="0.1"),
        lambda q: q.update(config_groups={"group_0": q["config_groups"]["FP8_BLOCK"]}),
        lambda q: q["ignore"].reverse(),
        lambda q: q["config_groups"]["FP8_BLOCK"]["weights"].update(observer="minmax"),
    ],
    ids=["version", "group name", "order of ignore", "observer"],
)
def test_harmless_differences_are_notes(output: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    edit_config(output, lambda config: edit(config["quantization_config"]))
    report = validate(output, level="config")
    assert report.ok
    assert [problem.code for problem in report.problems] == ["config-differs"]


@pytest.mark.parametrize("key", ["kv_cache_scheme", "transform_config", "global_compression_ratio"])
def test_an_absent_key_means_the_same_as_an_empty_one(output: Path, key: str) -> None:
    edit_config(output, lambda config: config["quantization_config"].pop(key))
    assert validate(output, level="config").problems == ()


def test_a_present_key_where_nothing_is_expected_is_an_error(output: Path) -> None:
    edit_config(output, lambda config: config["quantization_config"].update(kv_cache_scheme={"num_bits": 8}))
    assert set(errors(validate(output))) == {"config-mismatch"}


# --- the report itself


def test_the_recorded_recipe_is_used_and_an_explicit_one_wins(output: Path) -> None:
    recipe = Recipe().with_rule("more", "re:.*nothing.*")
    assert not validate(output, recipe, level="config").ok
    edit_json(output / "kimi_k3_fp8.json", lambda r: r.update(recipe=recipe.model_dump(mode="json")))
    assert not validate(output, level="config").ok
    assert validate(output, Recipe(), level="config").ok


def test_raise_for_problems_says_all(output: Path) -> None:
    edit_config(output, lambda config: config.pop("quantization_config"))
    report = validate(output)
    with pytest.raises(ValidationError, match="config-missing") as caught:
        report.raise_for_problems()
    assert caught.value.problems == report.problems
    assert "config-missing" in str(report)
    assert "config-missing" in report._repr_html_()


def test_a_report_survives_json(output: Path) -> None:
    report = validate(output)
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_no_such_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        validate(tmp_path / "nothing")


def test_unknown_level(output: Path) -> None:
    with pytest.raises(ValueError, match="level"):
        validate(output, level="everything")  # type: ignore[arg-type]


def test_problem_codes_are_known() -> None:
    with pytest.raises(ValueError, match="unknown problem code"):
        Problem(code="no-such-code", subject="x", message="y")
