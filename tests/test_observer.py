"""The power-of-two observer, against exact rational arithmetic."""

import importlib
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from llmcompressor.observers import Observer

from kimi_k3_fp8.engine import observer
from kimi_k3_fp8.engine.observer import POWER_OF_TWO
from kimi_k3_fp8.recipe import Recipe

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CONFIG = Recipe(block_scales="power_of_two").quantization_config()
BLOCK = 128


def observe(weight):
    """What LLM Compressor's registry gives under the name, after seeing the weight."""
    args = CONFIG.config_groups["FP8_BLOCK"].weights
    return Observer.load_from_registry(POWER_OF_TWO, base_name="weight", args=args)(weight)


def quantize(weight):
    """LLM Compressor's weight and weight_scale."""
    made = ModelFreePtqConverter(CONFIG).process({"x.weight": weight})
    return made["x.weight"], made["x.weight_scale"]


def block_with(value, dtype, sign=1):
    """A block of smaller weights and one of +-value."""
    block = torch.full((BLOCK, BLOCK), value / 3).to(dtype)
    block[5, 7] = sign * value
    return block


def smallest_positive(dtype):
    info = torch.finfo(dtype)
    return Fraction(info.smallest_normal) * Fraction(info.eps)


def covering_power(amax, dtype):
    """The smallest power of two that the dtype has and that covers amax when times 448."""
    power = smallest_positive(dtype)
    while 448 * power < Fraction(amax):
        power *= 2
    return power


def magnitudes(dtype):
    """Positive finite numbers that the dtype has."""
    top = torch.finfo(dtype).max
    return (
        st.floats(min_value=float(smallest_positive(dtype)), max_value=top)
        .map(lambda value: torch.tensor(value, dtype=torch.float64).to(dtype).item())
        .filter(lambda value: 0 < value <= top)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@given(data=st.data())
def test_smallest_covering_power(dtype, sign, data):
    amax = data.draw(magnitudes(dtype))
    power = covering_power(amax, dtype)
    seen = observe(block_with(amax, dtype, sign))
    qparams = seen.get_qparams()
    assert qparams["scale"].dtype == dtype
    if 448 * power > torch.finfo(dtype).max:
        assert not qparams["scale"].isfinite().any()
    else:
        assert Fraction(qparams["scale"].item()) == power


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_exponent_at_the_border(dtype):
    """448 x 2^k needs 2^k, the next number above it needs 2^(k + 1)."""
    info = torch.finfo(dtype)
    power, borders = smallest_positive(dtype), []
    while 448 * power < info.smallest_normal:  # where 448 x 2^k has no full mantissa
        power *= 2
    while 2 * 448 * power <= info.max:
        borders.append(power)
        power *= 2
    assert len(borders) > 20
    covers = torch.tensor([float(448 * border) for border in borders], dtype=torch.float64)
    at = covers.to(dtype)
    assert torch.equal(at.double(), covers)
    above = torch.nextafter(at, torch.tensor(torch.inf, dtype=dtype))
    for values, factor in ((at, 1), (above, 2)):
        weight = values.repeat_interleave(BLOCK).expand(BLOCK, -1)
        seen = observe(weight)
        assert torch.equal(seen.max_vals.double(), factor * covers[None])
        assert torch.equal(seen.min_vals, -seen.max_vals)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_block_gets_the_smallest_scale_of_llm_compressor(dtype):
    weight = torch.zeros(BLOCK, 2 * BLOCK, dtype=dtype)
    weight[:, BLOCK + 1 :: 2] = -0.0
    seen = observe(weight)
    assert not seen.min_vals.any()
    assert not seen.max_vals.any()
    assert (quantize(weight)[1] == torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_shows_in_the_scale_of_its_block_alone(dtype, bad):
    weight = torch.ones(2 * BLOCK, 2 * BLOCK, dtype=dtype)
    weight[3, BLOCK + 4] = bad
    finite = quantize(weight)[1].isfinite()
    assert finite.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_weights_do_not_vanish(dtype):
    tiny = float(smallest_positive(dtype))
    weight, scale = quantize(torch.full((BLOCK, BLOCK), tiny, dtype=torch.float64).to(dtype))
    assert (weight.double() * scale.double() == tiny).all()


def test_one_scale_per_block():
    """Rows and columns are told apart, padding included."""
    weight = torch.full((BLOCK + 2, 2 * BLOCK + 1), 1.0, dtype=torch.bfloat16)
    weight[BLOCK:] = 4.0
    weight[:, 2 * BLOCK :] *= 2
    scale = quantize(weight)[1]
    assert (scale * 256).tolist() == [[1, 1, 2], [4, 4, 8]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_meta_device(dtype):
    """LLM Compressor runs the same code on meta tensors before it quantizes anything."""
    shape = 2 * BLOCK, 3 * BLOCK
    on_meta, on_cpu = (quantize(torch.ones(shape, dtype=dtype, device=d)) for d in ("meta", "cpu"))
    for described, real in zip(on_meta, on_cpu, strict=True):
        assert described.is_meta
        assert (described.shape, described.dtype) == (real.shape, real.dtype)


def test_second_import_is_harmless():
    registered = Observer.get_value_from_registry(POWER_OF_TWO)
    importlib.reload(observer)
    assert Observer.get_value_from_registry(POWER_OF_TWO) is registered
