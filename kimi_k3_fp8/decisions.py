"""Decisions: what becomes of each module of a source under a recipe, and what cannot be.

The one place that says which modules are quantized. It decides as LLM Compressor does: a module's
`weight`, or its MXFP4 pair, is quantized unless an ignore rule matches or the name ends in "norm".
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from kimi_k3_fp8.architecture import ALWAYS_UNQUANTIZED, FUSED_GROUPS, MXFP4_GROUP, module_class
from kimi_k3_fp8.checkpoint import DTYPE_BITS, Checkpoint, TensorInfo
from kimi_k3_fp8.errors import Problem
from kimi_k3_fp8.recipe import BLOCK, IgnoreRule, Recipe, in_words

SourceFormat = Literal["mxfp4", "plain"]

#: Dtypes of weights that FP8_BLOCK is made from.
QUANTIZABLE = ("BF16", "F16", "F32")
#: Bytes per element that LLM Compressor needs for a moment to quantize one matrix; measured 7.7.
QUANTIZE_BYTES = 8
#: The same to dequantize MXFP4: int64 indices, then float32 values and signs.
DEQUANTIZE_BYTES = 24
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ModulePlan(NamedTuple):
    """What becomes of one module. `rule` is the ignore rule that keeps it, or why it is quantized.
    `parameters` counts elements (an MXFP4 weight's logical ones, scales not)."""

    name: str
    module_class: str
    quantized: bool
    rule: str
    parameters: int
    bytes_in: int
    bytes_out: int


# --- what the source is


def find_source_format(checkpoint: Checkpoint, recipe: Recipe) -> tuple[SourceFormat, list[Problem]]:
    problems = []
    config = checkpoint.config
    if config and config.get("model_type") != "kimi_k3":
        problems.append(
            Problem(
                code="not-kimi-k3",
                subject="config.json",
                message="this is no Kimi-K3: model_type is "
                f"{config.get('model_type')!r}, architectures {config.get('architectures')!r}",
                fix="for another model give your own ignore list and accept=['not-kimi-k3']",
            )
        )
    configs = checkpoint.quantization_configs()
    if not configs:
        packed = [t.name for t in checkpoint.tensors.values() if t.parameter == "weight_packed"]
        problems += [
            Problem(
                code="source-quantization",
                subject=name,
                message="it is packed, but config.json holds no quantization_config to unpack it by",
                fix="use the model's own config.json",
            )
            for name in packed
        ]
        return "plain", problems
    (path, found), *others = configs.items()
    problems += [
        Problem(
            code="conflicting-configs",
            subject=f"config.json: {other}",
            message=f"it differs from {path}, and nothing says which one the weights follow",
            fix="use the model's own config.json",
        )
        for other, value in others
        if value != found
    ]
    problems += _mxfp4_problems(path, found)
    return "mxfp4", problems


def _mxfp4_problems(path: str, config: Any) -> Iterator[Problem]:
    """Nothing if a quantization config is the MXFP4 that Kimi-K3 is published in."""
    expected = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4_GROUP,
        "symmetric": True,
    }
    groups = config.get("config_groups") if isinstance(config, dict) else None
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    scheme = schemes[0] if len(schemes) == 1 and isinstance(schemes[0], dict) else {}
    weights = scheme.get("weights") or {}
    wrong = {key: weights.get(key) for key, value in expected.items() if weights.get(key) != value}
    layout = scheme.get("format") or (config.get("format") if isinstance(config, dict) else None)
    if layout != "mxfp4-pack-quantized":
        wrong["format"] = layout
    if "Linear" not in (scheme.get("targets") or []):
        wrong["targets"] = scheme.get("targets")
    if wrong:
        seen = ", ".join(f"{key} {value!r}" for key, value in wrong.items())
        yield Problem(
            code="source-quantization",
            subject=f"config.json: {path}",
            message=f"only MXFP4 in one group (mxfp4-pack-quantized, of 32) is converted; found {seen}",
            fix="start from moonshotai/Kimi-K3 as published, or from an unquantized copy",
            expected=expected,
            found=weights,
        )


# --- what becomes of each module


def by_module(tensors: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """The tensors of each module, in the order they come."""
    found: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.module].append(tensor)
    return found


def expected_tensors(
    tensors: Iterable[TensorInfo], recipe: Recipe, source_format: SourceFormat
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a recipe makes of a source's tensors: dtype and shape of every output tensor by name."""
    return {
        name: (dtype, shape)
        for module, held in by_module(tensors).items()
        for name, dtype, shape in decide(module, held, recipe, source_format)[1].outputs
    }


class Unit(NamedTuple):
    """A module's tensors: never split over jobs. Outputs are (name, dtype, shape). `memory_bytes` are
    alive from the job's beginning to its end, `transient_bytes` while this module is worked on."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    bytes_out: int
    memory_bytes: int
    transient_bytes: int


def decide(
    name: str, held: Sequence[TensorInfo], recipe: Recipe, source_format: SourceFormat
) -> tuple[ModulePlan, Unit, list[Problem]]:
    """What becomes of the module of this name that holds these tensors, and what is wrong with it."""
    parameters = {tensor.parameter: tensor for tensor in held}
    packed, weight = parameters.get("weight_packed"), parameters.get("weight")
    rule = recipe.rule_for(name)
    problems: list[Problem] = []
    shape: tuple[int, ...] | None
    if packed is not None or (source_format == "mxfp4" and _orphan_scale(parameters, rule is not None)):
        why, consumed = "MXFP4 weight", {"weight_packed", "weight_scale"}
        shape, problems = _pair_shape(name, parameters)
        quantized = rule is None and shape is not None
        if rule is not None and packed is not None:
            problems.append(_ignores_packed(rule, name))
    else:
        why, consumed = "weight", {"weight"}
        shape = weight.shape if weight else None
        quantized = weight is not None and rule is None and not name.endswith("norm")
    if quantized and shape is not None:
        problems += _matrix_problems(name, shape, weight)
        quantized = len(shape) == 2
    outputs = [(t.name, t.dtype, t.shape) for t in held if not (quantized and t.parameter in consumed)]
    if quantized and shape is not None:
        scale_dtype = weight.dtype if weight else DTYPE_NAMES[recipe.dequantize_dtype]
        blocks = (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
        outputs += [(f"{name}.weight", "F8_E4M3", shape), (f"{name}.weight_scale", scale_dtype, blocks)]
    else:
        why = rule.name if rule else "norm" if name.endswith("norm") else "no weight"
    problems += _tensor_problems(held, outputs)

    bytes_in = sum(tensor.nbytes for tensor in held)
    bytes_out = sum(DTYPE_BITS.get(dtype, 8) * prod(size) // 8 for _, dtype, size in outputs)
    matrix = prod(shape) if shape is not None else 0
    other = sum(prod(tensor.shape) for tensor in held if tensor.parameter not in _MATRIX_PARAMETERS)
    alive, transient = bytes_in, 0
    if quantized:
        dequantized = DTYPE_BITS[DTYPE_NAMES[recipe.dequantize_dtype]] // 8 * matrix if packed else 0
        alive += bytes_out + dequantized
        transient = matrix * (DEQUANTIZE_BYTES if packed else QUANTIZE_BYTES)
    module = ModulePlan(name, module_class(name), quantized, why, matrix + other, bytes_in, bytes_out)
    return module, Unit(tuple(held), tuple(outputs), bytes_out, alive, transient), problems


_MATRIX_PARAMETERS = ("weight", "weight_packed", "weight_scale")


def _ignores_packed(rule: IgnoreRule, module: str) -> Problem:
    return Problem(
        code="ignores-packed",
        subject=rule.pattern,
        message=f"it keeps {module} as it is, which would stay MXFP4 under a config of FP8",
        fix=f"drop or narrow the ignore rule {rule.name!r}",
    )


def _tensor_problems(
    held: Sequence[TensorInfo], outputs: Sequence[tuple[str, str, tuple[int, ...]]]
) -> Iterator[Problem]:
    for tensor in held:
        if tensor.dtype not in DTYPE_BITS:
            yield Problem(
                code="unknown-dtype",
                subject=tensor.name,
                message=f"its dtype {tensor.dtype!r} is not one that safetensors 0.8 defines",
                fix="update this library, or leave the tensor out of the checkpoint",
            )
    names = [output[0] for output in outputs]
    for name in {name for name in names if names.count(name) > 1} if len({*names}) < len(names) else ():
        yield Problem(
            code="name-collision",
            subject=name,
            message="the source already has a tensor of this name, which the output needs for itself",
            fix="use the model's own shards",
        )


def _orphan_scale(parameters: Mapping[str, TensorInfo], ignored: bool) -> bool:
    """A weight_scale with no weight of any kind beside it, in a module that is not ignored."""
    return "weight_scale" in parameters and "weight" not in parameters and not ignored


def _pair_shape(
    name: str, parameters: Mapping[str, TensorInfo]
) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """The logical shape [out, in] of an MXFP4 pair, or what is wrong with it."""
    packed, scale = parameters.get("weight_packed"), parameters.get("weight_scale")
    if packed is None or scale is None:
        have, lack = (
            ("weight_scale", "weight_packed") if packed is None else ("weight_packed", "weight_scale")
        )
        return None, [
            Problem(
                code="pair-incomplete",
                subject=f"{name}.{have}",
                message=f"its partner {name}.{lack} is in no shard",
                fix="download the shards again from one revision; an MXFP4 weight needs both",
            )
        ]
    right = (
        packed.dtype == scale.dtype == "U8"
        and len(packed.shape) == len(scale.shape) == 2
        and packed.shape[0] == scale.shape[0]
        and 2 * packed.shape[1] == MXFP4_GROUP * scale.shape[1]
    )
    if right:
        return (packed.shape[0], 2 * packed.shape[1]), []
    unsupported = {packed.dtype, scale.dtype} - {"U8"}
    return None, [
        Problem(
            code="unsupported-dtype" if unsupported else "pair-shape",
            subject=f"{name}.weight_packed",
            message=f"{packed.dtype} {list(packed.shape)} and its scale {scale.dtype} "
            f"{list(scale.shape)} are no MXFP4 pair: U8 [out, in / 2] and U8 [out, in / 32]",
            fix="download the shards again, or see whether the model has changed its format",
        )
    ]


def _matrix_problems(name: str, shape: tuple[int, ...], weight: TensorInfo | None) -> Iterator[Problem]:
    subject = weight.name if weight else f"{name}.weight_packed"
    keep = f"add an ignore rule for it, e.g. {name!r}"
    if weight is not None and weight.dtype not in QUANTIZABLE:
        yield Problem(
            code="unsupported-dtype",
            subject=subject,
            message=f"it would be quantized, but {weight.dtype} is none of {', '.join(QUANTIZABLE)}",
            fix=keep,
        )
    if len(shape) != 2:
        yield Problem(
            code="not-a-matrix",
            subject=subject,
            message=f"it would be quantized, but its shape {list(shape)} is not [out, in]",
            fix=keep,
        )
    elif any(size % block for size, block in zip(shape, BLOCK, strict=True)):
        yield Problem(
            code="not-block-multiple",
            subject=subject,
            message=f"its shape {list(shape)} is not a multiple of the block {list(BLOCK)}",
            fix=keep,
        )


# --- what the recipe means for this checkpoint


def rule_problems(checkpoint: Checkpoint, recipe: Recipe, modules: Sequence[ModulePlan]) -> Iterator[Problem]:
    names = [module.name for module in modules]
    if modules and not any(module.quantized for module in modules):
        yield Problem(
            code="nothing-to-quantize",
            subject="ignore",
            message="every module is kept as it is, so there is nothing to do",
            fix="drop some ignore rules",
        )
    decided = {module.rule for module in modules}
    for rule in recipe.ignore:
        # A rule that kept some module has matched; the others are tried on every name.
        if names and rule.name not in decided - {"norm", "no weight"} and not _matches_any(rule, names):
            yield Problem(
                code="ignore-unmatched",
                subject=rule.pattern,
                message=f"the ignore rule {rule.name!r} matches no module; "
                f"the nearest is {_nearest(rule.pattern, names)}",
                fix=f"mend the pattern, or drop the rule: recipe.without_rule({rule.name!r})",
            )
    yield from _source_ignore_problems(checkpoint, modules)
    never = re.compile("|".join(f"(?:{kind.pattern})" for kind in ALWAYS_UNQUANTIZED))
    for module in modules:
        if module.quantized and never.match(module.name):
            kind = next(k for k in ALWAYS_UNQUANTIZED if re.match(k.pattern, module.name))
            yield Problem(
                code="must-stay-unquantized",
                subject=module.name,
                message=f"the recipe would quantize it, but {kind.reason} ({kind.source})",
                fix="put the ignore rule back, or accept=['must-stay-unquantized'] if you mean it",
            )
    yield from _fused_problems(modules)


def _matches_any(rule: IgnoreRule, names: Sequence[str]) -> bool:
    return any(rule.matches(name) for name in names)


def _source_ignore_problems(checkpoint: Checkpoint, modules: Sequence[ModulePlan]) -> Iterator[Problem]:
    """The dequantizer leaves alone what the source's own config ignores."""
    config = next(iter(checkpoint.quantization_configs().values()), {})
    ignored = config.get("ignore") if isinstance(config, dict) else None
    packed = [module.name for module in modules if module.rule == "MXFP4 weight"]
    for pattern in ignored or []:
        exact = isinstance(pattern, str) and not pattern.startswith("re:")
        try:
            matches = pattern.__eq__ if exact else IgnoreRule(name="the source's", pattern=pattern).matches
        except ValidationError as error:
            yield Problem(
                code="source-quantization",
                subject=f"config.json: ignore entry {pattern!r}",
                message=f"the source's own quantization_config cannot be followed: {in_words(error)}",
                fix="use the model's own config.json",
            )
            continue
        if hit := next(filter(matches, packed), None):
            yield Problem(
                code="ignores-packed",
                subject=pattern,
                message=f"the source's own quantization_config ignores {hit}, which is packed all the same",
                fix="use the model's own config.json",
            )


def _fused_problems(modules: Sequence[ModulePlan]) -> Iterator[Problem]:
    families: dict[str, dict[str, ModulePlan]] = defaultdict(dict)
    for module in modules:
        parent, _, last = module.name.rpartition(".")
        families[parent][last] = module
    for parent, children in families.items():
        for group in FUSED_GROUPS:
            members = [children[last] for last in group.members if last in children]
            if len({member.quantized for member in members}) > 1 and re.search(group.where, parent):
                kept = [m.name.rpartition(".")[2] for m in members if not m.quantized]
                yield Problem(
                    code="fused-group-split",
                    subject=f"{parent}.{{{','.join(m.name.rpartition('.')[2] for m in members)}}}",
                    message=f"only {', '.join(kept)} would be kept, but {group.source}",
                    fix="ignore all of the group or none of it",
                )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    kinds = {re.sub(r"\d+", "0", name): name for name in reversed(names)}
    text = re.sub(r"\\.|[^\w.]|^re:", "", pattern.replace(r"\.", ".")).strip(".")
    parts = {part: name for kind, name in kinds.items() for part in (kind, *kind.split("."))}
    close = difflib.get_close_matches(text, [*parts], n=1, cutoff=0.0)
    return parts[close[0]] if close else names[0]
