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
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kimi_k3_fp8.architecture import MXFP4_GROUP, Dimensions, tensors
from kimi_k3_fp8.checkpoint import CONFIG_NAME, INDEX_NAME, TensorInfo, lay_out

if TYPE_CHECKING:
    import torch

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
    sizes: dict[str, tuple[Dimensions, Values]] = {
        "tiny": (Dimensions.tiny(), "gaussian"),
        "full": (Dimensions(), "sparse"),
    }
    contents: dict[str, _Content] = {"gaussian": _gaussian, "random": _random, "sparse": _nothing}
    if size not in sizes:
        raise ValueError(f"size must be one of {', '.join(sizes)}, not {size!r}")
    dimensions, values = dimensions or sizes[size][0], values or sizes[size][1]
    if values not in contents:
        raise ValueError(f"values must be one of {', '.join(contents)}, not {values!r}")

    folder = Path(path)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)

    weight_map: dict[str, str] = {}
    total_size = 0
    specs = tensors(dimensions, quantized_experts=quantized_experts)
    for number, group in groupby(specs, key=lambda spec: spec.shard):
        shard = f"model-{number + 1:05d}-of-{dimensions.shards:06d}.safetensors"
        header, placed = lay_out(shard, [spec[:3] for spec in group], {"format": "pt"})
        nbytes = sum(tensor.nbytes for tensor in placed)
        with (folder / shard).open("wb") as file:
            file.write(header)
            for tensor in placed:
                for chunk in contents[values](tensor, seed):
                    file.write(chunk.numpy().data)
            file.truncate(len(header) + nbytes)
        weight_map |= {tensor.name: shard for tensor in placed}
        total_size += nbytes

    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    for name, content in (_side_files(dimensions, quantized_experts) | {INDEX_NAME: index}).items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text)
    return folder


# --- values

_Content = Callable[[TensorInfo, int], Iterator["torch.Tensor"]]


def _generator(seed: int, name: str) -> torch.Generator:
    import torch

    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


def _nothing(spec: TensorInfo, seed: int) -> Iterator[torch.Tensor]:
    """No bytes: the tensor is a hole in the file."""
    return iter(())


def _random(spec: TensorInfo, seed: int) -> Iterator[torch.Tensor]:
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


def _gaussian(spec: TensorInfo, seed: int) -> Iterator[torch.Tensor]:
    """Bytes of one tensor as `uint8` chunks, from normally distributed weights."""
    import torch

    if spec.dtype == "U8":
        rows, columns = spec.shape
        columns *= {"weight_packed": 2, "weight_scale": MXFP4_GROUP}[spec.parameter]
        yield _mxfp4(spec.module, (rows, columns), seed)[spec.parameter].flatten()
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

    config = _json_files()[CONFIG_NAME]["text_config"]["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    # The weight that `quantized_experts=False` writes, drawn in the same way.
    spec = TensorInfo(f"{module}.weight", "BF16", shape, "", 0, 2 * shape[0] * shape[1])
    weight = torch.cat(list(_gaussian(spec, seed))).view(torch.bfloat16).view(shape)
    groups = weight.view(shape[0], -1, scheme.weights.group_size)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    compressed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return dict(compressed)


# --- config and side files

_PYTHON_FILES = (
    *("configuration_kimi_k3", "configuration_kimi_linear", "kimi_k3_processor", "media_utils"),
    *("kimi_k3_vision_processing", "modeling_kimi_k3", "modeling_kimi_linear", "tokenization_kimi"),
)


def _json_files() -> dict[str, Any]:
    """What the JSON files of every size hold, by name."""
    files: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return files


def _side_files(d: Dimensions, quantized: bool) -> dict[str, Any]:
    """Every file without weights: its text, or what it holds as JSON."""
    files = _json_files()
    config, numbers = files[CONFIG_NAME], range(1, d.layers + 1)  # layers from 1, as upstream
    config["text_config"] |= {
        "vocab_size": d.vocabulary,
        "hidden_size": d.hidden,
        "num_hidden_layers": d.layers,
        "linear_attn_config": {
            "full_attn_layers": [n for n in numbers if n - 1 in d.mla_layers],
            "kda_layers": [n for n in numbers if n - 1 not in d.mla_layers],
        },
        "first_k_dense_replace": len(d.dense_layers),
        "num_experts": d.experts,
    }
    if not quantized:
        del config["text_config"]["quantization_config"]
    if d.vision_blocks:
        config["vision_config"] = {"vt_num_hidden_layers": d.vision_blocks}
    files["preprocessor_config.json"]["patch_size"] = d.patch
    # One rank for each byte, in tiktoken's own format.
    ranks = (f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    notice = "Synthetic Kimi-K3 checkpoint, written by kimi_k3_fp8.synthetic"
    files |= {
        "tiktoken.model": "".join(ranks),
        "README.md": f"# {notice}\n\nIts weights mean nothing.\n",
        "LICENSE": f"{notice}: there is nothing in it to license.\n",
    }
    return files | {f"{name}.py": f'"""{notice}: a placeholder without code."""\n' for name in _PYTHON_FILES}
