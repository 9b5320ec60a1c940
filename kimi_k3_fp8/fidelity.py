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

import functools
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from kimi_k3_fp8.architecture import module_class
from kimi_k3_fp8.checkpoint import DTYPE_BITS, Files, TensorInfo
from kimi_k3_fp8.errors import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

Verify = Literal["off", "sampled", "full"]

#: One module in so many is compared by "sampled". A real matrix (3072 x 3584) takes 0.08 s of one core
#: to compare and 0.025 s to transcode, the fastest way to make one: 0.08 / 64 is 5 % of that.
SAMPLED_OF = 64

#: E4M3 has three bits of mantissa, so rounding moves a value by at most 1/16 of itself (smaller values
#: that underflow weigh nothing in a root mean square).
LARGEST_ERROR = 1 / 16

_BLOCK, _GROUP = 128, 32  # FP8_BLOCK's blocks, MXFP4's groups
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
        found = []
        if self.differing:
            differing, error = map(_percent, (self.differing / self.elements, self.relative_rms_error))
            found.append(f"{differing} of elements differ, {error} relative RMS error")
        if self.non_finite:
            found.append(f"{self.non_finite:,} elements are not finite")
        if self.exact:
            return "exact"
        if not self.modules:
            return f"not compared ({share})"
        if not found:
            return f"no difference found in the sample ({share})"
        return "; ".join(found) + (f" (in the sample: {share})" if self.modules < self.of_modules else "")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:#.3g}".rstrip(".") + " %"


def merged(records: Iterable[Fidelity]) -> tuple[Fidelity, ...]:
    """One record for each module class, in the order they first appear."""
    totals: dict[str, Fidelity] = {}
    for record in records:
        total = totals.get(record.module_class)
        totals[record.module_class] = record if total is None else _together(total, record)
    return tuple(totals.values())


def _together(one: Fidelity, other: Fidelity) -> Fidelity:
    spreads = [r.exponent_spread for r in (one, other) if r.exponent_spread is not None]
    return Fidelity(
        module_class=one.module_class,
        modules=one.modules + other.modules,
        of_modules=one.of_modules + other.of_modules,
        elements=one.elements + other.elements,
        differing=one.differing + other.differing,
        non_finite=one.non_finite + other.non_finite,
        squared_error=one.squared_error + other.squared_error,
        squared_value=one.squared_value + other.squared_value,
        largest_error=max(one.largest_error, other.largest_error),
        exponent_spread=max(spreads, default=None),
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
    for name in names:
        classes[module_class(name)].append(name)
    chosen: set[str] = set()
    for members in classes.values():
        members.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        chosen.update(members[: math.ceil(len(members) / SAMPLED_OF)])
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

    def records() -> Iterator[Fidelity]:
        for kind, count in there.items():
            yield Fidelity(module_class=kind, of_modules=count)
        for name in names:
            before, after = (side[name] for side in sides)
            shape = _common_shape(before, after)
            if shape is None:
                continue
            rows, columns = shape
            step = max(_PIECE // columns // _BLOCK, 1) * _BLOCK
            for start in range(0, rows, step):
                part = start, min(start + step, rows), rows
                found = compare(
                    module_class(name),
                    {key: _read_rows(source, tensor, *part) for key, tensor in before.items()},
                    {key: _read_rows(output, tensor, *part) for key, tensor in after.items()},
                    as_loaded=as_loaded,
                )
                yield found.model_copy(update={"modules": int(start == 0), "of_modules": 0})

    return merged(records())


def compare(
    module_class: str,
    source: Mapping[str, Stored],
    output: Mapping[str, Stored],
    *,
    as_loaded: bool = False,
) -> Fidelity:
    """Compare one FP8 matrix with its source, each given by its tensors, by parameter name.

    Needs a few MB besides. Raises ValueError where the source is in none of the three forms, the
    output is not FP8, the shapes differ, or a tensor's bytes are not as many as its shape says.
    """
    import numpy as np

    rows, columns = _checked(source, output)
    if as_loaded:
        output = requantized(output)
    elements = differing = non_finite = 0
    squared_error = squared_value = largest = 0.0
    for start, stop in _stripes(rows, columns):
        with np.errstate(invalid="ignore"):
            value, error = (_values(side, start, stop).ravel() for side in (source, output))
            error -= value
        elements += error.size
        squares = float(np.einsum("i,i->", error, error))
        if not math.isfinite(squares):  # float64 does not overflow here: something was not finite
            finite = np.isfinite(error)
            value, error = value[finite], error[finite]
            non_finite += finite.size - error.size
            squares = float(np.einsum("i,i->", error, error))
        squared_error += squares
        squared_value += float(np.einsum("i,i->", value, value))
        differing += int(np.count_nonzero(error != 0))
        largest = max(largest, float(np.abs(error, out=error).max(initial=0)))
    return Fidelity(
        module_class=module_class,
        modules=1,
        of_modules=1,
        elements=elements,
        differing=differing,
        non_finite=non_finite,
        squared_error=squared_error,
        squared_value=squared_value,
        largest_error=largest,
        exponent_spread=_exponent_spread(source) if "weight_packed" in source else None,
    )


def requantized(fp8: Mapping[str, Stored]) -> dict[str, Stored]:
    """What vLLM 0.33.0 makes of an FP8 matrix when it loads it for DeepGEMM with UE8M0 scales.

    Each block is dequantized in float32 and quantized anew, the scale rounded up to a power of two:
    2^ceil(log2(max(amax, 1e-4) / 448)), so never below 2^-22. `weight_scale` comes out as F32.
    (`per_block_cast_to_fp8` in vllm/utils/deep_gemm.py.) Raises ValueError as `compare` does.
    """
    import numpy as np

    rows, columns = _checked(fp8, fp8)
    weights, scales = [], []
    for start in range(0, rows, _BLOCK):
        with np.errstate(invalid="ignore", over="ignore"):
            values = _values(fp8, start, min(start + _BLOCK, rows)).astype(np.float32)
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
    packed, weight, scale = map(tensors.get, _PARAMETERS)
    main = packed or weight
    if main is None or (packed and weight) or len(main.shape) != 2 or not all(main.shape):
        return None
    rows, columns = main.shape
    if packed:
        columns *= 2
        pair = ("U8", "U8", (rows, columns // _GROUP))
        fits = scale is not None and (packed.dtype, scale.dtype, scale.shape) == pair
        fits = fits and columns % _GROUP == 0
    elif main.dtype == "F8_E4M3":
        blocks = (math.ceil(rows / _BLOCK), math.ceil(columns / _BLOCK))
        fits = scale is not None and scale.dtype in _FLOATS and scale.shape == blocks
    else:
        fits = scale is None and main.dtype in _FLOATS
    return (rows, columns) if fits else None


def _common_shape(source: _Tensors, output: _Tensors) -> tuple[int, int] | None:
    weight = output.get("weight")
    if weight is None or weight.dtype != "F8_E4M3":
        return None
    shape = _matrix_shape(output)
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


def _stripes(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows from and to, each time within one row of blocks and of about `_STRIPE` elements."""
    step = max(min(_STRIPE // columns, _BLOCK), 1)
    for block in range(0, rows, _BLOCK):
        end = min(block + _BLOCK, rows)
        for start in range(block, end, step):
            yield start, min(start + step, end)


def _array(tensor: Stored, start: int, stop: int) -> Floats:
    """Rows of a tensor: numbers, or the codes of those that NumPy has no type for."""
    import numpy as np

    shape, kind = (stop - start, tensor.shape[1]), np.dtype(_KINDS[tensor.dtype])
    offset = start * shape[1] * kind.itemsize
    array = np.frombuffer(tensor.data, kind, math.prod(shape), offset).reshape(shape)
    if tensor.dtype == "BF16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _values(matrix: Mapping[str, Stored], start: int, stop: int) -> Floats:
    """Weights, float64 [stop - start, in], of rows within one row of blocks."""
    import numpy as np

    tables = _tables()
    if packed := matrix.get("weight_packed"):
        pairs = tables.e2m1_pairs.take(_array(packed, start, stop), axis=0, mode="clip")
        values: Floats = pairs.reshape(stop - start, -1, _GROUP)
        values *= tables.e8m0.take(_array(matrix["weight_scale"], start, stop), mode="clip")[..., None]
        return values.reshape(stop - start, -1)
    weight = matrix["weight"]
    if weight.dtype != "F8_E4M3":
        return _array(weight, start, stop).astype(np.float64)
    values = tables.e4m3.take(_array(weight, start, stop), mode="clip")
    block = start // _BLOCK
    scale = _array(matrix["weight_scale"], block, block + 1).astype(np.float64)
    values *= scale.repeat(_BLOCK, axis=1)[:, : weight.shape[1]]
    return values


def _exponent_spread(mxfp4: Mapping[str, Stored]) -> int:
    import numpy as np

    packed, scale = mxfp4["weight_packed"], mxfp4["weight_scale"]
    rows, groups = scale.shape
    spread = 0
    for start in range(0, rows, _BLOCK):
        stop = min(start + _BLOCK, rows)
        magnitudes = _array(packed, start, stop).view("<u8") & np.uint64(0x7777_7777_7777_7777)
        exponents = _array(scale, start, stop).astype(np.int16)
        used = (magnitudes[:, ::2] | magnitudes[:, 1::2]) != 0  # a group is 16 bytes
        used &= exponents != 255
        blocks = np.arange(0, groups, _BLOCK // _GROUP)
        highest = np.maximum.reduceat(np.where(used, exponents, -1).max(axis=0), blocks)
        lowest = np.minimum.reduceat(np.where(used, exponents, 255).min(axis=0), blocks)
        spread = max(spread, int((highest - lowest).max()))
    return spread


# --- the formats


class _Tables(NamedTuple):
    e4m3: Floats  # [256]: value of each byte
    e8m0: Floats  # [256]
    e2m1_pairs: Floats  # [256, 2]: low and high nibble's value of each packed byte


@functools.cache
def _tables() -> _Tables:
    """OCP 8-bit floating point (E4M3) 1.0, and OCP microscaling formats (E2M1, E8M0) 1.0."""
    import numpy as np

    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    # Bias 7 and three bits of mantissa; exponent 0 means 1 without the leading bit.
    e4m3 = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    e4m3[codes & 127 == 127] = np.nan  # no infinities, and the largest number is 448
    e4m3 = np.where(codes < 128, e4m3, -e4m3)
    e8m0 = np.ldexp(1.0, codes - 127)
    e8m0[255] = np.nan
    e2m1 = np.array([*_E2M1, *(-value for value in _E2M1)])
    return _Tables(e4m3, e8m0, np.stack((e2m1[codes & 15], e2m1[codes >> 4]), axis=-1))


def _encode_e4m3(values: Floats) -> Floats:
    """Bytes of the E4M3 numbers nearest to these, ties to even. At most 464 in magnitude, or NaN."""
    import numpy as np

    magnitudes = np.fmin(np.abs(values), 512)  # NaN becomes 512, which is past the last number
    _, exponents = np.frexp(np.maximum(magnitudes, 2.0**-6))
    # Steps of 2^-3 of the leading bit's weight: 8 to 16 of them, below 2^-6 0 to 8. A 16 carries over.
    steps = np.rint(np.ldexp(magnitudes, 4 - exponents)).astype(np.int32)
    codes = np.minimum(steps + 8 * (exponents + 5), 127) + 128 * np.signbit(values)
    return np.asarray(codes, np.uint8)
