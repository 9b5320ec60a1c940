"""What this library uses of LLM Compressor and compressed-tensors, pinned: drift fails here first."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from kimi_k3_fp8 import Recipe

SAY = "LLM Compressor or compressed-tensors has changed: "


def test_signature_of_model_free_ptq() -> None:
    from llmcompressor import model_free_ptq

    found = list(inspect.signature(model_free_ptq).parameters)
    expected = [
        "model_stub",
        "save_directory",
        "scheme",
        "config",
        "ignore",
        "max_workers",
        "device",
        "converter",
    ]
    assert found == expected, f"{SAY}model_free_ptq takes {found}, was {expected}"


def test_the_converter_protocol_and_the_dequantizers_arguments() -> None:
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, Converter

    for method in ("process", "validate", "update_config", "get_dependencies"):
        assert callable(getattr(Converter, method, None)), f"{SAY}Converter has no {method}"
    found = list(inspect.signature(CompressedTensorsDequantizer).parameters)
    assert found == ["model_stub", "ignore", "dtype"], f"{SAY}CompressedTensorsDequantizer takes {found}"


def test_the_dequantizer_pairs_packed_weights_with_their_scales(tiny: Path) -> None:
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer

    converter = CompressedTensorsDequantizer(tiny, ignore=Recipe().ignore_patterns)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    found = converter.get_dependencies(f"{name}.weight_packed")
    assert found == {f"{name}.weight_scale"}, f"{SAY}weight_packed depends on {found}"
    assert converter.get_dependencies(f"{name}.weight_scale") == set(), SAY + "scales have dependencies"


def test_the_config_it_writes_is_the_expected_one(plain: Path) -> None:
    found = json.loads((plain / "config.json").read_text())["quantization_config"]
    expected = Recipe().expected_quantization_config()
    wrong = {
        key: (found.get(key), expected.get(key))
        for key in {*found, *expected}
        if found.get(key) != expected.get(key)
    }
    assert not wrong, f"{SAY}quantization_config (found, expected): {wrong}"


def test_the_preset_is_what_the_recipe_says(tiny: Path) -> None:
    from compressed_tensors.quantization import preset_name_to_scheme

    preset = preset_name_to_scheme("FP8_BLOCK", ["Linear"]).model_dump(mode="json")
    expected = Recipe().expected_quantization_config()["config_groups"]["FP8_BLOCK"]
    assert preset | {"format": "float-quantized"} == expected, f"{SAY}the FP8_BLOCK preset is {preset}"


def test_an_observer_can_be_registered_and_named_in_a_scheme() -> None:
    from llmcompressor.observers import Observer

    assert hasattr(Observer, "register"), f"{SAY}Observer.register is gone"
    weights = Recipe(block_scales="power_of_two").quantization_config().config_groups["FP8_BLOCK"].weights
    assert Observer.get_value_from_registry(weights.observer), f"{SAY}observers are not found by name"


def test_weights_need_not_be_initialised() -> None:
    import torch
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    with no_init_weights():
        torch.nn.Linear(8, 8)
    same = torch.equal(before, torch.random.get_rng_state())
    assert same, "transformers has changed: no_init_weights initialises weights"


@pytest.mark.parametrize("name", ["model.layers.0.norm", "layers.0.routed_expert_norm"])
def test_modules_ending_in_norm_are_never_matched(name: str) -> None:
    import torch
    from compressed_tensors.utils import match_quantizable_tensors

    tensors = {f"{name}.weight": torch.empty(1, device="meta")}
    assert not [*match_quantizable_tensors(tensors, [], ["Linear"])], f"{SAY}norms are quantized"
