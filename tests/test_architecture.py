"""The table of Kimi-K3's tensors, against what the published checkpoint's headers say."""

import math
import re
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_fp8.architecture import (
    ALWAYS_UNQUANTIZED,
    FUSED_GROUPS,
    MODULE_CLASSES,
    MXFP4_GROUP,
    Dimensions,
    FusedGroup,
    TensorSpec,
    module_class,
    tensors,
)

LAYER = "language_model.model.layers.{}."
MOE = LAYER.format(7) + "block_sparse_moe."

# The published recipe (RedHatAI/Kimi-K3-FP8-BLOCK, card of 2026-07-27), in its order.
PUBLISHED_IGNORE = [
    ".*embed_tokens.*",
    ".*self_attn.*",
    r".*block_sparse_moe\.gate.*",
    ".*self_attention_res_proj.*",
    ".*mlp_res_proj.*",
    ".*output_attn_res_proj.*",
    ".*lm_head.*",
    ".*vision_tower.*",
    ".*mm_projector.*",
]

IGNORE = re.compile("|".join(PUBLISHED_IGNORE))

# Full-attention layers as config.json counts them, from 1.
MLA = {layer - 1 for layer in (*range(4, 89, 4), 92, 93)}
KDA = set(range(93)) - MLA
ALL = set(range(93))
DENSE = {0}
SPARSE = ALL - DENSE

# One row for each kind of tensor inside a layer: names, shape, dtype, layers.
ROWS = [
    (
        "input_layernorm.weight post_attention_layernorm.weight self_attention_res_norm.weight"
        " mlp_res_norm.weight",
        (7168,),
        "BF16",
        ALL,
    ),
    ("self_attention_res_proj.weight mlp_res_proj.weight", (1, 7168), "BF16", ALL),
    (
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
        (12288, 7168),
        "BF16",
        KDA,
    ),
    (
        "self_attn.q_conv1d.weight self_attn.k_conv1d.weight self_attn.v_conv1d.weight",
        (12288, 1, 4),
        "F32",
        KDA,
    ),
    ("self_attn.f_a_proj.weight", (128, 7168), "BF16", KDA),
    ("self_attn.f_b_proj.weight", (12288, 128), "BF16", KDA),
    ("self_attn.b_proj.weight", (96, 7168), "BF16", KDA),
    ("self_attn.A_log self_attn.o_norm.weight", (128,), "F32", KDA),
    ("self_attn.dt_bias", (12288,), "F32", KDA),
    ("self_attn.q_a_proj.weight", (1536, 7168), "BF16", MLA),
    ("self_attn.q_b_proj.weight", (18432, 1536), "BF16", MLA),
    ("self_attn.q_a_layernorm.weight", (1536,), "BF16", MLA),
    ("self_attn.kv_a_layernorm.weight", (512,), "BF16", MLA),
    ("self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "BF16", MLA),
    ("self_attn.kv_b_proj.weight", (24576, 512), "BF16", MLA),
    ("self_attn.g_proj.weight", (12288, 7168), "BF16", ALL),
    ("self_attn.o_proj.weight", (7168, 12288), "BF16", ALL),
    ("mlp.gate_proj.weight mlp.up_proj.weight", (33792, 7168), "BF16", DENSE),
    ("mlp.down_proj.weight", (7168, 33792), "BF16", DENSE),
    ("block_sparse_moe.gate.weight", (896, 7168), "BF16", SPARSE),
    ("block_sparse_moe.gate.e_score_correction_bias", (896,), "F32", SPARSE),
    ("block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168), "BF16", SPARSE),
    ("block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584), "BF16", SPARSE),
    ("block_sparse_moe.routed_expert_norm.weight", (3584,), "BF16", SPARSE),
    (
        "block_sparse_moe.shared_experts.gate_proj.weight block_sparse_moe.shared_experts.up_proj.weight",
        (6144, 7168),
        "BF16",
        SPARSE,
    ),
    ("block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144), "BF16", SPARSE),
]

OUTSIDE = {
    "language_model.model.embed_tokens.weight": (163840, 7168),
    "language_model.lm_head.weight": (163840, 7168),
    "language_model.model.norm.weight": (7168,),
    "language_model.model.output_attn_res_norm.weight": (7168,),
    "language_model.model.output_attn_res_proj.weight": (1, 7168),
    "mm_projector.proj.0.weight": (4096, 4096),
    "mm_projector.proj.2.weight": (7168, 4096),
    "mm_projector.post_norm.weight": (7168,),
    "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
    "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
    "vision_tower.encoder.final_layernorm.weight": (1024,),
}
VISION_BLOCK = {
    "norm0": (1024,),
    "norm1": (1024,),
    "mlp.fc0": (4096, 1024),
    "mlp.fc1": (1024, 4096),
    "wqkv": (4608, 1024),
    "wo": (1024, 1536),
}


@pytest.fixture(scope="module")
def real() -> list[TensorSpec]:
    return list(tensors(Dimensions()))


@pytest.fixture(scope="module")
def by_name(real: list[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in real}


@pytest.fixture(scope="module")
def modules(real: list[TensorSpec]) -> set[str]:
    """Every module that holds a tensor, with one routed expert standing for its 896."""
    return {module_of(spec) for spec in real if ".experts." not in spec.name or ".experts.0." in spec.name}


def module_of(spec: TensorSpec) -> str:
    return spec.name.rpartition(".")[0]


def quantized_by_the_recipe(spec: TensorSpec) -> bool:
    is_matrix = len(spec.shape) == 2 and not spec.name.endswith(".weight_scale")
    return is_matrix and not ignored(module_of(spec))


def ignored(module: str) -> bool:
    return IGNORE.match(module) is not None


class TestTheRealModel:
    def test_totals(self, real: list[TensorSpec], by_name: dict[str, TensorSpec]) -> None:
        assert len(real) == len(by_name) == 497_220
        assert Counter(spec.dtype for spec in real) == {"U8": 494_592, "BF16": 2_122, "F32": 506}
        assert sum(spec.nbytes for spec in real) == 1_560_860_324_864

    def test_parameters(self, real: list[TensorSpec]) -> None:
        # Two weights in a packed byte; scales are not parameters.
        def weights(spec: TensorSpec) -> int:
            per_item = {"weight_packed": 2, "weight_scale": 0}
            return math.prod(spec.shape) * per_item.get(spec.name.rpartition(".")[2], 1)

        assert sum(map(weights, real)) == 2_779_931_837_184

    @pytest.mark.parametrize(("names", "shape", "dtype", "layers"), ROWS)
    def test_row(
        self,
        names: str,
        shape: tuple[int, ...],
        dtype: str,
        layers: set[int],
        by_name: dict[str, TensorSpec],
    ) -> None:
        for name in names.split():
            found = {n for n in ALL if LAYER.format(n) + name in by_name}
            assert found == layers
            for layer in layers:
                full_name = LAYER.format(layer) + name
                assert by_name[full_name] == (full_name, dtype, shape, layer)

    @pytest.mark.parametrize(
        ("matrix", "rows", "columns"), [("w1", 3072, 3584), ("w2", 3584, 3072), ("w3", 3072, 3584)]
    )
    def test_routed_experts(
        self, matrix: str, rows: int, columns: int, by_name: dict[str, TensorSpec]
    ) -> None:
        for layer in SPARSE:
            for expert in range(896):
                name = LAYER.format(layer) + f"block_sparse_moe.experts.{expert}.{matrix}"
                packed, scale = by_name[f"{name}.weight_packed"], by_name[f"{name}.weight_scale"]
                assert packed[1:] == ("U8", (rows, columns // 2), layer)
                assert scale[1:] == ("U8", (rows, columns // 32), layer)

    def test_outside_the_layers(self, real: list[TensorSpec]) -> None:
        expected = OUTSIDE | {
            f"vision_tower.encoder.blocks.{block}.{name}.weight": shape
            for block in range(27)
            for name, shape in VISION_BLOCK.items()
        }
        outside = [spec for spec in real if ".layers." not in spec.name]
        assert {spec.name: spec.shape for spec in outside} == expected
        assert {spec.dtype for spec in outside} == {"BF16"}

    def test_nothing_but_the_rows(self, real: list[TensorSpec]) -> None:
        listed = sum(len(names.split()) * len(layers) for names, _, _, layers in ROWS)
        experts = len(SPARSE) * 896 * 3 * 2
        outside = len(OUTSIDE) + 27 * len(VISION_BLOCK)
        assert len(real) == listed + experts + outside

    def test_shards(self, real: list[TensorSpec]) -> None:
        shards = [spec.shard for spec in real]
        assert shards == sorted(shards)
        assert set(shards) == set(range(96))
        last = {spec.name.split(".")[0]: spec.shard for spec in real if spec.shard > 92}
        assert last == {"language_model": 93, "mm_projector": 94, "vision_tower": 95}

    def test_what_the_recipe_quantizes(self, real: list[TensorSpec]) -> None:
        quantized = [spec for spec in real if quantized_by_the_recipe(spec)]
        assert Counter(module_class(module_of(spec)) for spec in quantized) == {
            "routed experts": 247_296,
            "shared experts": 276,
            "latent projections": 184,
            "dense mlp": 3,
        }


class TestTiny:
    def test_has_every_kind_of_tensor(self, real: list[TensorSpec]) -> None:
        def kinds(specs: list[TensorSpec]) -> set[tuple[str, str, int]]:
            return {(re.sub(r"\.\d+\.", ".N.", spec.name), spec.dtype, len(spec.shape)) for spec in specs}

        tiny = list(tensors(Dimensions.tiny()))
        # proj.0 and proj.2 are positions in one module list, and both become proj.N.
        assert kinds(tiny) == kinds(real)
        assert sum(spec.nbytes for spec in tiny) < 16 << 20

    def test_multiples_of_128_are_where_the_real_ones_are(self, by_name: dict[str, TensorSpec]) -> None:
        d = Dimensions.tiny()
        compared = 0
        for spec in tensors(d, quantized_experts=False):
            # Layer 3 has full attention in both models, layers 0 to 2 have not.
            twin = by_name.get(spec.name) or by_name[f"{spec.name}_packed"]
            packing = 2 if twin.dtype == "U8" else 1
            sizes = (*twin.shape[:-1], twin.shape[-1] * packing)
            for size, real_size in zip(spec.shape, sizes, strict=True):
                if size != d.experts:
                    assert (size % 128 == 0) == (real_size % 128 == 0), spec
                    compared += 1
        assert compared > 100


class TestDimensions:
    @pytest.mark.parametrize("field", ["mla_layers", "dense_layers"])
    @pytest.mark.parametrize("layer", [-1, 4])
    def test_refuses_a_layer_that_does_not_exist(self, field: str, layer: int) -> None:
        lists = {"mla_layers": (3,), "dense_layers": (0,)} | {field: (layer,)}
        with pytest.raises(ValueError, match=rf"{field} names layers \[{layer}\]"):
            Dimensions(layers=4, **lists)

    @pytest.mark.parametrize("field", ["latent", "expert_intermediate"])
    def test_refuses_a_width_that_mxfp4_cannot_cut(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"{field} must be a multiple of 32, not 144"):
            Dimensions(**{field: 144})

    @given(
        layers=st.integers(1, 5),
        dense=st.sets(st.integers(0, 4)),
        mla=st.sets(st.integers(0, 4)),
        experts=st.integers(0, 3),
        latent=st.integers(1, 5).map(lambda n: n * MXFP4_GROUP),
        intermediate=st.integers(1, 5).map(lambda n: n * MXFP4_GROUP),
        blocks=st.integers(0, 2),
    )
    def test_any_size_is_consistent(
        self,
        layers: int,
        dense: set[int],
        mla: set[int],
        experts: int,
        latent: int,
        intermediate: int,
        blocks: int,
    ) -> None:
        d = Dimensions(
            layers=layers,
            dense_layers=tuple(n for n in dense if n < layers),
            mla_layers=tuple(n for n in mla if n < layers),
            experts=experts,
            latent=latent,
            expert_intermediate=intermediate,
            vision_blocks=blocks,
        )
        packed = {spec.name: spec for spec in tensors(d)}
        plain = {spec.name: spec for spec in tensors(d, quantized_experts=False)}

        shards = [spec.shard for spec in packed.values()]
        assert shards == sorted(shards)
        assert set(shards) == set(range(d.shards))
        assert any(name.startswith("vision_tower") for name in packed) == (blocks > 0)

        # 4 bits a weight and 8 bits a group, against 16 bits a weight.
        assert "U8" not in {spec.dtype for spec in plain.values()}
        moe_layers = layers - len(d.dense_layers)
        assert len(packed) - len(plain) == moe_layers * experts * 3
        for name, spec in plain.items():
            if name in packed:
                assert packed[name] == spec
            else:
                rows, columns = spec.shape
                assert packed[f"{name}_packed"].nbytes * 2 == rows * columns
                assert packed[f"{name}_scale"].nbytes * MXFP4_GROUP == rows * columns


class TestModuleClass:
    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            (MOE + "experts.895.w2", "routed experts"),
            (
                MOE + "shared_experts.up_proj",
                "shared experts",
            ),
            (MOE + "routed_expert_up_proj", "latent projections"),
            (MOE + "routed_expert_norm", "norms"),
            (MOE + "gate", "router"),
            ("language_model.model.layers.0.mlp.gate_proj", "dense mlp"),
            ("language_model.model.layers.0.self_attn", "attention"),
            ("language_model.model.layers.0.self_attn.o_norm", "attention"),
            ("language_model.model.layers.0.self_attention_res_proj", "residual projections"),
            ("language_model.model.output_attn_res_proj", "residual projections"),
            ("language_model.model.layers.0.mlp_res_norm", "norms"),
            ("language_model.model.norm", "norms"),
            ("language_model.model.embed_tokens", "embeddings"),
            ("language_model.lm_head", "head"),
            ("vision_tower.encoder.blocks.3.mlp.fc0", "vision tower"),
            ("vision_tower.encoder.final_layernorm", "vision tower"),
            ("mm_projector.post_norm", "projector"),
            ("model.layers.0.some_new_proj", "other"),
            ("", "other"),
        ],
    )
    def test_of_one_module(self, module: str, expected: str) -> None:
        assert module_class(module) == expected

    def test_covers_the_real_model(self, modules: set[str]) -> None:
        found = {module_class(module) for module in modules}
        assert found == {name for name, _ in MODULE_CLASSES}

    def test_routed_experts_are_looked_for_first(self) -> None:
        # 99 % of the modules: the order of the table is what makes the lookup cheap.
        assert MODULE_CLASSES[0][0] == "routed experts"


def fused_sets(group: FusedGroup, modules: set[str]) -> dict[str, set[str]]:
    """Parent module -> the group's members that it has."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        parent, _, name = module.rpartition(".")
        if name in group.members and re.search(group.where, parent):
            found[parent].add(name)
    return found


class TestFusedGroups:
    def test_in_the_real_model(self, modules: set[str]) -> None:
        kda, mla, mlp, expert = (fused_sets(group, modules) for group in FUSED_GROUPS)
        attention = {n: f"{LAYER.format(n)}self_attn" for n in ALL}

        whole = {"q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"}
        assert kda == {attention[n]: whole for n in KDA}

        # g_proj is part of the group in an MLA layer, and alone in a KDA layer.
        assert mla == {
            attention[n]: {"q_a_proj", "kv_a_proj_with_mqa", "g_proj"} if n in MLA else {"g_proj"}
            for n in ALL
        }

        assert set(map(frozenset, mlp.values())) == {frozenset({"gate_proj", "up_proj"})}
        assert len(mlp) == len(DENSE) + len(SPARSE)
        assert set(map(frozenset, expert.values())) == {frozenset({"w1", "w3"})}
        assert len(expert) == len(SPARSE)

    def test_the_published_recipe_splits_none(self, modules: set[str]) -> None:
        for group in FUSED_GROUPS:
            for parent, members in fused_sets(group, modules).items():
                assert len({ignored(f"{parent}.{name}") for name in members}) == 1

    def test_each_names_its_source(self) -> None:
        assert all("vLLM 0.33.0" in group.source for group in FUSED_GROUPS)


class TestAlwaysUnquantized:
    def test_every_record_describes_something(self, modules: set[str]) -> None:
        for record in ALWAYS_UNQUANTIZED:
            assert any(re.match(record.pattern, module) for module in modules), record
            assert record.reason
            assert record.source

    def test_the_published_recipe_quantizes_none_of_it(self, modules: set[str]) -> None:
        for record in ALWAYS_UNQUANTIZED:
            covered = {module for module in modules if re.match(record.pattern, module)}
            assert all(map(ignored, covered)), record

    def test_by_class(self, modules: set[str]) -> None:
        covered = Counter(
            module_class(module)
            for module in modules
            if any(re.match(record.pattern, module) for record in ALWAYS_UNQUANTIZED)
        )
        whole = (
            "router",
            "residual projections",
            "embeddings",
            "head",
            "vision tower",
            "projector",
        )
        everything = Counter(map(module_class, modules))
        expected = {name: everything[name] for name in whole}
        # Of the attention, the convolutions alone: its projections can be quantized.
        assert covered == expected | {"attention": 3 * len(KDA)}
