"""Fidelity against torch: torch's own formats decode, and slow plain arithmetic counts."""

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_fp8 import fidelity
from kimi_k3_fp8.architecture import Dimensions, module_class, tensors
from kimi_k3_fp8.checkpoint import Folder, TensorInfo, lay_out
from kimi_k3_fp8.fidelity import (
    SAMPLED_OF,
    Fidelity,
    Stored,
    compare,
    measure,
    merged,
    quantized_modules,
    requantized,
    sampled,
)

BLOCK, GROUP = 128, 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))
DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
FLOATS = ["BF16", "F16", "F32"]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stored(tensor):
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Stored(NAMES[tensor.dtype], tuple(tensor.shape), data)


def tensor(stored):
    return torch.frombuffer(bytearray(stored.data), dtype=DTYPES[stored.dtype]).reshape(stored.shape)


def bits(seed, dtype, *shape):
    """Any bit pattern, NaN and infinities among them."""
    random = np.random.default_rng(seed)
    size = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    return Stored(dtype, shape, random.bytes(size * math.prod(shape)))


def finite_bits(seed, dtype, *shape):
    values = tensor(bits(seed, dtype, *shape))
    return stored(torch.where(values.float().isfinite(), values, torch.ones_like(values)))


def blocks(rows, columns):
    return math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)


def over_blocks(scale, rows, columns):
    wide = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
    return wide[:rows, :columns]


def values(matrix):
    """Weights by definition, in float64."""
    parts = {name: tensor(part) for name, part in matrix.items()}
    if "weight_packed" in parts:
        packed = parts["weight_packed"]
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        scale = parts["weight_scale"].view(torch.float8_e8m0fnu).double()
        return E2M1[codes.int()] * scale.repeat_interleave(GROUP, dim=1)
    weight = parts["weight"]
    if "weight_scale" in parts:
        return weight.double() * over_blocks(parts["weight_scale"].double(), *weight.shape)
    return weight.double()


def spread(mxfp4):
    packed, scale = (tensor(mxfp4[name]) for name in ("weight_packed", "weight_scale"))
    largest = 0
    for row in range(0, len(packed), BLOCK):
        for column in range(0, scale.shape[1], BLOCK // GROUP):
            used = [
                int(scale[r, c])
                for r in range(row, min(row + BLOCK, len(packed)))
                for c in range(column, min(column + BLOCK // GROUP, scale.shape[1]))
                if scale[r, c] != 255 and (packed[r, 16 * c : 16 * c + 16] & 0x77).any()
            ]
            largest = max(largest, max(used, default=0) - min(used, default=0))
    return largest


# --- the formats, by all their bit patterns


def test_every_fp8_byte_is_decoded_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8).repeat(BLOCK, 1).view(torch.float8_e4m3fn)
    output = {"weight": stored(codes), "weight_scale": stored(torch.ones(1, 2))}
    found = compare("x", {"weight": stored(codes.float())}, output)
    assert (found.differing, found.non_finite) == (0, BLOCK * 2)
    # It does look at every one of them.
    for byte in set(range(256)) - {0x7F, 0xFF}:
        other = codes.float()
        other[7, byte] += 2.0**-10
        assert compare("x", {"weight": stored(other)}, output).differing == 1


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_pattern_is_decoded_as_torch_does(dtype):
    """Each pattern as a block's scale, and as a weight of the source."""
    patterns = torch.arange(2**16, dtype=torch.int32).short().view(1, -1).view(DTYPES[dtype])
    not_finite = int((~patterns.float().isfinite()).sum())
    wide = patterns.repeat_interleave(BLOCK, dim=1)
    ones = stored(torch.ones(wide.shape).to(torch.float8_e4m3fn))
    as_scale = {"weight": ones, "weight_scale": stored(patterns)}
    by_torch = {"weight": ones, "weight_scale": stored(patterns.float())}
    for source, output in (
        ({"weight": stored(wide.float())}, as_scale),
        ({"weight": stored(wide)}, by_torch),
    ):
        found = compare("x", source, output)
        assert (found.differing, found.non_finite) == (0, not_finite * BLOCK)


def test_every_mxfp4_nibble_with_every_scale_byte_is_decoded_as_torch_does():
    """One row of 256 blocks, one for each scale byte; FP8 has the nibbles' values, F32 the scales'."""
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(256 * BLOCK // 16)[None]
    powers = torch.arange(256, dtype=torch.uint8)[None]
    source = {
        "weight_packed": stored(nibbles[:, ::2] | nibbles[:, 1::2] << 4),
        "weight_scale": stored(powers.repeat_interleave(BLOCK // GROUP, dim=1)),
    }
    output = {
        "weight": stored(E2M1[nibbles.int()].to(torch.float8_e4m3fn)),
        "weight_scale": stored(powers.view(torch.float8_e8m0fnu).float()),
    }
    found = compare("x", source, output)
    assert (found.differing, found.non_finite, found.exponent_spread) == (0, BLOCK, 0)
    assert found.squared_value == pytest.approx(float(values(source)[:, :-BLOCK].square().sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_fp8_is_encoded_as_torch_does(dtype):
    numbers = torch.arange(2**16, dtype=torch.int32).short().view(DTYPES[dtype]).float()
    numbers = numbers[numbers.abs() <= 464]  # above, torch's releases differ: NaN or 448
    theirs = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(fidelity._encode_e4m3(numbers.numpy()), theirs)


def test_fp8_ties_and_their_neighbours_are_encoded_as_torch_does():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(((codes[1:] + codes[:-1]) / 2, torch.tensor([464.0, 2.0**-10])))
    numbers = torch.cat([torch.nextafter(ties, torch.tensor(to)) for to in (0.0, math.inf)] + [ties, codes])
    numbers = torch.cat((numbers, -numbers))
    numbers = numbers[numbers.abs() <= 464]
    theirs = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(fidelity._encode_e4m3(numbers.numpy()), theirs)
    assert fidelity._encode_e4m3(np.array([np.nan]))[0] & 127 == 127


# --- compare


SEEDS = st.integers(0, 2**32 - 1)
SHARES = st.sampled_from((0, 0.5, 0.99))


def a_share(random, share, *shape):
    return torch.rand(shape, generator=random) < share


@st.composite
def packed_sources(draw):
    """MXFP4 of any size, in steps of a group, and any scale bytes in a range."""
    low = draw(st.integers(0, 255))
    limits = low, draw(st.integers(low, 255))
    return draw(st.integers(1, 200)), draw(st.integers(1, 9)), limits, draw(SHARES)


def mxfp4(random, rows, groups, limits, zeros):
    packed = torch.randint(256, (rows, groups * GROUP // 2), generator=random).byte()
    packed[a_share(random, zeros, *packed.shape)] &= 0x88
    scale = torch.randint(limits[0], limits[1] + 1, (rows, groups), generator=random).byte()
    return {"weight_packed": stored(packed), "weight_scale": stored(scale)}


def some_fp8(some, seed, dtype, rows, columns):
    return {
        "weight": some(seed, "F8_E4M3", rows, columns),
        "weight_scale": some(seed + 1, dtype, *blocks(rows, columns)),
    }


def expected(source, output):
    before, after = values(source), values(output)
    finite = before.isfinite() & after.isfinite()
    error, value = (after - before)[finite], before[finite]
    return {
        "elements": before.numel(),
        "differing": int((before != after)[finite].sum()),
        "non_finite": int((~finite).sum()),
        "squared_error": pytest.approx(float(error.square().sum()), rel=1e-9),
        "squared_value": pytest.approx(float(value.square().sum()), rel=1e-9),
        "largest_error": float(error.abs().max()) if len(error) else 0,
        "exponent_spread": spread(source) if "weight_packed" in source else None,
    }


def agrees(source, output):
    found = compare("some class", source, output)
    assert found.model_dump() == {
        "module_class": "some class",
        "modules": 1,
        "of_modules": 1,
        **expected(source, output),
    }
    assert Fidelity.model_validate_json(found.model_dump_json()) == found


SOME = st.sampled_from((bits, finite_bits))


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, form=packed_sources(), some=SOME, scale=st.sampled_from(FLOATS))
def test_compare_agrees_with_torch_on_mxfp4(seed, form, some, scale):
    source = mxfp4(torch.Generator().manual_seed(seed), *form)
    rows, groups, *_ = form
    agrees(source, some_fp8(some, seed, scale, rows, groups * GROUP))


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    some=SOME,
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    kept=SHARES,
)
def test_compare_agrees_with_torch_on_plain_weights(seed, rows, columns, some, dtypes, kept):
    """Of which a share is the same on both sides."""
    output = some_fp8(some, seed, dtypes[1], rows, columns)
    other = tensor(some(seed + 2, dtypes[0], rows, columns))
    same = a_share(torch.Generator().manual_seed(seed), kept, rows, columns)
    agrees({"weight": stored(torch.where(same, values(output).to(other.dtype), other))}, output)


def power_of_two_fp8(original):
    """FP8 with block scales 2^ceil(log2(amax / 448)), by torch."""
    rows, columns = original.shape
    amax = original.abs().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax(dim=(1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448))).float()
    weight = (original / over_blocks(scale.double(), rows, columns)).float().to(torch.float8_e4m3fn)
    return {"weight": stored(weight), "weight_scale": stored(scale)}


@pytest.mark.parametrize("width", range(20))
def test_powers_of_two_are_exact_until_the_exponents_spread_too_far(width):
    """A value is kept if it is a multiple of E4M3's smallest step, 2^-9, times the block's scale."""
    random = torch.Generator().manual_seed(width)
    packed = torch.randint(256, (2 * BLOCK, BLOCK), generator=random).byte()
    scale = torch.randint(100, 101 + width, (2 * BLOCK, 2 * BLOCK // GROUP), generator=random).byte()
    scale[0, 0], scale[1, 0] = 100, 100 + width
    source = {"weight_packed": stored(packed), "weight_scale": stored(scale)}
    original = values(source)
    output = power_of_two_fp8(original)
    found = compare("routed experts", source, output)
    step = over_blocks(tensor(output["weight_scale"]).double(), *original.shape) * 2.0**-9
    lost = int((torch.fmod(original, step) != 0).sum())
    assert (found.exponent_spread, found.differing) == (width, lost)
    assert found.exact == (lost == 0) == (found.verdict == "exact")
    assert (lost > 0) == (width > 14)
    if lost:
        assert f"{100 * lost / found.elements:.1e}"[:3] in f"{float(found.verdict.split()[0]):.1e}"
        assert found.verdict.endswith("% relative RMS error")


def test_negative_zero_is_zero():
    zeros = torch.zeros(BLOCK, BLOCK)
    output = {"weight": stored((-zeros).to(torch.float8_e4m3fn)), "weight_scale": stored(torch.ones(1, 1))}
    found = compare("x", {"weight": stored(zeros)}, output)
    assert found.exact
    assert found.relative_rms_error == 0


@pytest.mark.parametrize("nibbles", [0x00, 0x72])
def test_a_scale_byte_of_255_is_never_exact(nibbles):
    """Not even over zeros."""
    packed = torch.full((BLOCK, BLOCK // 2), nibbles, dtype=torch.uint8)
    scale = torch.full((BLOCK, BLOCK // GROUP), 127, dtype=torch.uint8)
    source = {"weight_packed": stored(packed), "weight_scale": stored(scale)}
    output = {
        "weight": stored(values(source).to(torch.float8_e4m3fn)),
        "weight_scale": stored(torch.ones(1, 1)),
    }
    assert compare("x", source, output).verdict == "exact"
    scale[5, 2] = 255
    found = compare("x", source | {"weight_scale": stored(scale)}, output)
    assert (found.non_finite, found.differing, found.exact) == (GROUP, 0, False)
    assert found.verdict == f"{GROUP} elements are not finite"


def test_what_is_no_pair_is_named():
    plain = {"weight": bits(0, "BF16", 256, 128)}
    fp8 = {"weight": bits(0, "F8_E4M3", 256, 128), "weight_scale": bits(0, "BF16", 2, 1)}
    packed = {"weight_packed": bits(0, "U8", 256, 64), "weight_scale": bits(0, "U8", 256, 4)}
    compare("x", plain, fp8)
    compare("x", packed, fp8)
    for source, output in (
        (fp8, plain),  # no FP8 in the output
        (packed, packed),
        ({}, fp8),
        (plain, {}),
        ({"weight": bits(0, "BF16", 128, 256)}, fp8),
        ({"weight": bits(0, "U8", 256, 128)}, fp8),
        (plain | packed, fp8),
        (packed | {"weight": plain["weight"]}, fp8),
        (plain | {"weight_scale": packed["weight_scale"]}, fp8),
        ({"weight_packed": packed["weight_packed"]}, fp8),
        (packed | {"weight_scale": bits(0, "U8", 256, 2)}, fp8),
        (plain, {"weight": fp8["weight"]}),
        (plain, fp8 | {"weight_scale": bits(0, "BF16", 1, 1)}),
        (plain, fp8 | {"weight_scale": bits(0, "U8", 2, 1)}),
    ):
        with pytest.raises(ValueError, match="not a matrix and the same in FP8"):
            compare("x", source, output)
    for key in fp8:
        short = fp8 | {key: fp8[key]._replace(data=fp8[key].data[:-1])}
        with pytest.raises(ValueError, match=rf"bytes are not {fp8[key].dtype} \["):
            compare("x", plain, short)


# --- records


@st.composite
def a_record(draw):
    count = st.integers(0, 10**6)
    return Fidelity(
        module_class=draw(st.sampled_from(("routed experts", "shared experts", "dense mlp"))),
        modules=draw(count),
        of_modules=draw(count),
        elements=draw(count),
        differing=draw(count),
        non_finite=draw(count),
        squared_error=draw(count) / 8,
        squared_value=draw(count) / 8,
        largest_error=draw(count) / 8,
        exponent_spread=draw(st.none() | st.integers(0, 254)),
    )


@given(records=st.lists(a_record(), max_size=9))
def test_merged_adds_up_each_class(records):
    found = merged(iter(records))
    assert [r.module_class for r in found] == list(dict.fromkeys(r.module_class for r in records))
    for total in found:
        of_class = [r for r in records if r.module_class == total.module_class]
        spreads = [r.exponent_spread for r in of_class if r.exponent_spread is not None]
        for field in type(total).model_fields:
            if field in ("module_class", "largest_error", "exponent_spread"):
                continue
            assert getattr(total, field) == sum(getattr(r, field) for r in of_class)
        assert total.largest_error == max(r.largest_error for r in of_class)
        assert total.exponent_spread == (max(spreads) if spreads else None)
    assert merged(found) == found


def test_verdicts():
    whole = Fidelity(module_class="x", modules=2, of_modules=2, elements=1000, squared_value=1e4)
    assert whole.verdict == "exact"
    some = whole.model_copy(update={"of_modules": 2000})
    assert some.verdict == "no difference found in the sample (2 of 2,000 modules)"
    assert not some.exact
    other = whole.model_copy(update={"differing": 875, "squared_error": 4.41})
    assert other.verdict == "87.5 % of elements differ, 2.10 % relative RMS error"
    both = other.model_copy(update={"of_modules": 3, "non_finite": 4})
    assert both.verdict == other.verdict + "; 4 elements are not finite (in the sample: 2 of 3 modules)"
    every = other.model_copy(update={"differing": 1000})
    assert every.verdict.startswith("100 % of elements")
    assert Fidelity(module_class="x", of_modules=3).verdict == "not compared (0 of 3 modules)"
    from_zeros = other.model_copy(update={"squared_value": 0.0})
    assert from_zeros.relative_rms_error == math.inf
    assert "inf" in from_zeros.verdict


# --- which modules


@given(experts=st.integers(0, 300), layers=st.integers(1, 3), shared=st.booleans(), random=st.randoms())
def test_a_sample_holds_some_of_every_class_wherever_they_stand(experts, layers, shared, random):
    names = [
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1"
        for layer in range(layers)
        for expert in range(experts)
    ]
    if shared:
        names += [f"model.layers.{layer}.block_sparse_moe.shared_experts.up_proj" for layer in range(layers)]
    chosen = sampled(names, "sampled")
    counts = Counter(map(module_class, names))
    assert Counter(map(module_class, chosen)) == {
        kind: math.ceil(count / SAMPLED_OF) for kind, count in counts.items()
    }
    assert chosen == [name for name in names if name in set(chosen)]
    shuffled = random.sample(names, len(names))
    assert set(sampled(shuffled, "sampled")) == set(chosen)
    # The smallest hashes, so that a smaller set of modules has the same ones chosen first.
    for kind in counts:
        digests = {
            name: hashlib.sha256(name.encode()).hexdigest() for name in names if module_class(name) == kind
        }
        limit = max(digests[name] for name in chosen if name in digests)
        assert all(digest > limit for name, digest in digests.items() if name not in chosen)


def test_all_none_and_other_words():
    names = [spec.name.rpartition(".")[0] for spec in tensors(Dimensions.tiny())]
    assert sampled(names, "full") == names
    assert sampled(names, "off") == []
    with pytest.raises(ValueError, match="'some'"):
        sampled(names, "some")


# --- requantized


def vllm_requantized(matrix):
    """The steps of vLLM 0.33.0 (requant_weight_ue8m0_inplace, per_block_cast_to_fp8), in torch."""
    weight, scale = tensor(matrix["weight"]), tensor(matrix["weight_scale"]).float()
    rows, columns = weight.shape
    down, across = scale.shape
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = weight.float() * over_blocks(scale, rows, columns)
    amax = padded.view(down, BLOCK, across, BLOCK).abs().amax(dim=(1, 3)).clamp(1e-4)
    scale = torch.pow(2.0, torch.ceil(torch.log2(amax / 448.0)))
    made = padded * (1.0 / over_blocks(scale, *padded.shape))
    return made.to(torch.float8_e4m3fn)[:rows, :columns].contiguous(), scale


@settings(max_examples=100, deadline=None)
@given(
    seed=SEEDS,
    rows=st.integers(1, 260),
    columns=st.integers(1, 260),
    largest=st.integers(0, 126),
    exponents=st.tuples(st.integers(-100, 20), st.integers(0, 80)),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)
def test_requantized_agrees_with_torch(seed, rows, columns, largest, exponents, dtype):
    """Codes up to a largest one, scales with any mantissa and exponents in a range."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, largest, (rows, columns), np.uint8, endpoint=True)
    codes += random.integers(0, 2, codes.shape, np.uint8) * np.uint8(128)
    low, width = exponents
    scale = random.uniform(1, 2, blocks(rows, columns))
    scale *= 2.0 ** random.integers(low, low + width, scale.shape, endpoint=True)
    matrix = {
        "weight": Stored("F8_E4M3", codes.shape, codes.tobytes()),
        "weight_scale": stored(torch.from_numpy(scale).to(dtype)),
    }
    made = requantized(matrix)
    weight, scale = vllm_requantized(matrix)
    assert torch.equal(tensor(made["weight_scale"]), scale)
    assert torch.equal(tensor(made["weight"]).view(torch.uint8), weight.view(torch.uint8))
    if (scale > 2.0**-22).all():  # vLLM goes no lower
        assert torch.equal(values(requantized(made)), values(made))


@pytest.mark.parametrize("exponent", [-22, -8, 0, 20])
def test_scales_that_are_powers_of_two_pass_unchanged(exponent):
    """Down to 2^-22: vLLM takes no block's maximum for less than 1e-4."""
    codes = torch.arange(127, dtype=torch.uint8).repeat(BLOCK, 2)  # 448 is among them
    matrix = {
        "weight": stored(codes.view(torch.float8_e4m3fn)),
        "weight_scale": stored(torch.tensor([[2.0**exponent, 2.0 ** (exponent + 1)]])),
    }
    assert requantized(matrix) == matrix
    matrix["weight_scale"] = stored(torch.tensor([[2.0**-24, 2.0**-22]]))
    assert tensor(requantized(matrix)["weight_scale"]).tolist() == [[2.0**-22, 2.0**-22]]


def test_blocks_that_are_not_finite_stay_so():
    matrix = {"weight": bits(1, "F8_E4M3", 200, 300), "weight_scale": bits(2, "BF16", 2, 3)}
    scale = tensor(matrix["weight_scale"])
    scale[0, 1], scale[1, 2], scale[0, 0] = math.inf, math.nan, 1
    matrix["weight_scale"] = stored(scale)
    weight = tensor(matrix["weight"]).view(torch.uint8)
    weight[:, :256] &= 0xBF  # no NaN there
    matrix["weight"] = stored(weight.view(torch.float8_e4m3fn))
    made = values(requantized(matrix)).isfinite()
    assert made[:BLOCK, :BLOCK].all()
    assert not made[:BLOCK, BLOCK : 2 * BLOCK].any()
    assert not made[BLOCK:, 2 * BLOCK :].any()
    assert not made[:BLOCK, 2 * BLOCK :].any()  # weights that are NaN


def test_as_loaded_compares_the_requantized_matrix():
    source = {"weight": stored(torch.randn(256, 384, generator=torch.Generator().manual_seed(3)))}
    original = tensor(source["weight"])
    amax = original.abs().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax(dim=(1, 3))
    scale = (amax / 448).bfloat16()
    weight = (original / over_blocks(scale.float(), 256, 384)).to(torch.float8_e4m3fn)
    output = {"weight": stored(weight), "weight_scale": stored(scale)}
    as_stored, as_loaded = (compare("x", source, output, as_loaded=loaded) for loaded in (False, True))
    assert as_loaded == compare("x", source, requantized(output))
    assert as_loaded.relative_rms_error > 1.2 * as_stored.relative_rms_error
    # Scales that are powers of two already lose nothing.
    output = power_of_two_fp8(original.double())
    assert compare("x", source, output, as_loaded=True) == compare("x", source, output)


# --- measure


def write(folder, shard, contents):
    """A shard with these tensors; returns where they lie."""
    folder.mkdir(exist_ok=True)
    header, placed = lay_out(shard, [(name, t.dtype, t.shape) for name, t in contents.items()], {})
    with open(folder / shard, "wb") as file:
        file.write(header)
        for place in placed:
            file.seek(place.start)
            file.write(contents[place.name].data)
    return placed


EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.{}.w1"
DENSE = "language_model.model.layers.0.mlp.up_proj"
NORM = "language_model.model.norm"


@pytest.fixture
def checkpoints(tmp_path):
    """Two experts whose pair lies in two shards, a plain matrix, and a tensor that stays."""
    modules = {}
    for number in range(2):
        source = {
            "weight_packed": bits(number, "U8", 384, 64),
            "weight_scale": bits(9 + number, "U8", 384, 4),
        }
        output = {
            "weight": bits(20 + number, "F8_E4M3", 384, 128),
            "weight_scale": bits(30 + number, "F16", 3, 1),
        }
        modules[EXPERT.format(number)] = source, output
    modules[DENSE] = (
        {"weight": finite_bits(40, "BF16", 300, 200)},
        {"weight": finite_bits(41, "F8_E4M3", 300, 200), "weight_scale": finite_bits(42, "BF16", 3, 2)},
    )
    norm = bits(50, "BF16", 128)
    one, two, after = {f"{NORM}.weight": norm}, {}, {f"{NORM}.weight": norm}
    for name, (source, output) in modules.items():
        for key, part in source.items():
            (two if key == "weight_scale" else one)[f"{name}.{key}"] = part
        after |= {f"{name}.{key}": part for key, part in output.items()}
    inputs = *write(tmp_path / "in", "a.safetensors", one), *write(tmp_path / "in", "b.safetensors", two)
    outputs = write(tmp_path / "out", "c.safetensors", after)
    return modules, Folder(tmp_path / "in"), inputs, Folder(tmp_path / "out"), outputs


def by_class(records):
    return {record.module_class: record for record in records}


def exactly(record):
    return record.model_dump() | {
        key: pytest.approx(getattr(record, key), rel=1e-9) for key in ("squared_error", "squared_value")
    }


@pytest.mark.parametrize("as_loaded", [False, True])
@pytest.mark.parametrize("piece", [1, 256 * 200, 1 << 24])
def test_measure_is_compare_on_files(checkpoints, monkeypatch, piece, as_loaded):
    """However little of a matrix is read at a time."""
    monkeypatch.setattr(fidelity, "_PIECE", piece)
    modules, *sides = checkpoints
    found = measure(*sides, quantized_modules(sides[-1]), as_loaded=as_loaded)
    assert set(quantized_modules(sides[-1])) == set(modules)
    wanted = merged(compare(module_class(name), *pair, as_loaded=as_loaded) for name, pair in modules.items())
    assert {r.module_class: r.model_dump() for r in found} == {r.module_class: exactly(r) for r in wanted}


def test_measure_counts_what_it_does_not_compare(checkpoints):
    modules, source, inputs, output, outputs = checkpoints
    names = [EXPERT.format(1)]
    found = by_class(measure(source, inputs, output, outputs, names))
    experts, dense = found["routed experts"], found["dense mlp"]
    assert (experts.modules, experts.of_modules, experts.elements) == (1, 2, 384 * 128)
    assert (dense.modules, dense.of_modules, dense.elements, dense.exact) == (0, 1, 0, False)
    assert not any(r.modules for r in measure(source, inputs, output, outputs, []))

    def without(tensors, name):
        return [t for t in tensors if t.name != name]

    full = list(modules)
    for gone in (f"{DENSE}.weight", f"{DENSE}.weight_scale"):
        dense = by_class(measure(source, inputs, output, without(outputs, gone), full))["dense mlp"]
        assert (dense.modules, dense.of_modules) == (0, 1)
    pair = f"{EXPERT.format(0)}.weight_scale"
    experts = by_class(measure(source, without(inputs, pair), output, outputs, full))["routed experts"]
    assert (experts.modules, experts.of_modules) == (1, 2)


def test_an_output_that_was_never_converted_is_not_exact(checkpoints):
    modules, source, inputs, _, _ = checkpoints
    found = measure(source, inputs, source, inputs, list(modules))
    assert [(r.modules, r.exact) for r in found] == [(0, False)] * len(found)
    assert sum(r.of_modules for r in found) == len(modules)


def test_a_file_that_ends_early_is_an_error(checkpoints):
    modules, source, inputs, output, outputs = checkpoints
    last: TensorInfo = max(outputs, key=lambda place: place.start)
    with open(output.path / last.shard, "r+b") as file:
        file.truncate(last.start + 1)
    with pytest.raises(ValueError, match="bytes are not"):
        measure(source, inputs, output, outputs, list(modules))
