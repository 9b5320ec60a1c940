"""Small Kimi-K3 checkpoints, and what the plain LLM Compressor script makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kimi_k3_fp8 import quantize
from kimi_k3_fp8.checkpoint import lay_out
from kimi_k3_fp8.synthetic import write_checkpoint

#: The ignore list of the published model card, written out once more on purpose: the reference
#: shares nothing with the library.
CARD_IGNORE = [
    "re:.*embed_tokens.*",
    "re:.*self_attn.*",
    r"re:.*block_sparse_moe\.gate.*",
    "re:.*self_attention_res_proj.*",
    "re:.*mlp_res_proj.*",
    "re:.*output_attn_res_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
]


class Inline(Executor):
    """Runs each job at once in this process: LLM Compressor is imported only once for all tests."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def run_plain_script(source: Path, output: Path, ignore: list[str] | None = None) -> Path:
    """The script of the published model card, on a local folder and the CPU."""
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
    from llmcompressor import model_free_ptq

    ignore = CARD_IGNORE if ignore is None else ignore
    model_free_ptq(
        model_stub=source,
        save_directory=output,
        scheme="FP8_BLOCK",
        ignore=ignore,
        converter=CompressedTensorsDequantizer(source, ignore=ignore),
        max_workers=1,
        device="cpu",
    )
    return output


Tensors = dict[str, tuple[str, list[int], bytes]]


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of a folder's shards, read by safetensors: dtype, shape, bytes."""
    import torch

    found: Tensors = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert name not in found, f"{name} is in two shards"
                found[name] = (file.get_slice(name).get_dtype(), list(tensor.shape), data)
    return found


def write_shard(path: Path, tensors: Iterable[tuple[str, str, list[int], bytes]]) -> None:
    """A safetensors file of the given tensors, whatever they are."""
    held = {name: data for name, _, _, data in tensors}
    header, placed = lay_out(path.name, [(n, d, tuple(s)) for n, d, s, _ in tensors], {"format": "pt"})
    path.write_bytes(header + b"".join(held[tensor.name] for tensor in placed))


def edit_shard(path: Path, edit: Callable[[Tensors], None]) -> None:
    """Read a shard, change its tensors in a dictionary, write it back."""
    tensors = read_tensors_of(path)
    edit(tensors)
    write_shard(path, [(name, *value) for name, value in tensors.items()])


def read_tensors_of(path: Path) -> Tensors:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            e["dtype"],
            e["shape"],
            raw[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]],
        )
        for name, e in header.items()
    }


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def reindex(folder: Path) -> None:
    """Write the index anew from what the shards hold."""
    names = {path.name: read_tensors_of(path) for path in sorted(folder.glob("*.safetensors"))}
    index = {
        "metadata": {"total_size": sum(len(v[2]) for held in names.values() for v in held.values())},
        "weight_map": {tensor: shard for shard, held in names.items() for tensor in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint. Never changed: tests that do so take `source`."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "Kimi-K3")


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to be spoiled."""
    return Path(shutil.copytree(tiny, tmp_path / "Kimi-K3"))


@pytest.fixture(scope="session")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the plain script makes of the tiny checkpoint."""
    return run_plain_script(tiny, tmp_path_factory.mktemp("plain") / "output")


@pytest.fixture(scope="session")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `quantize` makes of the tiny checkpoint, in several jobs. Never changed."""
    output = tmp_path_factory.mktemp("converted") / "output"
    quantize(tiny, output, max_shard_size="1MB", executor=Inline(), card=False, progress=False)
    return output


@pytest.fixture
def output(converted: Path, tmp_path: Path) -> Path:
    """A copy of the converted checkpoint to be spoiled."""
    return Path(shutil.copytree(converted, tmp_path / "Kimi-K3-FP8-BLOCK"))
