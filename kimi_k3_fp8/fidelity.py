"""Fidelity: how far stored values are from the source's, a module class at a time.

Plain reference arithmetic that shares nothing with the engines: NumPy tables written from the
formats' definitions, and float64, which holds every value here exactly.

A matrix is in one of three forms, told by its tensors:

    weight_packed U8 [out, in / 2], weight_scale U8 [out, in / 32]     MXFP4, low nibble first
    weight F8_E4M3 [out, in], weight_scale BF16, F16 or F32            FP8 in blocks of 128 x 128
        [ceil(out / 128), ceil(in / 128)]
    weight BF16, F16 or F32 [out, in]                                  plain
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from kimi_k3_fp8.architecture import module_class
from kimi_k3_fp8.checkpoint import DTYPE_BITS, Files, TensorInfo
from kimi_k3_fp8.errors import Problem

Floats = NDArray[Any]
Verify = Literal["off", "sampled", "full"]

#: One module in so many is compared by "sampled". A real matrix (3072 x 3584) takes 0.08 s of one core
#: to compare and 0.025 s to transcode, the fastest way to make one: 0.08 / 64 is 5 % of that.
SAMPLED_OF = 64

#: E4M3 has three bits of mantissa, so rounding moves a value by at most 1/16 of itself (smaller values
#: that underflow weigh nothing in a root mean square).
LARGEST_ERROR = 1 / 16

_BLOCK, _GROUP = 128, 32  # FP8_BLOCK's blocks, MXFP4's groups
_KINDS = {"U8": "u1", "F8_E4M3": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_FLOATS = ("BF16", "F16", "F32")
_STRIPE = 1 << 16  # elements compared at a time: 0.5 MB in float64, so that they stay in the cache
_PIECE = 1 << 24  # elements read at a time


class Fidelity(BaseModel):
    """What a comparison of values found for one class of modules.

    modules: compared, out of `of_modules` quantized ones of this class.
    elements: compared. Of these, `non_finite` have a NaN or an infinity on either side, and no part in
        the numbers that follow; `differing` have another value than in the source (-0.0 equals 0.0).
    squared_error, squared_value: sums over elements, of the difference and of the source's value.
    exponent_spread: largest difference of E8M0 exponents within a block of 128 x 128, over groups that
        have a weight other than zero; None where the source is not MXFP4.
    """

    model_config = ConfigDict(frozen=True)

    module_class: str
    modules: int = 0
    of_modules: int = 0
    elements: int = 0
    differing: int = 0
    non_finite: int = 0
    squared_error: float = 0.0
    squared_value: float = 0.0
    largest_error: float = 0.0
    exponent_spread: int | None = None

    @property
    def relative_rms_error(self) -> float:
        """Root mean square of the error over that of the source's values."""
        if not self.squared_value:
            return math.inf if self.squared_error else 0.0
        return math.sqrt(self.squared_error / self.squared_value)

    @property
    def exact(self) -> bool:
        """Whether every module was compared and every value is finite and the source's."""
        return 0 < self.modules == self.of_modules and not self.differing and not self.non_finite

    @property
    def verdict(self) -> str:
        """The finding in words; "exact" only for what is `exact`."""
        share = f"{self.modules:,} of {self.of_modules:,} modules"
        if self.exact:
            return "exact"
        if not self.modules:
            return f"not compared ({share})"
        found = []
        if self.differing:
            differing, error = map(_percent, (self.differing / self.elements, self.relative_rms_error))
            found.append(f"{differing} of elements differ, {error} relative RMS error")
        if self.non_finite:
            found.append(f"{self.non_finite:,} elements are not finite")
        if not found:
            return f"no difference found in the sample ({share})"
        return "; ".join(found) + (f" (in the sample: {share})" if self.modules < self.of_modules else "")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:#.3g}".rstrip(".") + " %"


_SUMS = ("modules", "of_modules", "elements", "differing", "non_finite", "squared_error", "squared_value")


def merged(records: Iterable[Fidelity]) -> tuple[Fidelity, ...]:
    """One record for each module class, in the order they first appear."""
    classes = defaultdict(list)
    for record in records:
        classes[record.module_class].append(record)
    return tuple(
        Fidelity(
            module_class=kind,
            largest_error=max(r.largest_error for r in group),
            exponent_spread=max(
                (r.exponent_spread for r in group if r.exponent_spread is not None), default=None
            ),
            **{field: sum(getattr(r, field) for r in group) for field in _SUMS},
        )
        for kind, group in classes.items()
    )


def fidelity_problems(records: Iterable[Fidelity]) -> Iterator[Problem]:
    """Values that no rounding explains: not finite, or farther off than E4M3 can be."""
    for record in records:
        if record.non_finite:
            yield Problem(
                code="non-finite",
                subject=record.module_class,
                message=f"{record.non_finite:,} of {record.elements:,} compared elements are NaN or infinite",
                fix="convert these modules again; compare the source's checksums first",
            )
        if record.relative_rms_error > LARGEST_ERROR:
            yield Problem(
                code="values-differ",
                subject=record.module_class,
                message=f"{record.verdict}; rounding to E4M3 explains at most {_percent(LARGEST_ERROR)}",
                fix="this is not the checkpoint that was made from this source; convert again",
                expected=LARGEST_ERROR,
                found=record.relative_rms_error,
            )


# --- which modules


def quantized_modules(outputs: Iterable[TensorInfo]) -> list[str]:
    """Names of the modules whose weight is FP8."""
    return [t.module for t in outputs if t.parameter == "weight" and t.dtype == "F8_E4M3"]


def sampled(names: Sequence[str], verify: Verify) -> list[str]:
    """The modules to compare: all of them, none, or in each class one of 64, and at least one.

    A sample is those whose names have the smallest SHA-256: it looks random and is the same each time.
    Raises ValueError for another word.
    """
    if verify not in ("off", "sampled", "full"):
        raise ValueError(f"verify is 'off', 'sampled' or 'full', not {verify!r}")
    if verify != "sampled":
        return list(names) if verify == "full" else []
    classes = defaultdict(list)
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        classes[module_class(name)].append(name)
    chosen = {name for some in classes.values() for name in some[: math.ceil(len(some) / SAMPLED_OF)]}
    return [name for name in names if name in chosen]


# --- the comparison


class Stored(NamedTuple):
    """One tensor as a checkpoint holds it: safetensors' dtype, the shape, its bytes (little endian)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


def measure(
    source: Files,
    inputs: Iterable[TensorInfo],
    output: Files,
    outputs: Iterable[TensorInfo],
    names: Iterable[str],
    *,
    as_loaded: bool = False,
) -> tuple[Fidelity, ...]:
    """Compare the named modules as they lie in two checkpoints. Returns one record a class.

    inputs, outputs: tensors of the source and of the output, each placed in a file of its side.
    `of_modules` counts all modules that are FP8 in outputs, and all that are named. A named module
    that is not on both sides, in the same shape and FP8 in the output, is counted and not compared.
    as_loaded: compare what a server with power-of-two scales makes of the output (see `requantized`).

    Reads at most 16 M elements of a matrix at a time. Raises OSError where a file cannot be read,
    ValueError where it ends within a tensor.
    """
    outputs, names = list(outputs), list(dict.fromkeys(names))
    sides = _by_module(inputs, names), _by_module(outputs, names)
    there = Counter(map(module_class, dict.fromkeys((*quantized_modules(outputs), *names))))
    found = [Fidelity(module_class=kind, of_modules=count) for kind, count in there.items()]
    for name in names:
        before, after = (side[name] for side in sides)
        if (shape := _common_shape(before, after)) is None:
            continue
        rows, columns = shape
        step = max(_PIECE // columns // _BLOCK, 1) * _BLOCK
        for start in range(0, rows, step):
            part = start, min(start + step, rows), rows
            piece = compare(
                module_class(name),
                {key: _read_rows(source, tensor, *part) for key, tensor in before.items()},
                {key: _read_rows(output, tensor, *part) for key, tensor in after.items()},
                as_loaded=as_loaded,
            )
            found.append(piece.model_copy(update={"modules": int(start == 0), "of_modules": 0}))
    return merged(found)


def compare(
    module_class: str, source: Mapping[str, Stored], output: Mapping[str, Stored], *, as_loaded: bool = False
) -> Fidelity:
    """Compare one FP8 matrix with its source, each given by its tensors, by parameter name.

    Needs a few MB besides. Raises ValueError where the source is in none of the three forms, the
    output is not FP8, the shapes differ, or a tensor's bytes are not as many as its shape says.
    """
    rows, columns = _checked(source, output)
    if as_loaded:
        output = requantized(output)
    whole = Fidelity(module_class=module_class, modules=1, of_modules=1)
    step = min(max(_STRIPE // columns, 1), _BLOCK)
    step = 1 << (step.bit_length() - 1)  # so that none crosses from a row of blocks to the next
    stripes = []
    for start in range(0, rows, step):
        with np.errstate(invalid="ignore"):
            value, error = (_values(side, start, start + step).ravel() for side in (source, output))
            error -= value
        elements, finite = error.size, np.isfinite(error)
        if not finite.all():
            value, error = value[finite], error[finite]
        stripes.append(
            Fidelity(
                module_class=module_class,
                elements=elements,
                differing=int(np.count_nonzero(error)),
                non_finite=elements - error.size,
                squared_error=float(np.einsum("i,i->", error, error)),
                squared_value=float(np.einsum("i,i->", value, value)),
                largest_error=float(np.abs(error).max(initial=0)),
            )
        )
    spread = _exponent_spread(source) if "weight_packed" in source else None
    return merged((whole, *stripes))[0].model_copy(update={"exponent_spread": spread})


def requantized(fp8: Mapping[str, Stored]) -> dict[str, Stored]:
    """What vLLM 0.33.0 makes of an FP8 matrix when it loads it for DeepGEMM with UE8M0 scales.

    Each block is dequantized in float32 and quantized anew, the scale rounded up to a power of two:
    2^ceil(log2(max(amax, 1e-4) / 448)), so never below 2^-22. `weight_scale` comes out as F32.
    (`per_block_cast_to_fp8` in vllm/utils/deep_gemm.py.) Raises ValueError as `compare` does.
    """
    rows, columns = _checked(fp8, fp8)
    weights, scales = [], []
    for start in range(0, rows, _BLOCK):
        with np.errstate(invalid="ignore", over="ignore"):
            values = _values(fp8, start, start + _BLOCK).astype(np.float32)
            amax = np.maximum.reduceat(np.abs(values).max(axis=0), np.arange(0, columns, _BLOCK))
            ratio = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
            mantissa, exponent = np.frexp(ratio)
            power = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
            scale = np.where(np.isfinite(ratio), power, ratio)
            weights.append(_encode_e4m3(values / scale.repeat(_BLOCK)[:columns]).tobytes())
        scales.append(scale.astype("<f4").tobytes())
    return {
        "weight": fp8["weight"]._replace(data=b"".join(weights)),
        "weight_scale": Stored("F32", fp8["weight_scale"].shape, b"".join(scales)),
    }


# --- matrices and their parts

_PARAMETERS = ("weight_packed", "weight", "weight_scale")


def _by_module(tensors: Iterable[TensorInfo], names: list[str]) -> dict[str, dict[str, TensorInfo]]:
    held: dict[str, dict[str, TensorInfo]] = {name: {} for name in names}
    for tensor in tensors:
        if tensor.parameter in _PARAMETERS and tensor.module in held:
            held[tensor.module][tensor.parameter] = tensor
    return held


_Tensors = Mapping[str, Stored] | Mapping[str, TensorInfo]


def _matrix_shape(tensors: _Tensors) -> tuple[int, int] | None:
    """[out, in] of a matrix that has elements and is in one of the three forms, else None."""
    match [tensor and (tensor.dtype, tensor.shape) for tensor in map(tensors.get, _PARAMETERS)]:
        case [("U8", (rows, pairs)), None, ("U8", groups)] if groups == (rows, 2 * pairs / _GROUP):
            shape = rows, 2 * pairs
        case [None, ("F8_E4M3", (rows, columns)), (dtype, blocks)] if dtype in _FLOATS and blocks == (
            math.ceil(rows / _BLOCK),
            math.ceil(columns / _BLOCK),
        ):
            shape = rows, columns
        case [None, (dtype, (rows, columns)), None] if dtype in _FLOATS:
            shape = rows, columns
        case _:
            return None
    return shape if all(shape) else None


def _common_shape(source: _Tensors, output: _Tensors) -> tuple[int, int] | None:
    shape = _matrix_shape(output) if output.keys() >= {"weight", "weight_scale"} else None
    return shape if shape == _matrix_shape(source) else None


def _checked(source: Mapping[str, Stored], output: Mapping[str, Stored]) -> tuple[int, int]:
    shape = _common_shape(source, output)
    if shape is None:
        listed = " and ".join(
            ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in side.items())
            for side in (source, output)
        )
        raise ValueError(f"these are not a matrix and the same in FP8: {listed}")
    for tensor in (*source.values(), *output.values()):
        nbytes = memoryview(tensor.data).nbytes
        if 8 * nbytes != DTYPE_BITS[tensor.dtype] * math.prod(tensor.shape):
            raise ValueError(f"{nbytes} bytes are not {tensor.dtype} {list(tensor.shape)}")
    return shape


def _read_rows(files: Files, tensor: TensorInfo, start: int, stop: int, rows: int) -> Stored:
    """A tensor's part for some of its matrix's `rows`; `start` is at a block's edge."""
    step = 1 if tensor.shape[0] == rows else _BLOCK
    first, last = start // step, math.ceil(stop / step)
    width = tensor.nbytes // tensor.shape[0]
    data = files.read(tensor.shard, tensor.start + first * width, (last - first) * width)
    return Stored(tensor.dtype, (last - first, *tensor.shape[1:]), data)


def _array(tensor: Stored, start: int, stop: int) -> Floats:
    """Rows of a tensor: numbers, or the codes of those that NumPy has no type for."""
    array: Floats = np.frombuffer(tensor.data, _KINDS[tensor.dtype]).reshape(tensor.shape)[start:stop]
    if tensor.dtype == "BF16":  # the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _values(matrix: Mapping[str, Stored], start: int, stop: int) -> Floats:
    """Weights, float64 [stop - start, in], of rows within one row of blocks."""
    if packed := matrix.get("weight_packed"):
        pairs = _E2M1_PAIRS.take(_array(packed, start, stop), axis=0, mode="clip")
        values: Floats = pairs.reshape(len(pairs), -1, _GROUP)
        values *= _E8M0.take(_array(matrix["weight_scale"], start, stop), mode="clip")[..., None]
        return values.reshape(len(values), -1)
    weight = _array(matrix["weight"], start, stop)
    if matrix["weight"].dtype != "F8_E4M3":
        return weight.astype(np.float64)
    values = _E4M3.take(weight, mode="clip")
    block = start // _BLOCK
    scale = _array(matrix["weight_scale"], block, block + 1).astype(np.float64)
    return np.multiply(values, scale.repeat(_BLOCK, axis=1)[:, : weight.shape[1]], out=values)


def _exponent_spread(mxfp4: Mapping[str, Stored]) -> int:
    rows, groups = mxfp4["weight_scale"].shape
    blocks, spread = np.arange(0, groups, _BLOCK // _GROUP), 0
    for start in range(0, rows, _BLOCK):
        packed = _array(mxfp4["weight_packed"], start, start + _BLOCK)
        scale = _array(mxfp4["weight_scale"], start, start + _BLOCK)
        magnitudes = packed.view("<u8") & np.uint64(0x7777_7777_7777_7777)  # a group is two of these
        used = (magnitudes.reshape(*scale.shape, 2) != 0).any(axis=-1) & (scale != 255)
        highest = np.maximum.reduceat(np.where(used, scale, 0).max(axis=0), blocks).astype(int)
        lowest = np.minimum.reduceat(np.where(used, scale, 255).min(axis=0), blocks)
        spread = max(spread, int((highest - lowest).max()))
    return spread


# --- the formats: OCP 8-bit floating point (E4M3) 1.0, and OCP microscaling formats (E2M1, E8M0) 1.0

_CODES = np.arange(256)
_EXPONENTS, _MANTISSAS = _CODES >> 3 & 15, _CODES & 7
# Bias 7 and three bits of mantissa; exponent 0 means 1 without the leading bit.
_E4M3 = np.ldexp(_MANTISSAS + 8.0 * (_EXPONENTS > 0), np.maximum(_EXPONENTS, 1) - 10)
_E4M3 *= np.where(_CODES < 128, 1, -1)
_E4M3[_CODES & 127 == 127] = np.nan  # no infinities, and the largest number is 448
_E8M0 = np.append(np.ldexp(1.0, _CODES[:255] - 127), np.nan)
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = np.concatenate((_E2M1, -_E2M1))
_E2M1_PAIRS = np.stack((_E2M1[_CODES & 15], _E2M1[_CODES >> 4]), axis=-1)  # the low nibble is the first


def _encode_e4m3(values: Floats) -> Floats:
    """Bytes of the E4M3 numbers nearest to these, ties to even. At most 464 in magnitude, or NaN."""
    magnitudes = np.fmin(np.abs(values), 512)  # NaN becomes 512, which is past the last number
    _, exponents = np.frexp(np.maximum(magnitudes, 2.0**-6))
    # Steps of 2^-3 of the leading bit's weight: 8 to 16 of them, below 2^-6 0 to 8. A 16 carries over.
    steps = np.rint(np.ldexp(magnitudes, 4 - exponents)).astype(np.int32)
    codes = np.minimum(steps + 8 * (exponents + 5), 127) + 128 * np.signbit(values)
    return np.asarray(codes, np.uint8)
