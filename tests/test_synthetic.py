"""Synthetic checkpoints: what safetensors, compressed-tensors and the file system say of them."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kimi_k3_fp8.architecture import Dimensions, tensors
from kimi_k3_fp8.synthetic import Values, write_checkpoint

TINY = Dimensions.tiny()
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("k3") / "tiny")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("k3") / "plain", quantized_experts=False)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_checkpoint(tmp_path_factory.mktemp("k3") / "full", "full")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def headers(full: Path) -> dict[Path, tuple[int, dict[str, Any]]]:
    return {path: read_header(path) for path in sorted(full.glob("*.safetensors"))}


def load(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Length of the header in bytes, and the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length, json.loads(file.read(length))


@pytest.mark.parametrize("values", ["gaussian", "random", "sparse"])
@pytest.mark.parametrize("quantized", [True, False])
def test_holds_the_tensors_of_the_architecture(tmp_path: Path, values: Values, quantized: bool) -> None:
    folder = write_checkpoint(tmp_path / "k3", values=values, quantized_experts=quantized)
    expected = {spec.name: spec for spec in tensors(TINY, quantized_experts=quantized)}
    found = load(folder)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (DTYPES[expected[name].dtype], expected[name].shape)


def test_index_agrees_with_the_shards(tiny: Path) -> None:
    index = read_json(tiny / "model.safetensors.index.json")
    held = {
        name: path.name
        for path in tiny.glob("*.safetensors")
        for name in read_header(path)[1].keys() - {"__metadata__"}
    }
    assert index["weight_map"] == held
    size = sum(tensor.nbytes for tensor in load(tiny).values())
    assert index["metadata"] == {"total_size": size}


def test_one_layer_a_shard(tiny: Path) -> None:
    weight_map = read_json(tiny / "model.safetensors.index.json")["weight_map"]
    assert weight_map["language_model.model.layers.0.mlp_res_norm.weight"] == (
        "model-00001-of-000007.safetensors"
    )
    assert weight_map["language_model.lm_head.weight"] == "model-00005-of-000007.safetensors"
    assert weight_map["mm_projector.proj.0.weight"] == "model-00006-of-000007.safetensors"
    assert weight_map["vision_tower.patch_embed.proj.weight"] == ("model-00007-of-000007.safetensors")


class TestValues:
    @pytest.mark.parametrize("values", ["gaussian", "random"])
    def test_are_a_function_of_the_seed(self, tmp_path: Path, values: Values) -> None:
        first, again, other = (
            contents(write_checkpoint(tmp_path / name, values=values, seed=seed))
            for name, seed in (("first", 1), ("again", 1), ("other", 2))
        )
        assert first == again
        assert first.keys() == other.keys()
        differing = {name for name in first if first[name] != other[name]}
        assert differing == {name for name in first if name.endswith(".safetensors")}

    def test_are_a_function_of_the_name(self, tmp_path: Path, tiny: Path) -> None:
        # Fewer layers and no vision: what is left keeps its values.
        d = replace(TINY, layers=3, mla_layers=(), vision_blocks=0)
        part, whole = load(write_checkpoint(tmp_path / "part", dimensions=d)), load(tiny)
        assert part.keys() < whole.keys()
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name]), name

    def test_no_two_matrices_are_alike(self, tiny: Path) -> None:
        seen = {
            tensor.view(torch.uint8).numpy().tobytes()
            for tensor in load(tiny).values()
            if tensor.numel() > 1000
        }
        assert len(seen) == sum(tensor.numel() > 1000 for tensor in load(tiny).values())

    def test_gaussian_magnitudes(self, plain: Path) -> None:
        for name, tensor in load(plain).items():
            mean = 1.0 if "norm" in name else 0.0
            # Six standard errors, and bf16's half-ulp at 1.
            tolerance = 6 * 0.05 / math.sqrt(tensor.numel()) + 2**-8
            assert tensor.double().mean().item() == pytest.approx(mean, abs=tolerance), name
            assert tensor.double().abs().max().item() < 1.5

    def test_mxfp4_stands_for_the_gaussian_weights(self, tiny: Path, plain: Path) -> None:
        # The checkpoint with plain experts holds what was compressed into the other one.
        converter = CompressedTensorsDequantizer(tiny)
        decompressed, expected = converter.process(load(tiny)), load(plain)
        assert decompressed.keys() == expected.keys()
        experts = 0
        for name, weight in expected.items():
            if ".experts." not in name:
                assert torch.equal(decompressed[name], weight), name
                continue
            experts += 1
            error = (decompressed[name].double() - weight.double()).norm() / weight.double().norm()
            # Two wrong nibbles or a wrong exponent give 0.5 and more, no rounding at all gives 0.
            assert 0.05 < error < 0.2, name
        assert experts == 3 * TINY.experts * 3

    def test_random_scales_spread_by_six(self, tmp_path: Path) -> None:
        found = load(write_checkpoint(tmp_path / "k3", values="random"))
        scales = torch.cat([t.flatten() for name, t in found.items() if name.endswith("_scale")])
        exponents = scales.unique().tolist()
        assert exponents == list(range(exponents[0], exponents[0] + 7))
        packed = torch.cat([t.flatten() for name, t in found.items() if name.endswith("_packed")])
        counts = packed.bincount(minlength=256)
        assert counts.min() > 0.8 * counts.double().mean()

    def test_random_floats_are_finite_and_small(self, tmp_path: Path) -> None:
        for name, tensor in load(write_checkpoint(tmp_path / "k3", values="random")).items():
            if tensor.is_floating_point():
                magnitude = tensor.double().abs()
                assert magnitude.min() >= 2**-7, name
                assert magnitude.max() < 2**-3, name
                if tensor.numel() > 100:
                    assert tensor.min() < 0 < tensor.max(), name

    def test_random_floats_span_more_than_one_chunk(self, tmp_path: Path) -> None:
        d = replace(TINY, vocabulary=10_007, vision_blocks=0)  # 5,123,584 bytes
        found = load(write_checkpoint(tmp_path / "k3", values="random", dimensions=d))
        rows = found["language_model.lm_head.weight"]
        assert len(rows.unique(dim=0)) == d.vocabulary

    def test_sparse_reads_as_zeros(self, tmp_path: Path) -> None:
        found = load(write_checkpoint(tmp_path / "k3", values="sparse"))
        assert not any(tensor.any() for tensor in found.values())


class TestSideFiles:
    def test_config_nests_the_quantization_config(self, tiny: Path) -> None:
        config = read_json(tiny / "config.json")
        assert config["model_type"] == "kimi_k3"
        assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
        assert "quantization_config" not in config
        assert config["text_config"]["quantization_config"] == {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "format": "mxfp4-pack-quantized",
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": 32,
                        "dynamic": False,
                        "observer": "minmax",
                        "scale_dtype": "torch.uint8",
                    },
                }
            },
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
                "re:.*vision_tower.*",
                "re:.*mm_projector.*",
            ],
        }

    def test_plain_experts_have_no_quantization_config(self, plain: Path) -> None:
        assert "quantization_config" not in (plain / "config.json").read_text()

    def test_config_counts_layers_from_one(self, tiny: Path) -> None:
        text = read_json(tiny / "config.json")["text_config"]
        assert text["num_hidden_layers"] == TINY.layers
        assert text["linear_attn_config"]["full_attn_layers"] == [4]
        assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3]

    def test_every_file_that_auto_map_names_is_there(self, tiny: Path) -> None:
        named: set[str] = set()
        for path in tiny.glob("*.json"):
            for value in read_json(path).get("auto_map", {}).values():
                classes = value if isinstance(value, list) else [value]
                named |= {f"{name.split('.')[0]}.py" for name in classes if name}
        present = {path.name for path in tiny.glob("*.py")}
        assert named
        assert named <= present
        assert len(present) == 8
        for name in present:
            assert "synthetic" in (tiny / name).read_text().lower()

    def test_complete(self, tiny: Path) -> None:
        others = {path.name for path in tiny.iterdir() if path.suffix not in (".safetensors", ".py")}
        assert others == {
            "LICENSE",
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "preprocessor_config.json",
            "tiktoken.model",
            "tokenizer_config.json",
        }


class TestArguments:
    def test_refuses_a_folder_with_something_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="not an empty folder"):
            write_checkpoint(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_refuses_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "k3").write_text("mine")
        with pytest.raises(FileExistsError, match="not an empty folder"):
            write_checkpoint(tmp_path / "k3")

    def test_takes_an_empty_folder_and_a_string(self, tmp_path: Path) -> None:
        assert write_checkpoint(str(tmp_path), values="sparse") == tmp_path

    @pytest.mark.parametrize("argument", ["size", "values"])
    def test_refuses_an_unknown_choice_before_writing(self, tmp_path: Path, argument: str) -> None:
        choice: Any = {argument: "huge"}
        with pytest.raises(ValueError, match=f"{argument} must be one of .*, not 'huge'"):
            write_checkpoint(tmp_path / "k3", **choice)
        assert not (tmp_path / "k3").exists()

    def test_no_vision_and_no_dense_layer(self, tmp_path: Path) -> None:
        d = replace(TINY, layers=2, mla_layers=(1,), dense_layers=(), vision_blocks=0)
        folder = write_checkpoint(tmp_path / "k3", dimensions=d, values="random")
        assert sorted(path.name for path in folder.glob("*.safetensors")) == [
            f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3)
        ]
        assert "vision_config" not in read_json(folder / "config.json")
        found = load(folder)
        assert not any(name.startswith(("vision_tower", "mm_projector")) for name in found)
        assert not any(".mlp." in name for name in found)

    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        layers=st.integers(1, 3),
        hidden=st.integers(1, 40),
        heads=st.integers(1, 3),
        head_dim=st.integers(1, 9),
        latent=st.sampled_from([32, 96]),
        vocabulary=st.integers(1, 9),
        blocks=st.integers(0, 1),
        values=st.sampled_from(["gaussian", "random", "sparse"]),
        quantized=st.booleans(),
    )
    def test_any_dimensions_make_valid_files(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        layers: int,
        hidden: int,
        heads: int,
        head_dim: int,
        latent: int,
        vocabulary: int,
        blocks: int,
        values: Values,
        quantized: bool,
    ) -> None:
        d = replace(
            TINY,
            layers=layers,
            mla_layers=(layers - 1,),
            hidden=hidden,
            heads=heads,
            head_dim=head_dim,
            latent=latent,
            expert_intermediate=32,
            vocabulary=vocabulary,
            vision_blocks=blocks,
        )
        folder = write_checkpoint(
            tmp_path_factory.mktemp("any") / "k3",
            dimensions=d,
            values=values,
            quantized_experts=quantized,
        )
        # safetensors refuses offsets with gaps and files of the wrong length.
        found = load(folder)
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            spec.name: spec.shape for spec in tensors(d, quantized_experts=quantized)
        }


@pytest.mark.slow
class TestFullSize:
    def test_headers_account_for_every_byte(self, headers: dict[Path, tuple[int, dict[str, Any]]]) -> None:
        assert [path.name for path in headers] == [
            f"model-{n:05d}-of-000096.safetensors" for n in range(1, 97)
        ]
        for path, (length, header) in headers.items():
            assert length % 8 == 0
            end = 0
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, next_begin = entry["data_offsets"]
                    assert begin == end
                    assert begin % DTYPES[entry["dtype"]].itemsize == 0
                    end = next_begin
            assert path.stat().st_size == 8 + length + end

    def test_is_the_published_size_to_the_byte(self, headers: dict[Path, tuple[int, dict[str, Any]]]) -> None:
        # What moonshotai/Kimi-K3 takes on the Hub. Those sizes leave no room for `__metadata__`,
        # which is in our headers, so it is taken out before they are compared.
        def size_upstream(path: Path) -> int:
            length, header = headers[path]
            tensors_only = {name: header[name] for name in header if name != "__metadata__"}
            bare = len(json.dumps(tensors_only, separators=(",", ":")))
            return path.stat().st_size - length + bare + -bare % 8

        sizes = [size_upstream(path) for path in headers]
        assert sizes[0] == 2_341_216_112
        assert sizes[94:] == [92_289_328, 802_448_352]
        assert sum(sizes) == 1_560_936_091_448

    def test_takes_little_disk(self, full: Path) -> None:
        assert sum(path.stat().st_blocks * 512 for path in full.iterdir()) < 200e6

    def test_index(self, full: Path) -> None:
        index = read_json(full / "model.safetensors.index.json")
        assert index["metadata"]["total_size"] == 1_560_860_324_864
        assert len(index["weight_map"]) == 497_220
