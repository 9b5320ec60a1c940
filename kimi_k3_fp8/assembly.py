"""Assembly: staged shards become a checkpoint, and appear at the output path by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kimi_k3_fp8.checkpoint import CONFIG_NAME, INDEX_NAME, QUANTIZATION_KEYS, Files, Folder, read_header
from kimi_k3_fp8.planning import Plan
from kimi_k3_fp8.staging import Receipt, Staging, write_whole

#: This library's own record beside the weights.
RECORD_NAME = "kimi_k3_fp8.json"


def assemble(plan: Plan, staging: Staging) -> Path:
    """Put index, config and side files beside the staged shards. Returns their folder.

    What an earlier, interrupted assembly left is written anew, and shards of no job are removed.
    """
    folder = staging.shards
    planned = {job.shard for job in plan.jobs}
    for path in folder.rglob("*.safetensors"):
        if path.relative_to(folder).as_posix() not in planned:
            path.unlink()
    _write_index(folder)
    config = without_quantization_configs(plan.checkpoint.config)
    config["quantization_config"] = plan.recipe.expected_quantization_config()
    write_whole(folder / CONFIG_NAME, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    for name in plan.checkpoint.side_files:
        if name != CONFIG_NAME:
            _copy(plan.checkpoint.files, name, folder / name)
    return folder


def without_quantization_configs(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without any quantization config at any depth: the output has exactly one."""
    return {
        key: without_quantization_configs(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }


def write_record(folder: Path, plan: Plan, receipts: Sequence[Receipt], report: BaseModel) -> None:
    """Write kimi_k3_fp8.json: recipe, versions, source, checksums, and what validation found.

    It says nothing of the machine, the place or how often the run was continued: the same work gives
    the same file.
    """
    found = report.model_dump(mode="json", exclude={"checkpoint", "jobs_run", "jobs_kept"})
    found["problems"] = [p for p in found["problems"] if p["code"] != "resumed"]
    record = plan.record().model_dump(mode="json", exclude={"job_bytes"}) | {
        "fingerprint": plan.recipe.fingerprint,
        "sha256": {receipt.shard: receipt.sha256 for receipt in receipts},
        "validation": found,
    }
    write_whole(folder / RECORD_NAME, json.dumps(record, indent=1) + "\n")


def publish(folder: Path, target: Path) -> None:
    """Make the assembled folder appear at the output path, whole. What was there is replaced."""
    replaced = target.with_name(f"{target.name}.replaced-{os.getpid()}")
    if target.is_dir() and any(target.iterdir()):
        os.rename(target, replaced)
    os.rename(folder, target)
    _flush_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_index(folder: Path) -> None:
    files = Folder(folder)
    held = [
        tensor
        for name, size in files.sizes().items()
        if name.endswith(".safetensors")
        for tensor in read_header(files, name, size)[1]
    ]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in held)},
        "weight_map": {t.name: t.shard for t in sorted(held)},
    }
    write_whole(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def _copy(files: Files, name: str, target: Path) -> None:
    """The content as a new file with an ordinary mode; links are not copied as links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(files.fetch(name), target)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
