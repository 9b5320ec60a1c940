"""LLM Compressor on one view: the default engine, and the only caller of `model_free_ptq`.

A view is a folder of links to the source's shards with an index that names one job's tensors only, so
the public entry point is used as it is and memory is bounded by the job, not by the source's shards.

    view/  config.json                     the source's quantization_config at top level
           model.safetensors.index.json    this job's tensors
           source-00001.safetensors        -> a shard of the source
           pairs.safetensors               MXFP4 pairs that lie in two shards, copied side by side
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from llmcompressor import model_free_ptq
from transformers.initialization import no_init_weights

from kimi_k3_fp8.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    Folder,
    TensorInfo,
    lay_out,
    read_header,
)
from kimi_k3_fp8.errors import EngineError
from kimi_k3_fp8.recipe import Recipe

Locate = Callable[[str], Path]


def default_device() -> str:
    """The first accelerator this process sees, else the CPU, by torch's name."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return f"{accelerator.type}:0" if accelerator is not None else "cpu"


def convert(
    tensors: Sequence[TensorInfo],
    locate: Locate,
    recipe: Recipe,
    source_config: Mapping[str, Any] | None,
    folder: Path,
    device: str,
) -> dict[str, tuple[Path, TensorInfo]]:
    """Run `model_free_ptq` on these tensors of the source; say where each output tensor lies.

    tensors: a dependency-closed set. locate: the local file of a source shard. source_config: the MXFP4
    quantization_config of the source, None for a source that is not quantized. folder: an empty
    folder for the view and the output. Raises EngineError if LLM Compressor does not write the
    quantization_config that the recipe expects.
    """
    view, output = folder / "view", folder / "output"
    _make_view(view, tensors, locate, source_config)
    converter = None
    if source_config is not None:
        dtype = getattr(torch, recipe.dequantize_dtype)
        converter = CompressedTensorsDequantizer(view, ignore=recipe.ignore_patterns, dtype=dtype)
    with no_init_weights():
        model_free_ptq(
            model_stub=view,
            save_directory=output,
            config=recipe.quantization_config(),
            converter=converter,
            device=device,
        )
    written = Folder(output)
    held = {
        tensor.name: (output / name, tensor)
        for name, size in written.sizes().items()
        if name.endswith(".safetensors")
        for tensor in read_header(written, name, size)[1]
    }
    if any(tensor.dtype == "F8_E4M3" for _, tensor in held.values()):
        _check_config(output, recipe)
    return held


def _make_view(
    view: Path,
    tensors: Sequence[TensorInfo],
    locate: Locate,
    source_config: Mapping[str, Any] | None,
) -> None:
    view.mkdir(parents=True)
    config: dict[str, Any] = {}
    if source_config is not None:  # LLM Compressor adds to `ignore`, so null will not do
        config["quantization_config"] = {**source_config, "ignore": source_config.get("ignore") or []}
    (view / CONFIG_NAME).write_text(json.dumps(config))
    shards: dict[str, set[str]] = defaultdict(set)
    for tensor in tensors:
        shards[tensor.module].add(tensor.shard)
    # LLM Compressor refuses a shard of which it needs only dependency tensors, as a pair in two
    # shards can leave one; copied into one file, such pairs are ordinary ones.
    apart = [tensor for tensor in tensors if len(shards[tensor.module]) > 1]
    whole = sorted({tensor.shard for tensor in tensors if len(shards[tensor.module]) == 1})
    links = {shard: f"source-{number:05}.safetensors" for number, shard in enumerate(whole, 1)}
    for shard, link in links.items():
        (view / link).symlink_to(locate(shard))
    weight_map = {tensor.name: links.get(tensor.shard, "") for tensor in tensors}
    if apart:
        _copy_together(view / "pairs.safetensors", apart, locate)
        weight_map |= dict.fromkeys((tensor.name for tensor in apart), "pairs.safetensors")
    (view / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _copy_together(path: Path, tensors: Sequence[TensorInfo], locate: Locate) -> None:
    header, placed = lay_out(path.name, [(t.name, t.dtype, t.shape) for t in tensors], {})
    origin = {tensor.name: tensor for tensor in tensors}
    with open(path, "wb") as file:
        file.write(header)
        for tensor in placed:
            source = origin[tensor.name]
            with open(locate(source.shard), "rb") as shard:
                shard.seek(source.start)
                file.write(shard.read(source.nbytes))


def _check_config(output: Path, recipe: Recipe) -> None:
    """What LLM Compressor wrote is what the recipe promises; only the observer's name may differ."""
    found = json.loads((output / CONFIG_NAME).read_text())["quantization_config"]
    for scheme in found["config_groups"].values():
        scheme["weights"]["observer"] = None
    expected = recipe.expected_quantization_config()
    if found != expected:
        keys = sorted(k for k in {*found, *expected} if found.get(k) != expected.get(k))
        wrote, wanted = ({key: config.get(key) for key in keys} for config in (found, expected))
        raise EngineError(
            f"quantization_config: {', '.join(keys)}",
            f"LLM Compressor wrote {wrote}, expected {wanted}",
            "use llmcompressor 0.14; another release may write another format",
        )
