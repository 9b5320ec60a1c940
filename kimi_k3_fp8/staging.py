"""Staging: the folder a run works in, beside the output path and on the same file system.

    Kimi-K3-FP8-BLOCK.partial/
    ├── lock                     held by the one process that runs
    ├── plan.json                RunRecord: what decides the bytes, and the size of a job
    ├── receipts/00001.json      Receipt: written last by each job
    ├── shards/                  finished shards; becomes the output by one rename
    │   └── model-00001-of-00564.safetensors
    ├── scratch/                 what running jobs are working on; worthless once they are gone
    ├── source/                  shards of a Hub repository while jobs need them (see hub.Shelf)
    └── logs/worker-0.log        what LLM Compressor says while it works

Every file is written under another name, flushed, and renamed, so that a file that is there is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kimi_k3_fp8.fidelity import Fidelity
from kimi_k3_fp8.recipe import Recipe

_Model = TypeVar("_Model", bound=BaseModel)

#: The packages whose release may change output bytes or the cut into jobs.
VERSIONS_THAT_MATTER = ("kimi-k3-fp8", "llmcompressor", "compressed-tensors", "torch")


def current_versions() -> dict[str, str]:
    """Installed versions; torch's without its build ("+cpu"), which changes no byte."""
    return {name: version(name).partition("+")[0] for name in VERSIONS_THAT_MATTER}


class RunRecord(BaseModel):
    """What a run was begun with. A later call continues it only if none of this differs."""

    model_config = ConfigDict(frozen=True)

    source: str
    identity: dict[str, str]
    recipe: Recipe
    versions: dict[str, str]
    job_bytes: int

    def differences(self, now: RunRecord, unread: Set[str] = frozenset()) -> tuple[str, ...]:
        """What differs between this record and another, in words. The job size does not count, and
        neither do the contents of files that no finished job has read; their headers do."""
        found = []
        if self.recipe.fingerprint != now.recipe.fingerprint:
            fields = ("ignore", "scheme", "block_scales", "dequantize_dtype")
            for field in fields:
                then, wanted = getattr(self.recipe, field), getattr(now.recipe, field)
                if field == "ignore":
                    then, wanted = self.recipe.ignore_patterns, now.recipe.ignore_patterns
                if then != wanted:
                    found.append(f"recipe: {field} was {then}, is {wanted}")
        before, after = (
            {name: text for name, text in record.identity.items() if name not in unread}
            for record in (self, now)
        )
        changed = [*_changes("source", before, after)]
        if changed and self.source != now.source:  # a Hub source names its commit
            found.append(f"source was {self.source}, is {now.source}")
        found += changed
        found += _changes("version of", self.versions, now.versions)
        return tuple(found)


class Receipt(BaseModel):
    """What a finished job leaves behind. Sizes are bytes; `mtime_ns` is the shard's file time."""

    model_config = ConfigDict(frozen=True)

    job: int
    shard: str
    size: int
    mtime_ns: int
    header_sha256: str
    sha256: str
    engine: str
    seconds: float
    fidelity: tuple[Fidelity, ...] = ()


@dataclass(frozen=True, slots=True)
class Staging:
    """Paths and records of one staging folder. Nothing here is created by asking for it."""

    path: Path

    @classmethod
    def beside(cls, output: Path) -> Staging:
        return cls(output.with_name(output.name + ".partial"))

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    @property
    def scratch(self) -> Path:
        return self.path / "scratch"

    @property
    def source(self) -> Path:
        return self.path / "source"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def record(self) -> RunRecord | None:
        """What the run here was begun with; None where none was, or its record cannot be read."""
        return _read(self.path / "plan.json", RunRecord)

    def begin(self, record: RunRecord) -> None:
        for folder in (self.path / "receipts", self.shards, self.scratch, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "plan.json", record.model_dump_json(indent=1))

    def receipts(self) -> Iterator[Receipt]:
        """Receipts of jobs whose shard is still as the job left it."""
        for path in sorted((self.path / "receipts").glob("*.json")):
            receipt = _read(path, Receipt)
            if receipt is not None and self._is_intact(receipt):
                yield receipt

    def has_receipts(self) -> bool:
        return any((self.path / "receipts").glob("*.json"))

    def keep(self, receipt: Receipt) -> None:
        path = self.path / "receipts" / f"{receipt.job:05}.json"
        write_whole(path, receipt.model_dump_json(indent=1))

    def staged_bytes(self) -> int:
        """Bytes of the shards that are here already."""
        files = self.shards.glob("*.safetensors") if self.shards.is_dir() else ()
        return sum(file.stat().st_size for file in files)

    def _is_intact(self, receipt: Receipt) -> bool:
        """Size and header always; the whole checksum only if the file's time has moved."""
        path = self.shards / receipt.shard
        try:
            stat = path.stat()
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(length) if length < receipt.size else b""
        except OSError:
            return False
        if stat.st_size != receipt.size or hashlib.sha256(header).hexdigest() != receipt.header_sha256:
            return False
        return stat.st_mtime_ns == receipt.mtime_ns or sha256_of(path) == receipt.sha256


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, even after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(path: Path, model: type[_Model]) -> _Model | None:
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def _changes(what: str, then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*then, *now)):
        before, after = then.get(name, "absent"), now.get(name, "absent")
        if before != after:
            yield f"{what} {name} was {before}, is {after}"
