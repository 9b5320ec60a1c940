"""What Kimi-K3 is made of: its dimensions, its tensors, and which modules belong together.

Everything here is data about the model, read from the headers of `moonshotai/Kimi-K3`; nothing
reads a file. Layers are counted from 0. A matrix is `[out, in]`, as in `torch.nn.Linear`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ALWAYS_UNQUANTIZED",
    "FUSED_GROUPS",
    "MODULE_CLASSES",
    "MXFP4_GROUP",
    "Dimensions",
    "FusedGroup",
    "TensorSpec",
    "UnquantizedModules",
    "infer_dimensions",
    "module_class",
    "tensors",
]

_ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

MXFP4_GROUP = 32
"""Weights that share one E8M0 scale byte, along the input dimension."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a Kimi-K3 model. The defaults are the real model.

    `mla_layers` have full (multi-head latent) attention, all others Kimi Delta Attention (KDA).
    `dense_layers` have one dense MLP, all others a mixture of experts. With `vision_blocks=0`
    the model has no vision tower and no projector.

    Raises `ValueError` where a layer list names a layer that does not exist, or where an expert's
    input dimension cannot be cut into MXFP4 groups of 32.
    """

    layers: int = 93
    mla_layers: tuple[int, ...] = (*range(3, 91, 4), 91, 92)
    dense_layers: tuple[int, ...] = (0,)
    vocabulary: int = 163840
    hidden: int = 7168

    heads: int = 96
    head_dim: int = 128
    rope_dim: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    conv_kernel: int = 4
    decay: int = 128  # length of A_log, which is not the number of heads

    experts: int = 896
    latent: int = 3584  # the width routed experts work in, between the latent projections
    expert_intermediate: int = 3072
    shared_intermediate: int = 6144
    dense_intermediate: int = 33792

    vision_blocks: int = 27
    vision_hidden: int = 1024
    vision_attention: int = 1536
    vision_intermediate: int = 4096
    patch: int = 14  # pixels
    vision_grid: int = 64  # positions along each side of the position embedding
    vision_merge: int = 4  # patches that the projector joins into one

    def __post_init__(self) -> None:
        for field in ("mla_layers", "dense_layers"):
            if outside := [n for n in getattr(self, field) if not 0 <= n < self.layers]:
                raise ValueError(
                    f"{field} names layers {outside}, but the model has layers 0 to {self.layers - 1}"
                )
        for field in ("latent", "expert_intermediate"):
            if (width := getattr(self, field)) % MXFP4_GROUP:
                raise ValueError(f"{field} must be a multiple of {MXFP4_GROUP}, not {width}")

    @classmethod
    def tiny(cls) -> Dimensions:
        """A few megabytes with every kind of module in it.

        Layer 0 is dense, layer 3 has full attention. Dimensions are multiples of 128 where they
        are in the real model and not where they are not; the one exception is the number of
        experts (896 there, 4 here).
        """
        return cls(
            layers=4,
            mla_layers=(3,),
            vocabulary=256,
            hidden=256,
            heads=2,
            q_lora_rank=128,
            kv_lora_rank=128,
            experts=4,
            latent=128,
            expert_intermediate=256,
            shared_intermediate=256,
            dense_intermediate=384,
            vision_blocks=2,
            vision_hidden=128,
            vision_attention=128,
            vision_intermediate=256,
            vision_grid=8,
        )

    @property
    def shards(self) -> int:
        """Number of shards: one a layer, one for embeddings and head, two for vision if any."""
        return self.layers + (3 if self.vision_blocks else 1)


class TensorSpec(NamedTuple):
    """One tensor of the source checkpoint."""

    name: str
    dtype: str
    """As safetensors spells it: `BF16`, `F32` or `U8`."""
    shape: tuple[int, ...]
    shard: int
    """0-based: the layers, then embeddings and head, then `mm_projector`, then `vision_tower`."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


def tensors(dimensions: Dimensions, *, quantized_experts: bool = True) -> Iterator[TensorSpec]:
    """Every tensor of a Kimi-K3 source checkpoint, in the order of its shards.

    Routed experts are MXFP4 pairs, `weight_packed` U8 `[out, in / 2]` (the low nibble is the even
    column) and `weight_scale` U8 `[out, in / 32]` (E8M0: 2^(byte - 127)); with
    `quantized_experts=False` they are plain BF16 `weight`s `[out, in]`.
    """
    d = dimensions
    for layer in range(d.layers):
        prefix = f"language_model.model.layers.{layer}."
        attention = _mla if layer in d.mla_layers else _kda
        for name, dtype, shape in (*_residual_stream(d), *attention(d)):
            yield TensorSpec(prefix + name, dtype, shape, layer)
        if layer in d.dense_layers:
            for name, shape in _gated_mlp(d.hidden, d.dense_intermediate):
                yield TensorSpec(f"{prefix}mlp.{name}", "BF16", shape, layer)
        else:
            for name, dtype, shape in _mixture_of_experts(d, quantized_experts):
                yield TensorSpec(f"{prefix}block_sparse_moe.{name}", dtype, shape, layer)

    groups = [_embeddings_and_head(d)]
    if d.vision_blocks:
        groups += [_projector(d), _vision_tower(d)]
    for shard, group in enumerate(groups, start=d.layers):
        for name, shape in group:
            yield TensorSpec(name, "BF16", shape, shard)


#: Where each size can be read: field, the tensor's name (a regular expression), axis, divisor. A name
#: without its layer or block number: one odd tensor is outvoted by its sisters.
_VOTES: tuple[tuple[str, str, int, int], ...] = (
    ("hidden", r"(input_layernorm|mlp_res_norm|model\.norm)\.weight$", 0, 1),
    ("vocabulary", r"(embed_tokens|lm_head)\.weight$", 0, 1),
    ("heads", r"self_attn\.b_proj\.weight$", 0, 1),
    ("head_dim", r"self_attn\.(o_norm\.weight|f_a_proj\.weight)$", 0, 1),
    ("decay", r"self_attn\.A_log$", 0, 1),
    ("conv_kernel", r"conv1d\.weight$", 2, 1),
    ("q_lora_rank", r"self_attn\.(q_a_proj|q_a_layernorm)\.weight$", 0, 1),
    ("kv_lora_rank", r"self_attn\.kv_a_layernorm\.weight$", 0, 1),
    ("latent", r"(routed_expert_norm|routed_expert_down_proj|w2)\.weight$", 0, 1),
    ("expert_intermediate", r"experts\.\d+\.w[13]\.weight$", 0, 1),
    ("shared_intermediate", r"shared_experts\.(gate|up)_proj\.weight$", 0, 1),
    ("dense_intermediate", r"\.mlp\.(gate|up)_proj\.weight$", 0, 1),
    ("dense_intermediate", r"\.mlp\.down_proj\.weight$", 1, 1),
    ("vision_hidden", r"vision_tower.*(norm0|norm1|final_layernorm)\.weight$", 0, 1),
    ("vision_attention", r"vision_tower.*wo\.weight$", 1, 1),
    ("vision_attention", r"vision_tower.*wqkv\.weight$", 0, 3),
    ("vision_intermediate", r"vision_tower.*fc0\.weight$", 0, 1),
    ("vision_intermediate", r"vision_tower.*fc1\.weight$", 1, 1),
    ("patch", r"patch_embed\.proj\.weight$", 3, 1),
    ("vision_grid", r"patch_embed\.pos_emb\.weight$", 0, 1),
)


def infer_dimensions(shapes: Mapping[str, tuple[int, ...]], layers: int | None = None) -> Dimensions:
    """The dimensions of a Kimi-K3 whose unpacked tensors have these shapes.

    Each size is what most tensors that show it say, so that a few missing or misshapen ones do not
    change the answer. A size that no tensor shows is the real model's. `layers`: their number where
    the config gives it, so that a missing last layer is noticed.
    """
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    searches = [(field, re.compile(pattern).search, axis, by) for field, pattern, axis, by in _VOTES]
    numbers: dict[str, Counter[int]] = defaultdict(Counter)
    experts: set[int] = set()
    blocks: set[int] = set()
    for name, shape in shapes.items():
        if expert := _EXPERT_NUMBER(name):
            experts.add(int(expert[1]))
        if block := _BLOCK_NUMBER(name):
            blocks.add(int(block[1]))
        if layer := _LAYER_NUMBER(name):
            numbers["all"][int(layer[1])] += 1
            numbers["mla"][int(layer[1])] += bool(_MLA_ONLY(name))
            numbers["kda"][int(layer[1])] += bool(_KDA_ONLY(name))
            numbers["dense"][int(layer[1])] += ".mlp." in name
            numbers["moe"][int(layer[1])] += ".block_sparse_moe." in name
        for field, search, axis, by in searches if expert is None or expert[1] in ("0", "1") else ():
            if axis < len(shape) and search(name):
                votes[field][shape[axis] // by] += 1
    count = layers or max(numbers["all"], default=-1) + 1
    every = range(count)
    sizes = {field: found.most_common(1)[0][0] for field, found in votes.items()}
    default = Dimensions()
    projector = shapes.get("mm_projector.proj.0.weight", (0,))[0]
    width = sizes.get("vision_hidden", default.vision_hidden)
    compressed = shapes.get(_first(shapes, "kv_a_proj_with_mqa.weight"), (0,))[0]
    rank = sizes.get("kv_lora_rank", default.kv_lora_rank)
    return Dimensions(
        layers=count,
        mla_layers=tuple(n for n in every if numbers["mla"][n] > numbers["kda"][n]),
        dense_layers=tuple(n for n in every if numbers["dense"][n] > numbers["moe"][n]),
        experts=max(experts, default=-1) + 1 or default.experts,
        vision_blocks=max(blocks, default=-1) + 1,
        vision_merge=projector // width if projector % width == 0 and projector else default.vision_merge,
        rope_dim=compressed - rank if compressed > rank else default.rope_dim,
        **sizes,
    )


_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.").search
_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.").search
_BLOCK_NUMBER = re.compile(r"^vision_tower\..*\.blocks\.(\d+)\.").search
_MLA_ONLY = re.compile(r"\.self_attn\.(q_a|q_b|kv_)").search
_KDA_ONLY = re.compile(r"\.self_attn\.([qkv]_(proj|conv1d)|f_|b_proj|A_log|dt_bias|o_norm)").search


def _first(names: Iterable[str], ending: str) -> str:
    return next((name for name in names if name.endswith(ending)), "")


_Matrix = tuple[str, tuple[int, ...]]
_Typed = tuple[str, str, tuple[int, ...]]


def _residual_stream(d: Dimensions) -> Iterator[_Typed]:
    for norm in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "mlp_res_norm",
    ):
        yield f"{norm}.weight", "BF16", (d.hidden,)
    yield "self_attention_res_proj.weight", "BF16", (1, d.hidden)
    yield "mlp_res_proj.weight", "BF16", (1, d.hidden)


def _kda(d: Dimensions) -> Iterator[_Typed]:
    width = d.heads * d.head_dim
    for letter in "qkv":
        yield f"self_attn.{letter}_proj.weight", "BF16", (width, d.hidden)
        yield f"self_attn.{letter}_conv1d.weight", "F32", (width, 1, d.conv_kernel)
    yield "self_attn.f_a_proj.weight", "BF16", (d.head_dim, d.hidden)
    yield "self_attn.f_b_proj.weight", "BF16", (width, d.head_dim)
    yield "self_attn.b_proj.weight", "BF16", (d.heads, d.hidden)
    yield "self_attn.A_log", "F32", (d.decay,)
    yield "self_attn.dt_bias", "F32", (width,)
    yield "self_attn.o_norm.weight", "F32", (d.head_dim,)
    yield from _gate_and_output(d)


def _mla(d: Dimensions) -> Iterator[_Typed]:
    yield "self_attn.q_a_proj.weight", "BF16", (d.q_lora_rank, d.hidden)
    yield "self_attn.q_a_layernorm.weight", "BF16", (d.q_lora_rank,)
    queries = d.heads * (d.head_dim + d.rope_dim)
    yield "self_attn.q_b_proj.weight", "BF16", (queries, d.q_lora_rank)
    compressed = d.kv_lora_rank + d.rope_dim
    yield "self_attn.kv_a_proj_with_mqa.weight", "BF16", (compressed, d.hidden)
    yield "self_attn.kv_a_layernorm.weight", "BF16", (d.kv_lora_rank,)
    keys_and_values = d.heads * 2 * d.head_dim
    yield "self_attn.kv_b_proj.weight", "BF16", (keys_and_values, d.kv_lora_rank)
    yield from _gate_and_output(d)


def _gate_and_output(d: Dimensions) -> Iterator[_Typed]:
    yield "self_attn.g_proj.weight", "BF16", (d.heads * d.head_dim, d.hidden)
    yield "self_attn.o_proj.weight", "BF16", (d.hidden, d.heads * d.head_dim)


def _gated_mlp(width: int, intermediate: int) -> Iterator[_Matrix]:
    yield "gate_proj.weight", (intermediate, width)
    yield "up_proj.weight", (intermediate, width)
    yield "down_proj.weight", (width, intermediate)


def _mixture_of_experts(d: Dimensions, quantized: bool) -> Iterator[_Typed]:
    yield "gate.weight", "BF16", (d.experts, d.hidden)
    yield "gate.e_score_correction_bias", "F32", (d.experts,)
    yield "routed_expert_down_proj.weight", "BF16", (d.latent, d.hidden)
    yield "routed_expert_up_proj.weight", "BF16", (d.hidden, d.latent)
    yield "routed_expert_norm.weight", "BF16", (d.latent,)
    for name, shape in _gated_mlp(d.hidden, d.shared_intermediate):
        yield f"shared_experts.{name}", "BF16", shape
    matrices = (
        ("w1", d.expert_intermediate, d.latent),
        ("w2", d.latent, d.expert_intermediate),
        ("w3", d.expert_intermediate, d.latent),
    )
    for expert in range(d.experts):
        for name, rows, columns in matrices:
            if quantized:
                module = f"experts.{expert}.{name}"
                yield f"{module}.weight_packed", "U8", (rows, columns // 2)
                yield f"{module}.weight_scale", "U8", (rows, columns // MXFP4_GROUP)
            else:
                yield f"experts.{expert}.{name}.weight", "BF16", (rows, columns)


def _embeddings_and_head(d: Dimensions) -> Iterator[_Matrix]:
    yield "language_model.model.embed_tokens.weight", (d.vocabulary, d.hidden)
    yield "language_model.lm_head.weight", (d.vocabulary, d.hidden)
    yield "language_model.model.norm.weight", (d.hidden,)
    yield "language_model.model.output_attn_res_norm.weight", (d.hidden,)
    yield "language_model.model.output_attn_res_proj.weight", (1, d.hidden)


def _projector(d: Dimensions) -> Iterator[_Matrix]:
    width = d.vision_merge * d.vision_hidden
    yield "mm_projector.proj.0.weight", (width, width)
    yield "mm_projector.proj.2.weight", (d.hidden, width)
    yield "mm_projector.post_norm.weight", (d.hidden,)


def _vision_tower(d: Dimensions) -> Iterator[_Matrix]:
    width = d.vision_hidden
    yield "vision_tower.patch_embed.proj.weight", (width, 3, d.patch, d.patch)
    yield "vision_tower.patch_embed.pos_emb.weight", (d.vision_grid, d.vision_grid, width)
    for block in range(d.vision_blocks):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield f"{prefix}norm0.weight", (width,)
        yield f"{prefix}norm1.weight", (width,)
        yield f"{prefix}wqkv.weight", (3 * d.vision_attention, width)
        yield f"{prefix}wo.weight", (width, d.vision_attention)
        yield f"{prefix}mlp.fc0.weight", (d.vision_intermediate, width)
        yield f"{prefix}mlp.fc1.weight", (width, d.vision_intermediate)
    yield "vision_tower.encoder.final_layernorm.weight", (width,)


MODULE_CLASSES: tuple[tuple[str, str], ...] = (
    ("routed experts", r"\.experts\.\d+\."),
    ("shared experts", r"\.shared_experts\."),
    ("latent projections", r"\.routed_expert_(down|up)_proj$"),
    ("vision tower", r"^vision_tower\b"),
    ("projector", r"^mm_projector\b"),
    ("attention", r"\.self_attn\b"),
    ("residual projections", r"_res_proj$"),
    ("router", r"\.block_sparse_moe\.gate$"),
    ("dense mlp", r"\.mlp\."),
    ("norms", r"norm$"),
    ("embeddings", r"\.embed_tokens$"),
    ("head", r"\.lm_head$"),
)
"""Readable classes of modules: (name, regular expression to search for). The first match wins, so
a norm inside the attention counts as attention. Routed experts, of which there are 247,296, come
first."""

_CLASS_SEARCHES = tuple((name, re.compile(pattern).search) for name, pattern in MODULE_CLASSES)


def module_class(module_name: str) -> str:
    """The readable class of a module, e.g. `"routed experts"`; `"other"` where none fits."""
    for name, search in _CLASS_SEARCHES:
        if search(module_name):
            return name
    return "other"


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """Modules that a server joins into one when it loads them, so they must share one format.

    A group is the members that a parent module really has. A KDA layer's `g_proj` has no
    `q_a_proj` beside it and therefore stands alone, with nothing it could disagree with.
    """

    members: tuple[str, ...]
    """Last components of the modules' names."""
    where: str
    """Regular expression to search for in the parent module's name."""
    source: str


FUSED_GROUPS: tuple[FusedGroup, ...] = (
    FusedGroup(
        members=("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
        where=r"\.self_attn$",
        source="vLLM 0.33.0 loads the input projections of a KDA layer as one matrix",
    ),
    FusedGroup(
        members=("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
        where=r"\.self_attn$",
        source="vLLM 0.33.0 loads the input projections of an MLA layer as one matrix",
    ),
    FusedGroup(
        members=("gate_proj", "up_proj"),
        where=r"\.(mlp|shared_experts)$",
        source="vLLM 0.33.0 loads gate and up of a gated MLP as gate_up_proj",
    ),
    FusedGroup(
        members=("w1", "w3"),
        where=r"\.experts\.\d+$",
        source="vLLM 0.33.0 loads gate (w1) and up (w3) of a routed expert as w13",
    ),
)


@dataclass(frozen=True, slots=True)
class UnquantizedModules:
    """Modules that must stay as they are, whatever else a recipe quantizes."""

    name: str
    pattern: str
    """Regular expression for `re.match` on a module's name, as in an ignore list."""
    reason: str
    source: str


_NEVER_QUANTIZED = "vLLM 0.33.0 builds it without a quantization config, whatever the ignore list"
_PUBLISHED_RECIPE = "the ignore list of RedHatAI/Kimi-K3-FP8-BLOCK"

ALWAYS_UNQUANTIZED: tuple[UnquantizedModules, ...] = (
    UnquantizedModules(
        name="router gate",
        pattern=r".*block_sparse_moe\.gate$",
        reason="a rounded router sends tokens to other experts",
        source=_NEVER_QUANTIZED,
    ),
    UnquantizedModules(
        name="short convolutions",
        pattern=r".*self_attn\.[qkv]_conv1d$",
        reason="its weight has three dimensions: there is no matrix to cut into blocks",
        source=_NEVER_QUANTIZED,
    ),
    UnquantizedModules(
        name="embeddings",
        pattern=r".*embed_tokens$",
        reason="a table that is looked up, not multiplied",
        source=_NEVER_QUANTIZED,
    ),
    UnquantizedModules(
        name="residual projections",
        pattern=r".*_res_proj$",
        reason="its weight has a single row, so there is no 128x128 block in it",
        source=_NEVER_QUANTIZED,
    ),
    UnquantizedModules(
        name="vision tower",
        pattern=r"vision_tower\b",
        reason="the server runs it in BF16",
        source=_NEVER_QUANTIZED,
    ),
    UnquantizedModules(
        name="projector",
        pattern=r"mm_projector\b",
        reason="the server runs it in BF16",
        source=_NEVER_QUANTIZED,
    ),
    UnquantizedModules(
        name="head",
        pattern=r".*lm_head$",
        reason="its rounding errors go straight into the logits",
        source=_PUBLISHED_RECIPE,
    ),
)
