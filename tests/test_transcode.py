"""Transcoding, byte for byte against LLM Compressor's own path."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcompressor import model_free_ptq
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from safetensors.torch import load_file, save_file

from kimi_k3_fp8.engine.transcode import transcode
from kimi_k3_fp8.recipe import Recipe

BLOCK, GROUP = 128, 32
GROUPS = BLOCK * BLOCK // GROUP  # of a block
KINDS = ["amax", "power_of_two"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate((E2M1, -E2M1))
# The smallest absolute maximum of a block that is transcoded: scale 2^-126, bfloat16's smallest
# normal number, or the next one.
SMALLEST = {"amax": 2.0**-117, "power_of_two": 2.0**-118}

SOURCE_CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                    "dynamic": False,
                    "observer": "minmax",
                    "scale_dtype": "torch.uint8",
                },
            }
        },
    }
}


@pytest.fixture(scope="module")
def dequantizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4")
    (folder / "config.json").write_text(json.dumps(SOURCE_CONFIG))
    return CompressedTensorsDequantizer(folder, dtype=torch.bfloat16)


@cache
def quantizer(kind):
    return ModelFreePtqConverter(Recipe(block_scales=kind).quantization_config())


@pytest.fixture(scope="module")
def reference(dequantizer):
    """LLM Compressor's converters, as model_free_ptq chains them."""

    def convert(packed, scale, kind):
        tensors = {"x.weight_packed": packed, "x.weight_scale": scale}
        made = quantizer(kind).process(dequantizer.process(tensors))
        return made["x.weight"], made["x.weight_scale"]

    return convert


def assert_same_bytes(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        assert (our.dtype, our.shape, our.device) == (their.dtype, their.shape, their.device)
        assert our.is_contiguous()
        differ = (our.view(torch.uint8) != their.view(torch.uint8)).sum().item()
        assert differ == 0, f"{differ} of {our.numel()} bytes differ"


def stack(blocks):
    """Blocks ([128, 64] bytes, [128, 4] scales) to one matrix, one above the other."""
    packed, scale = zip(*blocks, strict=True)
    packed, scale = np.concatenate(packed), np.concatenate(scale)
    return torch.from_numpy(packed.astype(np.uint8)), torch.from_numpy(scale.astype(np.uint8))


def values(packed, scale):
    """The weights by definition, in float64, [out, in]."""
    packed, scale = packed.numpy(), scale.numpy()
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
    return E2M1[nibbles] * np.exp2(scale.astype(float) - 127).repeat(GROUP, axis=1)


def block_maxima(packed, scale):
    blocks = np.abs(values(packed, scale)).reshape(len(packed) // BLOCK, BLOCK, -1, BLOCK)
    return blocks.max(axis=(1, 3))


def transcodable(packed, scale, kind):
    """The documented borders."""
    maxima = block_maxima(packed, scale)
    inside = (maxima == 0) | ((maxima >= SMALLEST[kind]) & (maxima < 2.0**128))
    return bool(inside.all() and (scale != 255).all())


def all_bytes(largest=7):
    """A block of all packed bytes whose magnitude codes are at most `largest`, several times."""
    codes = np.arange(256)
    codes = codes[((codes & 7) <= largest) & ((codes >> 4 & 7) <= largest)]
    return np.resize(codes, (BLOCK, BLOCK // 2))


def same_scale(byte):
    return np.full((BLOCK, BLOCK // GROUP), byte)


def check(reference, packed, scale, kind, device="cpu"):
    """Transcoded to LLM Compressor's bytes inside the borders, refused outside them."""
    made = transcode(packed.to(device), scale.to(device), kind)
    if not transcodable(packed, scale, kind):
        assert made is None
        return False
    assert made is not None
    assert_same_bytes(made, reference(packed.to(device), scale.to(device), kind))
    return True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", range(1, 8))
def test_every_scale_byte_with_every_packed_byte(reference, kind, largest, device):
    blocks = [(all_bytes(largest), same_scale(byte)) for byte in range(256)]
    one_by_one = [transcodable(*stack([block]), kind) for block in blocks]
    inside = [block for block, ok in zip(blocks, one_by_one, strict=True) if ok]
    outside = [block for block, ok in zip(blocks, one_by_one, strict=True) if not ok]
    assert len(inside) > 240
    assert check(reference, *stack(inside), kind, device)
    for block in outside:
        assert not check(reference, *stack([block]), kind, device)
        # One such block is enough, wherever it lies.
        assert not check(reference, *stack([inside[0], block, inside[-1]]), kind, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", range(1, 8))
def test_every_difference_with_every_packed_byte(reference, kind, code, device):
    """One group holds the block's maximum, all others lie below it by 0 to 60 exponents, at the
    lower border, where weights are subnormal in bfloat16, in the middle, and at the upper one."""
    magnitude = E2M1[code]
    lowest, highest = (
        next(b for b in order if SMALLEST[kind] <= magnitude * 2.0 ** (b - 127) < 2.0**128)
        for order in (range(255), range(254, -1, -1))
    )
    blocks = []
    for top in (lowest, 127, highest):
        for difference in range(-2, 61):
            byte = top + 2 - difference  # the groups' own maximum is a 6
            if 0 <= byte < 255:
                # In the groups with larger exponents, only weights up to the block's maximum.
                fits = np.abs(E2M1[:8]) * 2.0 ** (byte - top) <= magnitude
                packed, scale = all_bytes(int(np.flatnonzero(fits).max())), same_scale(byte)
                packed[0, : GROUP // 2], scale[0, 0] = code, top
                blocks.append((packed, scale))
    assert len(blocks) > 100
    packed, scale = stack(blocks)
    assert set(np.log2(block_maxima(packed, scale) / magnitude).ravel()) == {lowest - 127, 0, highest - 127}
    assert check(reference, packed, scale, kind, device)


@st.composite
def a_block(draw):
    """Random nibbles up to a largest code, exponents in a range, some groups all zeros."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.integers(0, 7))
    low = draw(st.one_of(st.integers(0, 255), st.integers(90, 130)))
    spread = draw(st.one_of(st.integers(0, 40), st.integers(0, 255)))
    codes = random.integers(0, largest, size=(2, BLOCK, BLOCK // 2), endpoint=True)
    codes[random.random(codes.shape) < draw(st.sampled_from((0, 0.5, 0.99)))] = 0
    codes += 8 * random.integers(0, 2, size=codes.shape)
    packed = codes[0] | codes[1] << 4
    scale = random.integers(low, min(low + spread, 255), size=(BLOCK, BLOCK // GROUP), endpoint=True)
    zeros = random.random(scale.shape) < draw(st.sampled_from((0, 0.1, 0.9)))
    packed.reshape(BLOCK, -1, GROUP // 2)[zeros] &= 0x88
    return packed, scale


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(1, 2))
def test_random_blocks(reference, kind, data, height, width):
    blocks = [data.draw(a_block()) for _ in range(height * width)]
    columns = [stack(blocks[column::width]) for column in range(width)]
    packed, scale = (torch.cat(parts, dim=1) for parts in zip(*columns, strict=True))
    check(reference, packed, scale, kind)
    for block in blocks:  # alone, or one outside the borders would hide the others
        check(reference, *stack([block]), kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_blocks_keep_their_signs(reference, kind, device):
    signs = np.resize([0x00, 0x08, 0x80, 0x88], (BLOCK, BLOCK // 2))
    blocks = [(signs, same_scale(byte)) for byte in range(255)]
    packed, scale = stack(blocks)
    assert check(reference, packed, scale, kind, device)
    weight, weight_scale = transcode(packed, scale, kind)
    assert (weight_scale == torch.finfo(torch.bfloat16).eps).all()
    assert not weight.float().any()
    assert torch.equal(
        weight.float().signbit(), torch.tensor([0, 0, 1, 0, 0, 1, 1, 1]).bool().repeat(255 * BLOCK, 16)
    )
    assert transcode(*stack([*blocks, (signs, same_scale(255))]), kind) is None


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_zeros_have_no_say_in_the_scale(reference, kind):
    """However large their own scale."""
    packed, scale = all_bytes(), same_scale(120)
    packed.reshape(BLOCK, -1, GROUP // 2)[::3, 1] &= 0x88
    expected = transcode(*stack([(packed, scale)]), kind)
    scale[::3, 1] = 254
    made = stack([(packed, scale)])
    assert check(reference, *made, kind)
    assert_same_bytes(transcode(*made, kind), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_byte_255_is_not_transcoded_nor_finite_in_llm_compressor(reference, kind):
    for nibbles in (0x00, 0x77, 0x11):
        packed, scale = all_bytes(), same_scale(120)
        packed[9, GROUP // 2 : GROUP], scale[9, 1] = nibbles, 255
        made = stack([(packed, scale)])
        assert transcode(*made, kind) is None
        assert not reference(*made, kind)[1].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_same_bytes_as_model_free_ptq(tmp_path, kind):
    random = np.random.default_rng(7)
    packed = torch.from_numpy(random.integers(0, 256, size=(3 * BLOCK, BLOCK), dtype=np.uint8))
    scale = torch.from_numpy(random.integers(97, 128, size=(3 * BLOCK, 8), dtype=np.uint8))
    packed[:BLOCK, BLOCK // 2 :] &= 0x88
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(SOURCE_CONFIG))
    save_file({"x.weight_packed": packed, "x.weight_scale": scale}, source / "model.safetensors")
    model_free_ptq(
        source,
        output,
        config=Recipe(ignore=(), block_scales=kind).quantization_config(),
        converter=CompressedTensorsDequantizer(source, dtype=torch.bfloat16),
        device="cpu",
    )
    made = load_file(output / "model.safetensors")
    assert set(made) == {"x.weight", "x.weight_scale"}
    assert_same_bytes(transcode(packed, scale, kind), (made["x.weight"], made["x.weight_scale"]))


def dequantized(made):
    weight, scale = made
    return weight.double().numpy() * np.kron(scale.double().numpy(), np.ones((BLOCK, BLOCK)))


@pytest.mark.parametrize("spread", range(20))
@pytest.mark.parametrize("largest", range(1, 8))
def test_power_of_two_keeps_every_value_up_to_a_spread_of_14(spread, largest):
    """And beyond it those that are multiples of 2^(X - 17), for a block's maximum in 2^X to 2^(X+1)."""
    low = 110
    scale = np.resize(np.arange(low, low + spread + 1), (BLOCK, BLOCK // GROUP))
    packed, scale = stack([(all_bytes(largest), scale)])
    original = values(packed, scale)
    kept = dequantized(transcode(packed, scale, "power_of_two")) == original
    step = 2.0 ** (np.floor(np.log2(block_maxima(packed, scale))) - 17)
    assert np.array_equal(kept, np.fmod(original, step) == 0)
    if spread <= 14:
        assert kept.all()
    elif spread == 15:
        assert kept.all() == (largest < 6)
    if largest >= 6:
        assert kept.all() == (spread <= 14)
        lowest = (scale == low).numpy().repeat(GROUP, axis=1)
        lost = {0.5, 1.5} if spread == 15 else {0.5, 1, 1.5, 3} if spread == 16 else None
        changed = set(np.abs(original[lowest & ~kept]) * 2.0 ** (127 - low))
        assert lost is None or changed == {value for value in lost if value <= E2M1[largest]}


def divided_in_float32(packed, scale, weight_scale):
    """One block, as LLM Compressor's kernel for GPUs does it; on a CPU it divides in bfloat16."""
    quotients = torch.from_numpy(values(packed, scale)).float() / weight_scale.float()
    return quotients.clamp(-448, 448).to(torch.float8_e4m3fn)


def test_power_of_two_does_not_depend_on_the_precision_of_the_division():
    packed, scale = stack([(all_bytes(), np.resize(np.arange(90, 128), (BLOCK, 4)))])
    weight, weight_scale = transcode(packed, scale, "power_of_two")
    assert_same_bytes((weight,), (divided_in_float32(packed, scale, weight_scale),))


@pytest.mark.parametrize(("largest", "differing"), [(6, {1.5, 3}), (7, set())])
def test_amax_does_where_the_maximum_is_1_times_a_power_of_two(largest, differing):
    packed, scale = stack([(all_bytes(largest), same_scale(120))])
    weight, weight_scale = transcode(packed, scale, "amax")
    differ = (weight.float() != divided_in_float32(packed, scale, weight_scale).float()).numpy()
    magnitudes = np.abs(values(packed, scale)) * 2.0**7
    assert np.array_equal(differ, np.isin(magnitudes, list(differing)))


def test_input_is_left_alone_and_need_not_be_contiguous():
    packed, scale = stack([(all_bytes(), same_scale(120))] * 2)
    expected = transcode(packed, scale, "amax")
    for other in (lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]], lambda x: x.t().contiguous().t()):
        odd = other(packed), other(scale)
        assert not odd[0].is_contiguous()
        assert_same_bytes(transcode(*odd, "amax"), expected)
        assert torch.equal(odd[0], packed)
        assert torch.equal(odd[1], scale)


@pytest.mark.parametrize(
    ("packed", "scale"),
    [
        ((128, 64), (128, 8)),
        ((128, 64), (64, 4)),
        ((96, 64), (96, 4)),
        ((128, 80), (128, 5)),
        ((128, 63), (128, 3)),
        ((0, 64), (0, 4)),
        ((64,), (4,)),
        ((1, 128, 64), (1, 128, 4)),
    ],
)
def test_shapes_that_do_not_fit_are_named(packed, scale):
    with pytest.raises(ValueError, match="multiples of 128") as caught:
        transcode(torch.zeros(packed).byte(), torch.zeros(scale).byte(), "amax")
    assert str(list(packed)) in str(caught.value)
    assert str(list(scale)) in str(caught.value)


def test_dtypes_that_do_not_fit_are_named():
    packed, scale = stack([(all_bytes(), same_scale(120))])
    for wrong in ((packed.char(), scale), (packed, scale.view(torch.float8_e8m0fnu))):
        with pytest.raises(ValueError, match="uint8") as caught:
            transcode(*wrong, "amax")
        assert "int8" in str(caught.value) or "float8_e8m0fnu" in str(caught.value)
