"""MXFP4 to FP8 by table: LLM Compressor's bytes without its passes over bfloat16 weights.

A weight is +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} x 2^e, e being its group's scale byte minus 127. So a
block's absolute maximum is M x 2^X with M either 1 or 1.5, and its FP8 scale is one of two bfloat16
mantissas times a power of two. Then the E4M3 byte of a weight depends on three things only: its
nibble, M, and the difference X - e. The table holds what LLM Compressor itself makes of each of
these, two nibbles (one packed byte) at a time; all that remains is to look weights up.

LLM Compressor divides in bfloat16 on a CPU, and in float32 on a GPU with E4M3 (compute capability
9.0 on, with Triton). With block scales of "amax" and M = 1 this rounds a 1.5 or a 3 differently:
E4M3 has 320 and 352 there, the quotient is 336.66, and bfloat16 makes it 336, a tie. So a table is
made on the device that uses it. With powers of two both quotients are exact, and so the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from torch import Tensor

from kimi_k3_fp8.architecture import MXFP4_GROUP
from kimi_k3_fp8.recipe import BLOCK, BlockScales, Recipe

_ROWS, _COLUMNS = BLOCK
_GROUPS = _COLUMNS // MXFP4_GROUP  # side by side in a block

_MAXIMA = (1.0, 1.5)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# X - e is at least -1 in a group that is not all zeros: its largest magnitude is 0.5, and the
# block's. From 22 on every weight rounds to zero: 6 x 448 x 2^-22 is less than half of 2^-9, E4M3's
# smallest step.
_NEAREST, _FARTHEST = -1, 22
_DIFFERENCES = _FARTHEST - _NEAREST + 1

# By E2M1 code: twice the exponent, and one more if the mantissa is 1.5. Adding twice a group's
# exponent keeps the order, and zero the least whatever its exponent.
_RANKS = (-1024, -2, 0, 1, 2, 3, 4, 5)


class _Table(NamedTuple):
    pairs: Tensor  # int16 [2 maxima x differences x 256 packed bytes]: E4M3 bytes of two weights
    scales: Tensor  # int16 [3]: bfloat16 bits of the scale of a block with maximum 1, 1.5 and 0
    ranks: Tensor  # int16 [256]: rank of the largest E2M1 code among those whose bits are set


@functools.cache
def _table(block_scales: BlockScales, device: torch.device) -> _Table:
    nibbles = torch.tensor([sign * value for sign in (1, -1) for value in _E2M1])
    differences = torch.arange(_NEAREST, _FARTHEST + 1)
    weights = nibbles * 0.5 ** differences[:, None]
    samples = torch.zeros(_ROWS, len(_MAXIMA) + 1, _COLUMNS)  # the last block is all zeros
    used = slice(_DIFFERENCES), slice(len(_MAXIMA)), slice(len(nibbles))
    for column, maximum in enumerate(_MAXIMA):
        # A weight above its block's maximum does not exist.
        samples[used][:, column] = weights.masked_fill(weights.abs() > maximum, 0)
    config = Recipe(block_scales=block_scales).quantization_config()
    made = ModelFreePtqConverter(config).process(
        {"table.weight": samples.flatten(1).to(device, torch.bfloat16)}
    )
    codes = made["table.weight"].view(torch.uint8).view_as(samples)[used].transpose(0, 1).int()
    pairs = codes[..., None, :] | codes[..., :, None] << 8  # [maximum, difference, high, low nibble]
    ranks = [_RANKS[max(bits.bit_length() - 1, 0)] for bits in range(256)]
    return _Table(
        pairs=pairs.short().flatten(),
        scales=made["table.weight_scale"].view(torch.int16).flatten(),
        ranks=torch.tensor(ranks, dtype=torch.int16, device=device),
    )


def transcode(packed: Tensor, scale: Tensor, block_scales: BlockScales) -> tuple[Tensor, Tensor] | None:
    """Turn one MXFP4 weight into FP8_BLOCK.

    packed: uint8 [out, in / 2], low nibble in the even column. scale: uint8 [out, in / 32], E8M0.
    out and in: multiples of 128. Returns `weight` float8_e4m3fn [out, in] and `weight_scale`
    bfloat16 [out / 128, in / 128], byte for byte what LLM Compressor makes of the same module on
    the same device through CompressedTensorsDequantizer (to bfloat16) and FP8_BLOCK.

    Returns None, so that LLM Compressor handles or refuses the module, if
    - a scale byte is 255 (NaN);
    - a block's absolute maximum is 2^128 or more, infinite in bfloat16;
    - a block's absolute maximum is not zero but below 2^-117 ("amax") or 2^-118 ("power_of_two"):
      its scale would be subnormal in bfloat16.

    Works on the tensors' device. Needs the memory of one result and some. Raises ValueError for
    other dtypes and shapes.
    """
    if (
        packed.dtype != torch.uint8
        or scale.dtype != torch.uint8
        or packed.ndim != 2
        or scale.shape != (packed.shape[0], 2 * packed.shape[1] // MXFP4_GROUP)
        or packed.shape[0] % _ROWS
        or 2 * packed.shape[1] % _COLUMNS
        or not packed.numel()
    ):
        raise ValueError(
            "expected packed uint8 [out, in / 2] and scale uint8 [out, in / 32], out and in"
            f" multiples of 128; got packed {packed.dtype} {list(packed.shape)} and scale"
            f" {scale.dtype} {list(scale.shape)}"
        )
    if scale.max() == 255:
        return None
    table = _table(block_scales, packed.device)
    packed = packed.contiguous()
    groups = scale.shape[1]

    # The absolute maximum of each block. Exponents have the scale byte's bias, 127.
    exponents = scale.short().reshape(-1, _ROWS, groups)
    ranks = table.ranks[_largest_code_bits(packed)].view_as(exponents) + 2 * exponents
    block_ranks = ranks.amax(dim=1).view(len(ranks), -1, _GROUPS).amax(dim=-1)
    zero = block_ranks < min(_RANKS[1:])
    power, maximum = block_ranks >> 1, block_ranks & 1

    scale_bits = table.scales[maximum.int()] + ((power - 127) << 7)  # 7 bits of mantissa
    subnormal = scale_bits < 1 << 7
    if (~zero & (subnormal | (power > 254))).any():
        return None
    scale_bits = torch.where(zero, table.scales[-1], scale_bits)

    power, maximum = (x.repeat_interleave(_GROUPS, dim=1)[:, None] for x in (power, maximum))
    difference = (power - exponents).clamp_(_NEAREST, _FARTHEST) - _NEAREST
    rows = (maximum * _DIFFERENCES + difference).int() << 8  # 256 pairs each

    pairs = torch.empty(packed.shape, dtype=torch.int16, device=packed.device)
    # One row of blocks at a time, so that the indices stay in the processor's cache.
    shape = len(rows), _ROWS, groups, MXFP4_GROUP // 2
    index = torch.empty(shape[1:], dtype=torch.int32, device=packed.device)
    for row, source, made in zip(rows, packed.view(shape), pairs.view(len(rows), -1), strict=True):
        index.copy_(source).add_(row[..., None])
        torch.index_select(table.pairs, 0, index.view(-1), out=made)
    return pairs.view(torch.float8_e4m3fn), scale_bits.view(torch.bfloat16)


def _largest_code_bits(packed: Tensor) -> Tensor:
    """For each group, int32 [groups]: one bit for each E2M1 code that may be its largest.

    The highest bit set is the largest code. A union of bits folds 16 bytes in four steps, several
    times as fast as torch's maximum over so short a dimension.
    """
    codes = packed >> 4
    codes &= 7
    torch.maximum(codes, packed & 7, out=codes)
    one = torch.ones((), dtype=torch.uint8, device=packed.device)
    bits = torch.bitwise_left_shift(one, codes, out=codes)
    for lane in (torch.int64, torch.int32, torch.int16, torch.uint8):
        halves = bits.view(lane).view(-1, 2)
        bits = halves[:, 0] | halves[:, 1]
    return bits.int()
