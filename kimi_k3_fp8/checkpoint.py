"""Checkpoint: what the headers say. No tensor data is read and torch is not imported.

A safetensors file is 8 bytes (the header's length, little endian), a JSON header, and the tensors'
bytes; each tensor's `data_offsets` count from the end of the header.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol, TypeVar

from kimi_k3_fp8.errors import Problem, SourceError, note

#: Bits of one element, by safetensors' spelling of the dtype (safetensors 0.8, `Dtype`).
DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_T = TypeVar("_T")

CONFIG_NAME = "config.json"
#: Keys under which config.json may describe a quantization, at any depth.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: Weights in formats that can run code or that belong to other programs: never opened, never copied.
OTHER_WEIGHTS = (
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".pickle",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
)
#: What may be a Hub repository: "org/name".
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
#: safetensors refuses longer headers, and so do we: 100 MB.
LONGEST_HEADER = 100_000_000


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint: where it lies and what its header says. `start` and `nbytes` are
    bytes; `start` counts from the beginning of the shard's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    nbytes: int

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One safetensors file. `size` and `header_size` (with its 8 bytes of length) are bytes."""

    name: str
    size: int
    header_size: int
    header_sha256: str
    metadata: Mapping[str, str]


class Files(Protocol):
    """Where a checkpoint's files are. `checkpoint` needs no more than this to read one."""

    @property
    def source(self) -> str: ...

    def sizes(self) -> dict[str, int]:
        """Every file below the root, by its relative name with forward slashes, and its bytes."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of one file; fewer where the file ends earlier."""

    def identity(self, name: str) -> str:
        """A text that changes when the file does."""

    def fetch(self, name: str) -> Path:
        """A local file with the content of that one, fetched if it is not here yet."""

    def map(self, read: Callable[[str], _T], names: Sequence[str]) -> Iterator[_T]:
        """`read` of each name, in order; several at once where that is quicker."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Files in a local folder. Links to files are followed, links to folders are not."""

    path: Path

    @property
    def source(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        found = {}
        for root, _, names in os.walk(self.path):
            for name in names:
                file = Path(root, name)
                if file.is_file():
                    found[file.relative_to(self.path).as_posix()] = file.stat().st_size
        return dict(sorted(found.items()))

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with open(self.path / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def identity(self, name: str) -> str:
        stat = (self.path / name).stat()
        return f"{stat.st_size} bytes, mtime {stat.st_mtime_ns}"

    def fetch(self, name: str) -> Path:
        return self.path / name

    def map(self, read: Callable[[str], _T], names: Sequence[str]) -> Iterator[_T]:
        return map(read, names)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its headers describe it, and everything that is wrong with it so far.

    weight_map is the index's (tensor -> shard); tensors holds what the shards' headers say of the
    tensors the index names. side_files are copied to an output; left_out are not, with the reason.
    """

    files: Files
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: Mapping[str, ShardInfo]
    side_files: tuple[str, ...]
    left_out: Mapping[str, str]
    index_name: str | None
    total_size: int | None
    problems: tuple[Problem, ...]

    @property
    def source(self) -> str:
        return self.files.source

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def quantization_configs(self) -> dict[str, dict[str, Any]]:
        """Every quantization config in config.json, by its path, in the order loaders look."""
        found = dict(find_quantization_configs(self.config))
        order = ["quantization_config", "text_config.quantization_config", "compression_config"]
        return {path: found[path] for path in sorted(found, key=lambda p: (*map(p.__ne__, order), p))}

    def identity(self) -> dict[str, str]:
        """What tells this source from another or from an altered one: a text a file."""
        names = [CONFIG_NAME, *([self.index_name] if self.index_name else []), *self.shards]
        return {name: self.files.identity(name) for name in names} | {
            f"{name} (header)": shard.header_sha256 for name, shard in self.shards.items()
        }


def find_quantization_configs(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every `quantization_config` and `compression_config` in a config.json, at any depth."""
    for key, value in config.items():
        if key in QUANTIZATION_KEYS:
            if value is not None:
                yield path + key, value
        elif isinstance(value, Mapping):
            yield from find_quantization_configs(value, f"{path}{key}.")


def find_source(source: str | os.PathLike[str], revision: str | None = None) -> Files:
    """The files behind what a caller names: a folder, else a repository of the Hub ("org/name").

    revision: a branch, tag or commit of a Hub repository. Raises SourceError where there is neither,
    ValueError for a revision of a folder.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a folder; only a Hub repository has revisions")
        return Folder(path.resolve())
    if not path.exists() and _HUB_ID.fullmatch(os.fspath(source)):
        from kimi_k3_fp8.hub import open_repository

        return open_repository(os.fspath(source), revision)
    what = "is a file, not a folder" if path.exists() else "does not exist"
    raise SourceError(f"{source} {what}; point to the folder that holds config.json and the shards")


def read_checkpoint(files: Files) -> Checkpoint:
    """Read config, index and every shard's header. Findings are in `.problems`; nothing is raised
    for a bad checkpoint, and only headers and JSON files are read."""
    sizes = files.sizes()
    problems: list[Problem] = []
    config = _read_json(files, CONFIG_NAME, sizes, "config-unreadable", problems)
    index_name, index = _read_index(files, sizes, problems)

    weight_map: dict[str, str] = {}
    total_size = None
    if index is not None:
        weight_map = _checked_weight_map(index, index_name, problems)
        metadata = index.get("metadata")
        total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    shard_names = sorted(set(weight_map.values())) if index is not None else [SINGLE_NAME]

    tensors: dict[str, TensorInfo] = {}
    shards: dict[str, ShardInfo] = {}
    if index is not None or (index_name is None and not problems):
        problems += [_missing_shard(name, index_name, sizes) for name in shard_names if name not in sizes]
    present = [name for name in shard_names if name in sizes]

    def read(name: str) -> tuple[ShardInfo, list[TensorInfo]] | HeaderError:
        try:
            return read_header(files, name, sizes[name])
        except HeaderError as error:
            return error

    for name, found in zip(present, files.map(read, present), strict=True):
        if isinstance(found, HeaderError):
            problems.append(found.problem)
            continue
        shard, held = found
        shards[name] = shard
        for tensor in held:
            if index is None or weight_map.get(tensor.name) == name:
                tensors[tensor.name] = tensor
            else:
                problems.append(_not_in_index(tensor, weight_map.get(tensor.name)))
    problems += [
        Problem(
            code="index-mismatch",
            subject=tensor,
            message=f"the index says it is in {shard}, but that shard does not hold it",
            fix="download the shard and the index again from the same revision",
        )
        for tensor, shard in weight_map.items()
        if tensor not in tensors and shard in shards
    ]
    side_files, left_out = _sort_files(sizes, set(shards) | set(shard_names), index_name)
    problems += [note("left-out", name, reason) for name, reason in left_out.items()]
    return Checkpoint(
        files=files,
        config=config or {},
        tensors=tensors,
        shards=shards,
        side_files=side_files,
        left_out=left_out,
        index_name=index_name if index is not None else None,
        total_size=total_size,
        problems=tuple(problems),
    )


def lay_out(
    shard: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[TensorInfo, ...]]:
    """The beginning of a shard's file for tensors of (name, dtype, shape), and where each will lie.

    Wide dtypes come first, then by name, as safetensors writes them: every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BITS[tensor[1]], tensor[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in ordered:
        begin, end = end, end + DTYPE_BITS[dtype] * prod(shape) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    placed = (
        TensorInfo(name, dtype, shape, shard, base + begin, stop - begin)
        for name, dtype, shape in ordered
        for begin, stop in (header[name]["data_offsets"],)
    )
    return len(text).to_bytes(8, "little") + text, tuple(placed)


class HeaderError(Exception):
    """A shard whose header cannot be trusted. Internal to reading: it carries the Problem."""

    def __init__(self, code: str, shard: str, message: str) -> None:
        fix = f"download {shard} again; its bytes are not those of a complete safetensors file"
        self.problem = Problem(code=code, subject=shard, message=message, fix=fix)
        super().__init__(message)


def read_header(files: Files, name: str, size: int) -> tuple[ShardInfo, list[TensorInfo]]:
    """One shard's header, checked as safetensors does: offsets contiguous, bytes = shape x dtype, and
    the file exactly as long as the header says. Raises HeaderError.

    `size` is the file's length in bytes. The tensors come in the order they lie in the file.
    """
    if size < 8:
        raise HeaderError("shard-truncated", name, f"it is {size} bytes long, too short for a header")
    length = int.from_bytes(files.read(name, 0, 8), "little")
    if length > min(size - 8, LONGEST_HEADER):
        message = f"its header says it is {length:,} bytes long, but the file has {size:,}"
        raise HeaderError("shard-unreadable", name, message)
    raw = files.read(name, 8, length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", None) or {}
        entries = [
            (tuple(entry["data_offsets"]), key, entry["dtype"], tuple(entry["shape"]))
            for key, entry in header.items()
        ]
        entries.sort()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise HeaderError("shard-unreadable", name, f"its header is not one: {error!r}") from error
    base, end, tensors = 8 + length, 0, []
    for offsets, key, dtype, shape in entries:
        if len(offsets) != 2 or offsets[0] != end or offsets[1] < offsets[0]:
            message = f"tensor {key}: bytes {offsets} do not follow the tensor before it, which ends at {end}"
            raise HeaderError("shard-unreadable", name, message)
        begin, end = offsets
        bits = DTYPE_BITS.get(dtype)
        if bits is not None and bits * prod(shape) != 8 * (end - begin):
            message = f"tensor {key}: {end - begin} bytes are not {dtype} {list(shape)}"
            raise HeaderError("shard-unreadable", name, message)
        tensors.append(TensorInfo(key, dtype, shape, name, base + begin, end - begin))
    if base + end != size:
        kind = "shorter" if size < base + end else "longer"
        message = f"it is {kind} than its header says: {size:,} bytes, not {base + end:,}"
        raise HeaderError("shard-truncated", name, message)
    return ShardInfo(name, size, base, hashlib.sha256(raw).hexdigest(), metadata), tensors


def _read_json(
    files: Files, name: str, sizes: Mapping[str, int], code: str, problems: list[Problem]
) -> dict[str, Any] | None:
    if name not in sizes:
        message, data = "it is not there", None
    else:
        try:
            data = json.loads(files.read(name))
            message = f"it holds {type(data).__name__}, not an object"
        except ValueError as error:
            message, data = f"it is not JSON: {error}", None
    if isinstance(data, dict):
        return data
    problems.append(
        Problem(code=code, subject=name, message=message, fix=f"put the model's own {name} there")
    )
    return None


def _read_index(
    files: Files, sizes: Mapping[str, int], problems: list[Problem]
) -> tuple[str | None, dict[str, Any] | None]:
    weights = [name for name in sizes if name.endswith(".safetensors")]
    indices = [name for name in sizes if name.endswith(".safetensors.index.json") and "/" not in name]
    if not weights and not indices:
        others = [name for name in sizes if name.endswith(OTHER_WEIGHTS)]
        problems.append(
            Problem(
                code="no-safetensors",
                subject=files.source,
                message="it holds no .safetensors file"
                + (f", only {others[0]}, which is never opened" if others else ""),
                fix="point to the folder that holds config.json and the model's .safetensors files",
            )
        )
        return None, None
    if INDEX_NAME in indices or len(indices) == 1:
        name = INDEX_NAME if INDEX_NAME in indices else indices[0]
        return name, _read_json(files, name, sizes, "index-unreadable", problems)
    if SINGLE_NAME in weights and not indices:
        return None, None
    found = ", ".join(indices) if indices else f"{len(weights)} shards and no index"
    problems.append(
        Problem(
            code="index-unreadable",
            subject=INDEX_NAME,
            message=f"there is {found}, so nothing says which tensors make up the model",
            fix=f"put the model's own {INDEX_NAME} there",
        )
    )
    return INDEX_NAME, None


def _checked_weight_map(
    index: Mapping[str, Any], index_name: str | None, problems: list[Problem]
) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        problems.append(
            Problem(
                code="index-unreadable",
                subject=str(index_name),
                message="its weight_map does not map tensor names to file names",
                fix=f"put the model's own {index_name} there",
            )
        )
        return {}
    unsafe = {shard for shard in set(weight_map.values()) if not _is_safe(shard)}
    problems += [
        Problem(
            code="unsafe-name",
            subject=shard,
            message=f"{index_name} names a shard outside the checkpoint's folder, or not a safetensors file",
            fix="do not use this checkpoint; an honest index names .safetensors files beside it",
        )
        for shard in sorted(unsafe)
    ]
    return {name: shard for name, shard in weight_map.items() if shard not in unsafe}


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and not re.search(r"[\\:\0]", name)
    return inside and name.endswith(".safetensors")


def _missing_shard(name: str, index_name: str | None, sizes: Mapping[str, int]) -> Problem:
    return Problem(
        code="shard-missing",
        subject=name,
        message=f"{index_name or 'a checkpoint without an index'} needs it, but it is not there",
        fix="finish the download, or take the index of the revision you have",
    )


def _not_in_index(tensor: TensorInfo, elsewhere: str | None) -> Problem:
    where = f"the index says it is in {elsewhere}" if elsewhere else "the index does not name it"
    return Problem(
        code="index-mismatch",
        subject=tensor.name,
        message=f"{tensor.shard} holds it, but {where}",
        fix="download the shard and the index again from the same revision",
    )


def _sort_files(
    sizes: Mapping[str, int], shards: set[str], index_name: str | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    side_files, left_out = [], {}
    for name in sizes:
        parts = PurePosixPath(name).parts
        if name in shards or name == index_name:
            continue
        if name.endswith(".safetensors"):
            left_out[name] = "the index does not name it"
        elif name.endswith(OTHER_WEIGHTS):
            left_out[name] = "weights in another format are neither opened nor copied"
        elif name.endswith(".index.json"):
            left_out[name] = "an index of other weights"
        elif any(part.startswith(".") or part == "__pycache__" for part in parts):
            left_out[name] = "caches and hidden files stay behind"
        else:
            side_files.append(name)
    return tuple(side_files), left_out
