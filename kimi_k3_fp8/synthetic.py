"""Kimi-K3 checkpoints without a download: tiny with real values, or full size as sparse files.

    <path>/
      model-00001-of-000096.safetensors ...   one decoder layer a shard, layer 0 first
      model.safetensors.index.json
      config.json                              its MXFP4 config nested in text_config, as upstream
      generation_config.json, tokenizer_config.json, preprocessor_config.json, tiktoken.model
      README.md, LICENSE, *.py                 placeholders, marked as synthetic

Names, shapes, dtypes and nesting are those of `moonshotai/Kimi-K3`. Values, Python files and the
config keys that FP8 conversion never reads are not: no such checkpoint can answer a question.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .architecture import Dimensions, TensorSpec, tensors

if TYPE_CHECKING:
    import torch

__all__ = ["Size", "Values", "write_checkpoint"]

Size = Literal["tiny", "full"]
Values = Literal["gaussian", "random", "sparse"]

_CHUNK = 4 << 20  # bytes drawn at a time, for all but gaussian routed experts


def write_checkpoint(
    path: str | Path,
    size: Size = "tiny",
    *,
    seed: int = 0,
    dimensions: Dimensions | None = None,
    values: Values | None = None,
    quantized_experts: bool = True,
) -> Path:
    """Write a synthetic Kimi-K3 checkpoint into the folder `path` and return it.

    `size` picks dimensions and values: "tiny" is `Dimensions.tiny()` with gaussian values (8 MB),
    "full" is the real model as sparse files (1.56 TB in size, about 130 MB on disk). `dimensions`
    and `values` replace either choice.

    Values are a function of `seed` and the tensor's name alone:

    - "gaussian": normal weights, routed experts compressed to MXFP4 by compressed-tensors.
    - "random": bits drawn directly, for many gigabytes. E8M0 bytes lie between 115 and 121, floats
      between 2^-7 and 2^-3 on either side of zero.
    - "sparse": holes, which read as zeros.

    `quantized_experts=False` writes routed experts as BF16 and no quantization config.

    Raises `FileExistsError` where `path` is a file or a folder that is not empty, `ValueError` for
    an unknown `size` or `values`.
    """
    defaults: dict[str, tuple[Dimensions, Values]] = {
        "tiny": (Dimensions.tiny(), "gaussian"),
        "full": (Dimensions(), "sparse"),
    }
    contents: dict[str, _Content | None] = {
        "gaussian": _gaussian,
        "random": _random,
        "sparse": None,
    }
    if size not in defaults:
        raise ValueError(f"size must be one of {', '.join(defaults)}, not {size!r}")
    dimensions = dimensions or defaults[size][0]
    values = values or defaults[size][1]
    if values not in contents:
        raise ValueError(f"values must be one of {', '.join(contents)}, not {values!r}")

    folder = Path(path)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)

    weight_map: dict[str, str] = {}
    total_size = 0
    specs = tensors(dimensions, quantized_experts=quantized_experts)
    for shard, group in groupby(specs, key=lambda spec: spec.shard):
        name = f"model-{shard + 1:05d}-of-{dimensions.shards:06d}.safetensors"
        members = list(group)
        _write_shard(folder / name, members, contents[values], seed)
        weight_map.update((spec.name, name) for spec in members)
        total_size += sum(spec.nbytes for spec in members)

    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_side_files(folder, dimensions)
    _write_json(folder / "config.json", _config(dimensions, quantized_experts))
    return folder


# --- shards -------------------------------------------------------------------------------------

_Content = Callable[[TensorSpec, int], Iterable["torch.Tensor"]]


def _write_shard(path: Path, specs: Iterable[TensorSpec], content: _Content | None, seed: int) -> None:
    """Write one safetensors file: 8 bytes of header length, JSON padded to 8 bytes, data."""
    # Widest items first keeps every tensor aligned, as the safetensors library does.
    ordered = sorted(specs, key=lambda spec: (spec.dtype == "U8", spec.dtype == "BF16", spec.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in ordered:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if content is None:
            file.truncate(file.tell() + end)
        else:
            for spec in ordered:
                for chunk in content(spec, seed):
                    file.write(chunk.numpy().data)


def _generator(seed: int, name: str) -> torch.Generator:
    import torch

    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


def _random(spec: TensorSpec, seed: int) -> Iterator[torch.Tensor]:
    """Bytes of one tensor as `uint8` chunks, from random bits."""
    import torch

    generator = _generator(seed, spec.name)
    for start in range(0, spec.nbytes, _CHUNK):
        size = min(_CHUNK, spec.nbytes - start)
        words = torch.empty(-(-size // 8), dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        drawn = words.view(torch.uint8)
        if spec.name.endswith(".weight_scale"):
            drawn.remainder_(7).add_(115)
        elif spec.dtype == "BF16":
            # The exponent's upper six bits are set: magnitudes from 2^-7 up to 2^-3.
            words.view(torch.int16).bitwise_and_(~0x7E00).bitwise_or_(0x3C00)
        elif spec.dtype == "F32":
            words.view(torch.int32).bitwise_and_(~0x7E000000).bitwise_or_(0x3C000000)
        yield drawn[:size]


def _gaussian(spec: TensorSpec, seed: int) -> Iterator[torch.Tensor]:
    """Bytes of one tensor as `uint8` chunks, from normally distributed weights."""
    import torch

    module, _, parameter = spec.name.rpartition(".")
    if spec.dtype == "U8":
        packed_columns = spec.shape[1] * (1 if parameter == "weight_packed" else 16)
        yield _mxfp4(module, (spec.shape[0], 2 * packed_columns), seed)[parameter].flatten()
        return
    generator = _generator(seed, spec.name)
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[spec.dtype]
    mean, deviation = (1.0, 0.05) if "norm" in spec.name else (0.0, 0.02)
    for start in range(0, spec.nbytes, _CHUNK):
        count = min(_CHUNK, spec.nbytes - start) // dtype.itemsize
        chunk = torch.randn(count, generator=generator).mul_(deviation).add_(mean)
        yield chunk.to(dtype).view(torch.uint8)


@lru_cache(maxsize=1)  # the two tensors of a module follow each other in the file
def _mxfp4(module: str, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
    """`weight_packed` and `weight_scale` of gaussian weights, from compressed-tensors."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme.model_validate(_QUANTIZATION_CONFIG["config_groups"]["group_0"])
    # The weight that `quantized_experts=False` writes, drawn in the same way.
    spec = TensorSpec(f"{module}.weight", "BF16", shape, 0)
    weight = torch.cat(list(_gaussian(spec, seed))).view(torch.bfloat16).view(shape)
    groups = weight.view(shape[0], -1, scheme.weights.group_size)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    compressed: dict[str, torch.Tensor] = compressor.compress(
        {"weight": weight, "weight_scale": scale}, scheme
    )
    return compressed


# --- config and side files ----------------------------------------------------------------------

_QUANTIZATION_CONFIG: dict[str, Any] = {
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
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def _config(d: Dimensions, quantized: bool) -> dict[str, Any]:
    full_attention = [layer + 1 for layer in d.mla_layers]  # 1-based, as upstream
    text_config: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": d.vocabulary,
        "hidden_size": d.hidden,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "head_dim": d.head_dim,
        "q_lora_rank": d.q_lora_rank,
        "kv_lora_rank": d.kv_lora_rank,
        "qk_nope_head_dim": d.head_dim,
        "qk_rope_head_dim": d.rope_dim,
        "v_head_dim": d.head_dim,
        "linear_attn_config": {
            "full_attn_layers": full_attention,
            "kda_layers": [n for n in range(1, d.layers + 1) if n not in full_attention],
            "num_heads": d.heads,
            "head_dim": d.head_dim,
            "short_conv_kernel_size": d.conv_kernel,
        },
        "intermediate_size": d.dense_intermediate,
        "first_k_dense_replace": len(d.dense_layers),
        "num_experts": d.experts,
        "num_shared_experts": d.shared_intermediate // d.expert_intermediate,
        "moe_intermediate_size": d.expert_intermediate,
        "routed_expert_hidden_size": d.latent,
    }
    config: dict[str, Any] = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "text_config": text_config,
    }
    if quantized:
        text_config["quantization_config"] = _QUANTIZATION_CONFIG
    if d.vision_blocks:
        config["vision_config"] = {
            "vt_num_hidden_layers": d.vision_blocks,
            "vt_hidden_size": d.vision_hidden,
            "vt_intermediate_size": d.vision_intermediate,
            "patch_size": d.patch,
            "init_pos_emb_height": d.vision_grid,
            "init_pos_emb_width": d.vision_grid,
        }
    return config


_PYTHON_FILES = (
    "configuration_kimi_k3",
    "configuration_kimi_linear",
    "kimi_k3_processor",
    "kimi_k3_vision_processing",
    "media_utils",
    "modeling_kimi_k3",
    "modeling_kimi_linear",
    "tokenization_kimi",
)


def _write_side_files(folder: Path, d: Dimensions) -> None:
    _write_json(folder / "generation_config.json", {"max_length": 4096})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        },
    )
    _write_json(
        folder / "preprocessor_config.json",
        {
            "auto_map": {
                "AutoProcessor": "kimi_k3_processor.KimiK3Processor",
                "AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor",
            },
            "patch_size": d.patch,
        },
    )
    # One rank for each byte, in tiktoken's own format.
    ranks = (f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    (folder / "tiktoken.model").write_text("".join(ranks))

    notice = "Synthetic Kimi-K3 checkpoint, written by kimi_k3_fp8.synthetic"
    (folder / "README.md").write_text(f"# {notice}\n\nIts weights mean nothing.\n")
    (folder / "LICENSE").write_text(f"{notice}: there is nothing in it to license.\n")
    for module in _PYTHON_FILES:
        (folder / f"{module}.py").write_text(f'"""{notice}: a placeholder without code."""\n')


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
