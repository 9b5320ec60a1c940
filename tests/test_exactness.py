"""Exact scales, proved end to end: every value of the tiny checkpoint, both engines, both scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Inline, edit_shard, read_tensors, shard_of

from kimi_k3_fp8 import Recipe, quantize, validate
from kimi_k3_fp8.checkpoint import Folder, read_checkpoint
from kimi_k3_fp8.fidelity import Fidelity, measure, quantized_modules
from kimi_k3_fp8.synthetic import write_checkpoint

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w1"


def convert(source: Path, out: Path, **more: Any) -> dict[str, Fidelity]:
    report = quantize(source, out, executor=Inline(), progress=False, **({"verify": "full"} | more))
    return {record.module_class: record for record in report.fidelity}


@pytest.fixture(scope="module")
def amax(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Fidelity]]:
    out = tmp_path_factory.mktemp("amax") / "out"
    return out, convert(tiny, out)


@pytest.fixture(scope="module")
def exact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Fidelity]]:
    out = tmp_path_factory.mktemp("exact") / "out"
    return out, convert(tiny, out, recipe=Recipe(block_scales="power_of_two"))


def test_power_of_two_scales_lose_nothing_of_mxfp4(exact: tuple[Path, dict[str, Fidelity]]) -> None:
    routed = exact[1]["routed experts"]
    assert (routed.differing, routed.non_finite) == (0, 0)
    assert routed.modules == routed.of_modules > 30
    assert routed.verdict == "exact"
    assert routed.exponent_spread is not None
    assert routed.exponent_spread <= 14


def test_amax_scales_change_most_of_mxfp4(amax: tuple[Path, dict[str, Fidelity]]) -> None:
    """Every weight but the zeros moves, by a few per cent."""
    routed = amax[1]["routed experts"]
    assert routed.differing / routed.elements > 0.85
    assert 0.015 < routed.relative_rms_error < 0.035
    assert "exact" not in routed.verdict


def test_the_published_recipes_cost_on_evenly_drawn_bytes(tmp_path: Path) -> None:
    """Measured before on evenly drawn MXFP4 bytes of exponent spread 6: 87.5 % of routed-expert weights
    change (all but the zeros, 2 of 16 codes), with 2.10 % relative RMS error. With powers of two, none."""
    source = write_checkpoint(tmp_path / "Kimi-K3", values="random")
    found = convert(source, tmp_path / "amax")["routed experts"]
    assert found.exponent_spread == 6
    assert found.differing / found.elements == pytest.approx(14 / 16, abs=0.01)
    assert found.relative_rms_error == pytest.approx(0.021, abs=0.01)
    recipe = Recipe(block_scales="power_of_two")
    assert convert(source, tmp_path / "exact", recipe=recipe)["routed experts"].verdict == "exact"


def test_bf16_classes_are_no_worse_with_powers_of_two(
    amax: tuple[Path, dict[str, Fidelity]], exact: tuple[Path, dict[str, Fidelity]]
) -> None:
    plain = {name for name in amax[1] if name != "routed experts"}
    assert plain == {"shared experts", "latent projections", "dense mlp"}
    for name in plain:
        assert exact[1][name].relative_rms_error <= 1.01 * amax[1][name].relative_rms_error


def test_every_block_scale_is_a_power_of_two(exact: tuple[Path, dict[str, Fidelity]]) -> None:
    import numpy as np

    for name, (dtype, _, data) in read_tensors(exact[0]).items():
        if name.endswith(".weight_scale"):
            assert dtype == "BF16"
            bits = np.frombuffer(data, np.uint16)
            assert not np.any(bits & 0x7F), "a mantissa"
            assert not np.any(bits >> 15), "a sign"


def test_the_saved_config_shows_no_trace_of_the_observer(
    amax: tuple[Path, dict[str, Fidelity]], exact: tuple[Path, dict[str, Fidelity]]
) -> None:
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (amax[0], exact[0]))
    assert one == other
    assert "kimi_k3_power_of_two" not in (exact[0] / "config.json").read_text()


@pytest.mark.parametrize("scales", ["amax", "power_of_two"])
def test_both_engines_write_the_same_files(
    tiny: Path,
    tmp_path: Path,
    amax: tuple[Path, dict[str, Fidelity]],
    exact: tuple[Path, dict[str, Fidelity]],
    scales: Any,
) -> None:
    convert(tiny, tmp_path / "out", recipe=Recipe(block_scales=scales), engine="transcode")
    reference = (amax if scales == "amax" else exact)[0]
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (reference / path.name).read_bytes(), path.name


def test_a_run_may_be_continued_with_the_other_engine(tiny: Path, converted: Path, tmp_path: Path) -> None:
    from test_execution import begin, finish

    begin(tiny, tmp_path / "out", jobs=3)
    assert finish(tiny, tmp_path / "out", engine="transcode").jobs_kept == 3
    assert read_tensors(tmp_path / "out") == read_tensors(converted)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dequantize_dtypes_give_the_same_with_both_engines(
    tiny: Path, tmp_path: Path, dtype: Any
) -> None:
    recipe = Recipe(dequantize_dtype=dtype)
    convert(tiny, tmp_path / "a", recipe=recipe)
    convert(tiny, tmp_path / "b", recipe=recipe, engine="transcode")
    assert read_tensors(tmp_path / "a") == read_tensors(tmp_path / "b")
    kinds = {d for n, (d, _, _) in read_tensors(tmp_path / "a").items() if "experts.0.w1.weight_scale" in n}
    assert kinds == {"F32" if dtype == "float32" else "F16"}


# --- where it would not be exact


def widen(spread: int) -> Any:
    """One group of a block gets an exponent `spread` below the block's largest, and the block's largest
    group the largest magnitude, which makes the exact range as small as it can be."""

    def edit(tensors: dict[str, Any]) -> None:
        dtype, (rows, columns), data = tensors[f"{EXPERT}.weight_scale"]
        scale = bytearray([120] * len(data))
        scale[0] = 120 - spread
        tensors[f"{EXPERT}.weight_scale"] = (dtype, [rows, columns], bytes(scale))
        dtype, shape, data = tensors[f"{EXPERT}.weight_packed"]
        packed = bytearray([0x77] * len(data))
        packed[:16] = bytes([0x11] * 16)
        tensors[f"{EXPERT}.weight_packed"] = (dtype, shape, bytes(packed))

    return edit


@pytest.mark.parametrize(("spread", "differing"), [(14, 0), (15, 32), (20, 32)])
@pytest.mark.parametrize("engine", ["llm_compressor", "transcode"])
def test_a_wide_spread_is_reported_and_never_called_exact(
    source: Path, tmp_path: Path, spread: int, differing: int, engine: Any
) -> None:
    edit_shard(shard_of(source, f"{EXPERT}.weight_packed"), widen(spread))
    recipe = Recipe(block_scales="power_of_two")
    routed = convert(source, tmp_path / "out", recipe=recipe, engine=engine)["routed experts"]
    assert routed.exponent_spread == spread
    assert routed.differing == differing
    assert routed.exact == (differing == 0)
    assert ("exact" in routed.verdict) == (differing == 0)


def test_sampled_says_sampled(tiny: Path, tmp_path: Path) -> None:
    recipe = Recipe(block_scales="power_of_two")
    report = quantize(tiny, tmp_path / "out", recipe, executor=Inline(), progress=False)
    routed = {record.module_class: record for record in report.fidelity}["routed experts"]
    assert 0 < routed.modules < routed.of_modules
    assert "exact" not in routed.verdict
    assert "exact" not in str(report)
    assert "sampled" in str(report)
    again = validate(tmp_path / "out", source=tiny, level="values")
    assert "exact" in str(again)
    record = json.loads((tmp_path / "out" / "kimi_k3_fp8.json").read_text())
    assert [Fidelity.model_validate(f) for f in record["validation"]["fidelity"]] == [*report.fidelity]


def test_verification_can_be_turned_off(tiny: Path, tmp_path: Path) -> None:
    assert convert(tiny, tmp_path / "out", verify="off") == {}


# --- validate(level="values")


def test_values_of_the_plain_scripts_output(
    tiny: Path, plain: Path, amax: tuple[Path, dict[str, Fidelity]]
) -> None:
    report = validate(plain, source=tiny, level="values")
    assert {record.module_class: record for record in report.fidelity} == amax[1]


def test_values_that_no_rounding_explains(output: Path, tiny: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight") and "shared_experts" in n]:
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, data[::-1])

    for path in output.glob("*.safetensors"):
        edit_shard(path, swap)
    assert validate(output, source=tiny).ok
    report = validate(output, source=tiny, level="values")
    assert [(p.code, p.subject) for p in report.problems] == [("values-differ", "shared experts")]


def test_values_that_are_not_finite(output: Path, tiny: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[f"{EXPERT}.weight_scale"]
        tensors[f"{EXPERT}.weight_scale"] = (dtype, shape, b"\xc0\x7f" + data[2:])

    edit_shard(shard_of(output, f"{EXPERT}.weight_scale"), spoil)
    report = validate(output, source=tiny, level="values")
    assert [(p.code, p.subject) for p in report.problems] == [("non-finite", "routed experts")]
    routed = {record.module_class: record for record in report.fidelity}["routed experts"]
    assert routed.non_finite == 128 * 128
    assert not routed.exact


def test_level_values_needs_the_source(output: Path) -> None:
    with pytest.raises(ValueError, match="source="):
        validate(output, level="values")


# --- at load: vLLM requantizes to powers of two


def test_load_time_requantization_changes_amax_and_not_powers_of_two(
    tiny: Path, amax: tuple[Path, dict[str, Fidelity]], exact: tuple[Path, dict[str, Fidelity]]
) -> None:
    source = read_checkpoint(Folder(tiny))
    loaded = {}
    for key, (folder, _) in {"amax": amax, "power_of_two": exact}.items():
        made = read_checkpoint(Folder(folder))
        outputs = [*made.tensors.values()]
        found = measure(
            source.files,
            source.tensors.values(),
            made.files,
            outputs,
            quantized_modules(outputs),
            as_loaded=True,
        )
        loaded[key] = {record.module_class: record for record in found}
    for name, stored in exact[1].items():
        assert loaded["power_of_two"][name] == stored
    for name, stored in amax[1].items():
        assert loaded["amax"][name].relative_rms_error > 1.2 * stored.relative_rms_error
    assert loaded["power_of_two"]["routed experts"].exact
