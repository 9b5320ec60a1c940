"""What Kimi-K3 is made of: its dimensions, its tensors, and which modules belong together.

Everything here is data about the model, read from the headers of `moonshotai/Kimi-K3`; nothing
reads a file. Layers are counted from 0. A matrix is `[out, in]`, as in `torch.nn.Linear`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

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
        last = self.layers - 1
        for field in ("mla_layers", "dense_layers"):
            if outside := [n for n in getattr(self, field) if not 0 <= n <= last]:
                raise ValueError(f"{field} names layers {outside}, but the model has layers 0 to {last}")
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
        return {"BF16": 2, "F32": 4, "U8": 1}[self.dtype] * math.prod(self.shape)


def tensors(dimensions: Dimensions, *, quantized_experts: bool = True) -> Iterator[TensorSpec]:
    """Every tensor of a Kimi-K3 source checkpoint, in the order of its shards.

    Routed experts are MXFP4 pairs, `weight_packed` U8 `[out, in / 2]` (the low nibble is the even
    column) and `weight_scale` U8 `[out, in / 32]` (E8M0: 2^(byte - 127)); with
    `quantized_experts=False` they are plain BF16 `weight`s `[out, in]`.
    """
    d = dimensions
    groups = [_layer(d, layer, quantized_experts) for layer in range(d.layers)]
    groups.append(_embeddings_and_head(d))
    if d.vision_blocks:
        groups += [_projector(d), _vision_tower(d)]
    for shard, group in enumerate(groups):
        for name, shape in group:
            dtype = "F32" if name.endswith(_IN_F32) else "U8" if name.endswith(_MXFP4) else "BF16"
            yield TensorSpec(name, dtype, shape, shard)


_IN_F32 = ("conv1d.weight", "A_log", "dt_bias", ".o_norm.weight", "e_score_correction_bias")
_MXFP4 = (".weight_packed", ".weight_scale")
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _layer(d: Dimensions, layer: int, quantized_experts: bool) -> _Shapes:
    prefix = f"language_model.model.layers.{layer}."
    for norm in "input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm":
        yield f"{prefix}{norm}.weight", (d.hidden,)
    yield f"{prefix}self_attention_res_proj.weight", (1, d.hidden)
    yield f"{prefix}mlp_res_proj.weight", (1, d.hidden)
    yield from (_mla if layer in d.mla_layers else _kda)(d, f"{prefix}self_attn.")
    if layer in d.dense_layers:
        yield from _gated_mlp(f"{prefix}mlp.", d.hidden, d.dense_intermediate)
    else:
        yield from _mixture_of_experts(d, f"{prefix}block_sparse_moe.", quantized_experts)


def _kda(d: Dimensions, prefix: str) -> _Shapes:
    width = d.heads * d.head_dim
    for letter in "qkv":
        yield f"{prefix}{letter}_proj.weight", (width, d.hidden)
        yield f"{prefix}{letter}_conv1d.weight", (width, 1, d.conv_kernel)
    yield f"{prefix}f_a_proj.weight", (d.head_dim, d.hidden)
    yield f"{prefix}f_b_proj.weight", (width, d.head_dim)
    yield f"{prefix}b_proj.weight", (d.heads, d.hidden)
    yield f"{prefix}A_log", (d.decay,)
    yield f"{prefix}dt_bias", (width,)
    yield f"{prefix}o_norm.weight", (d.head_dim,)
    yield from _gate_and_output(d, prefix)


def _mla(d: Dimensions, prefix: str) -> _Shapes:
    yield f"{prefix}q_a_proj.weight", (d.q_lora_rank, d.hidden)
    yield f"{prefix}q_a_layernorm.weight", (d.q_lora_rank,)
    yield f"{prefix}q_b_proj.weight", (d.heads * (d.head_dim + d.rope_dim), d.q_lora_rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (d.kv_lora_rank + d.rope_dim, d.hidden)
    yield f"{prefix}kv_a_layernorm.weight", (d.kv_lora_rank,)
    yield f"{prefix}kv_b_proj.weight", (d.heads * 2 * d.head_dim, d.kv_lora_rank)
    yield from _gate_and_output(d, prefix)


def _gate_and_output(d: Dimensions, prefix: str) -> _Shapes:
    yield f"{prefix}g_proj.weight", (d.heads * d.head_dim, d.hidden)
    yield f"{prefix}o_proj.weight", (d.hidden, d.heads * d.head_dim)


def _gated_mlp(prefix: str, width: int, intermediate: int) -> _Shapes:
    yield f"{prefix}gate_proj.weight", (intermediate, width)
    yield f"{prefix}up_proj.weight", (intermediate, width)
    yield f"{prefix}down_proj.weight", (width, intermediate)


def _mixture_of_experts(d: Dimensions, prefix: str, quantized: bool) -> _Shapes:
    yield f"{prefix}gate.weight", (d.experts, d.hidden)
    yield f"{prefix}gate.e_score_correction_bias", (d.experts,)
    yield f"{prefix}routed_expert_down_proj.weight", (d.latent, d.hidden)
    yield f"{prefix}routed_expert_up_proj.weight", (d.hidden, d.latent)
    yield f"{prefix}routed_expert_norm.weight", (d.latent,)
    yield from _gated_mlp(f"{prefix}shared_experts.", d.hidden, d.shared_intermediate)
    wide, narrow = (d.expert_intermediate, d.latent), (d.latent, d.expert_intermediate)
    for expert in range(d.experts):
        for name, (rows, columns) in (("w1", wide), ("w2", narrow), ("w3", wide)):
            module = f"{prefix}experts.{expert}.{name}"
            if quantized:
                yield f"{module}.weight_packed", (rows, columns // 2)
                yield f"{module}.weight_scale", (rows, columns // MXFP4_GROUP)
            else:
                yield f"{module}.weight", (rows, columns)


def _embeddings_and_head(d: Dimensions) -> _Shapes:
    yield "language_model.model.embed_tokens.weight", (d.vocabulary, d.hidden)
    yield "language_model.lm_head.weight", (d.vocabulary, d.hidden)
    yield "language_model.model.norm.weight", (d.hidden,)
    yield "language_model.model.output_attn_res_norm.weight", (d.hidden,)
    yield "language_model.model.output_attn_res_proj.weight", (1, d.hidden)


def _projector(d: Dimensions) -> _Shapes:
    width = d.vision_merge * d.vision_hidden
    yield "mm_projector.proj.0.weight", (width, width)
    yield "mm_projector.proj.2.weight", (d.hidden, width)
    yield "mm_projector.post_norm.weight", (d.hidden,)


def _vision_tower(d: Dimensions) -> _Shapes:
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


# --- the other way round

_NUMBER = re.compile(r"\b(layers|experts|blocks)\.(\d+)\.")
_MLA_ONLY = re.compile(r"\.self_attn\.(q_a|q_b|kv_)").search
_KDA_ONLY = re.compile(r"\.self_attn\.([qkv]_(proj|conv1d)|f_|b_proj|A_log|dt_bias|o_norm)").search


def infer_dimensions(shapes: Mapping[str, tuple[int, ...]], layers: int | None = None) -> Dimensions:
    """The dimensions of a Kimi-K3 whose unpacked tensors have these shapes.

    Each size is what most tensors that show it say, so that a few missing or misshapen ones do not
    change the answer. A size that no tensor shows is the real model's. `layers`: their number where
    the config gives it, so that a missing last layer is noticed.
    """
    default, shown_by = Dimensions(), _axes_that_show_a_size()
    counts = {"layers": 0, "experts": 0, "blocks": 0}
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    mla, dense = Counter[int](), Counter[int]()  # votes of each layer's tensors, for and against
    for name, shape in shapes.items():
        numbers = {what: int(number) for what, number in _NUMBER.findall(name)}
        for what, number in numbers.items():
            counts[what] = max(counts[what], number + 1)
        if numbers.get("experts", 0) > 1:
            continue  # two of a layer are enough
        if (layer := numbers.get("layers")) is not None:
            mla[layer] += bool(_MLA_ONLY(name)) - bool(_KDA_ONLY(name))
            dense[layer] += (".mlp." in name) - (".block_sparse_moe." in name)
        for axis, size in enumerate(shape):
            if field := shown_by.get((_NUMBER.sub("", name), axis)):
                votes[field][size] += 1
    sizes = {field: found.most_common(1)[0][0] for field, found in votes.items()}
    rope = sizes.pop("compressed", 0) - sizes.get("kv_lora_rank", default.kv_lora_rank)
    merge, rest = divmod(sizes.pop("projector", 0), sizes.get("vision_hidden", default.vision_hidden))
    every = range(layers or counts["layers"])
    return Dimensions(
        layers=len(every),
        mla_layers=tuple(n for n in every if mla[n] > 0),
        dense_layers=tuple(n for n in every if dense[n] > 0),
        experts=counts["experts"] or default.experts,
        vision_blocks=counts["blocks"],
        vision_merge=default.vision_merge if rest or not merge else merge,
        rope_dim=rope if rope > 0 else default.rope_dim,
        **sizes,
    )


def _axes_that_show_a_size() -> dict[tuple[str, int], str]:
    """(tensor's name without numbers, axis) -> the size that can be read there.

    Read off a model in which no two sizes, and no sums or products of them, are alike.
    """
    names = [field.name for field in fields(Dimensions) if type(field.default) is int]
    sizes = {name: MXFP4_GROUP * (1000 + number) for number, name in enumerate(names)}
    sizes |= {"layers": 2, "experts": 1, "rope_dim": 1, "vision_blocks": 1, "vision_merge": 2}
    probe = Dimensions(mla_layers=(1,), dense_layers=(0,), **sizes)
    shown = {size: name for name, size in sizes.items() if size > 2}
    shown[probe.kv_lora_rank + probe.rope_dim] = "compressed"
    shown[probe.vision_merge * probe.vision_hidden] = "projector"
    return {
        (_NUMBER.sub("", spec.name), axis): shown[size]
        for spec in tensors(probe, quantized_experts=False)
        for axis, size in enumerate(spec.shape)
        if size in shown
    }


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
    return next((name for name, search in _CLASS_SEARCHES if search(module_name)), "other")


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


_ONE_MATRIX = "vLLM 0.33.0 loads the input projections of {} layer as one matrix"

FUSED_GROUPS: tuple[FusedGroup, ...] = (
    FusedGroup(
        ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"), r"\.self_attn$", _ONE_MATRIX.format("a KDA")
    ),
    FusedGroup(("q_a_proj", "kv_a_proj_with_mqa", "g_proj"), r"\.self_attn$", _ONE_MATRIX.format("an MLA")),
    FusedGroup(
        ("gate_proj", "up_proj"),
        r"\.(mlp|shared_experts)$",
        "vLLM 0.33.0 loads gate and up of a gated MLP as gate_up_proj",
    ),
    FusedGroup(
        ("w1", "w3"), r"\.experts\.\d+$", "vLLM 0.33.0 loads gate (w1) and up (w3) of a routed expert as w13"
    ),
)


@dataclass(frozen=True, slots=True)
class UnquantizedModules:
    """Modules that must stay as they are, whatever else a recipe quantizes."""

    name: str
    pattern: str
    """Regular expression for `re.match` on a module's name, as in an ignore list."""
    reason: str
    source: str = "vLLM 0.33.0 builds it without a quantization config, whatever the ignore list"


ALWAYS_UNQUANTIZED: tuple[UnquantizedModules, ...] = (
    UnquantizedModules(
        "router gate", r".*block_sparse_moe\.gate$", "a rounded router sends tokens to other experts"
    ),
    UnquantizedModules(
        "short convolutions",
        r".*self_attn\.[qkv]_conv1d$",
        "its weight has three dimensions: there is no matrix to cut into blocks",
    ),
    UnquantizedModules("embeddings", r".*embed_tokens$", "a table that is looked up, not multiplied"),
    UnquantizedModules(
        "residual projections",
        r".*_res_proj$",
        "its weight has a single row, so there is no 128x128 block in it",
    ),
    UnquantizedModules("vision tower", r"vision_tower\b", "the server runs it in BF16"),
    UnquantizedModules("projector", r"mm_projector\b", "the server runs it in BF16"),
    UnquantizedModules(
        "head",
        r".*lm_head$",
        "its rounding errors go straight into the logits",
        "the ignore list of RedHatAI/Kimi-K3-FP8-BLOCK",
    ),
)
