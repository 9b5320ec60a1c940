"""Serving: which parallel layouts of vLLM load a checkpoint, and the command for each node.

The rules were read from vLLM 0.33.0: its Kimi-K3 model for NVIDIA GPUs, the FP8 shape checks, and the
loader of routed experts. Nothing of this was run on a GPU.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import log2
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3_fp8.architecture import Dimensions, module_class, tensors
from kimi_k3_fp8.checkpoint import Checkpoint, TensorInfo, find_source, read_checkpoint
from kimi_k3_fp8.errors import Problem, ProblemsError, errors_in
from kimi_k3_fp8.machine import gigabytes, parse_size
from kimi_k3_fp8.planning import Plan, expected_tensors
from kimi_k3_fp8.recipe import BLOCK, IgnoreRule, Recipe

#: The release the rules were read from.
VLLM_VERSION = "0.33.0"
#: What is to be served: a plan, a finished checkpoint, or the folder of one.
Served = Plan | Checkpoint | str | os.PathLike[str]

#: Axis of [out, in] that tensor parallelism cuts, by a module's last name; others are whole on every GPU.
_CUT_AXIS = dict.fromkeys(
    "gate_proj up_proj w1 w3 q_proj k_proj v_proj b_proj g_proj f_b_proj q_b_proj kv_b_proj "
    "q_conv1d k_conv1d v_conv1d".split(),
    0,
) | dict.fromkeys(("down_proj", "o_proj", "w2"), 1)
_VOCABULARY = ("embed_tokens", "lm_head")  # cut as well, and padded to fit
_EXPERTS = "routed experts"
#: Slices of routed experts narrower than this are padded to it (min_moe_intermediate_per_partition).
_PADDED_TO = 256
#: What an ignore rule can mend. Routed experts are not among it: ignored, they would stay MXFP4.
_RULES = {"dense mlp": r"re:.*\.layers\.{dense}\.mlp\..*", "shared experts": r"re:.*\.shared_experts\..*"}
_NUMBERS = re.compile(r"\.layers\.(\d+)\.(?:.*\.experts\.(\d+)\.)?").search


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread: each layer over `tensor_parallel_size` GPUs, the layers over
    `pipeline_parallel_size` groups of those, and all GPUs over `nodes` machines. With
    `expert_parallel` a GPU holds whole routed experts in place of a slice of each.

    Raises ValueError for sizes below 1 and for GPUs that cannot be shared evenly among the nodes.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    nodes: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.tensor_parallel_size, self.pipeline_parallel_size, self.nodes) < 1:
            raise ValueError(f"the sizes of a layout are at least 1, not as in {self!r}")
        if self.gpus % self.nodes:
            raise ValueError(f"{self.gpus} GPUs cannot be shared evenly among {self.nodes} nodes")

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        pipeline = f" x PP {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        expert = " with expert parallel" if self.expert_parallel else ""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"TP {self.tensor_parallel_size}{pipeline}{expert}{nodes}"


class LayoutRow(NamedTuple):
    """A layout, the bytes of weights on its fullest GPU, and what keeps it from loading."""

    layout: Layout
    weight_bytes: int
    problems: tuple[Problem, ...]


# --- what loads


def check_layout(
    source: Served, layout: Layout, *, gpu_memory: int | str | None = None, memory_fraction: float = 0.95
) -> tuple[Problem, ...]:
    """What keeps vLLM from serving a checkpoint in a layout, and what works instead.

    gpu_memory: of one GPU, as "141GB" or bytes; None leaves memory unchecked. memory_fraction: the
        share of it that vLLM may use (`--gpu-memory-utilization`).
    Raises SourceError where there is no such folder, ValueError for a size that is none.
    """
    weights, room = _weigh(source), _room(gpu_memory, memory_fraction)
    found = _obstacles(weights, layout, room)
    advice = _advice(weights, layout, room) if found else ""
    return tuple(problem.model_copy(update={"fix": problem.fix or advice}) for problem in found)


def layouts(
    source: Served,
    gpus: int = 16,
    nodes: int = 2,
    *,
    gpu_memory: int | str | None = None,
    memory_fraction: float = 0.95,
) -> tuple[LayoutRow, ...]:
    """Every layout of so many GPUs on so many nodes, and whether it loads; see `check_layout`."""
    weights, room = _weigh(source), _room(gpu_memory, memory_fraction)
    return tuple(
        LayoutRow(layout, _heaviest(weights, layout), _obstacles(weights, layout, room))
        for layout in _candidates(gpus, nodes)
    )


def nearest_layout(source: Served, layout: Layout) -> Layout | None:
    """This layout if it loads, else the one most like it: with as many GPUs if there is one, else
    with two or four times as many, else with fewer. Memory is not checked."""
    return _nearest(_weigh(source), layout, None)


def weights_per_gpu(source: Served, layout: Layout) -> int:
    """Bytes of weights on the GPU that holds most of them. An estimate of weights alone: KV cache and
    activations come on top. The vision tower is counted whole on every GPU."""
    return _heaviest(_weigh(source), layout)


def rules_for_layout(
    layout: Layout,
    recipe: Recipe | None = None,
    *,
    tail_fusion: bool = False,
    dimensions: Dimensions | None = None,
) -> tuple[IgnoreRule, ...]:
    """The ignore rules that a recipe lacks for its result to load in a layout, each with its reason.

    tail_fusion: also keep `routed_expert_up_proj`, without which vLLM does not fuse the end of a MoE
        layer. dimensions: of the model, by default the real one.
    Raises ProblemsError where no ignore rule helps, ValueError where the layout has no tail fusion.
    """
    model = dimensions or Dimensions()
    specs = tensors(replace(model, experts=1))  # all experts have the same shapes
    source = (TensorInfo(s.name, s.dtype, s.shape, "", 0, 0) for s in specs)
    made = expected_tensors(source, recipe or Recipe(), "mxfp4")
    weights = _sum(TensorInfo(name, *what, "", 0, 0) for name, what in made.items())
    found = _obstacles(weights, layout, None)
    if hopeless := [problem for problem in found if problem.subject not in _RULES]:
        raise ProblemsError(hopeless)
    dense = "|".join(map(str, model.dense_layers))
    places = {"dense": f"({dense})" if "|" in dense else dense}
    rules = [
        IgnoreRule(
            name=problem.subject,
            pattern=_RULES[problem.subject].format(**places),
            reason=f"for {layout}: {problem.message}",
        )
        for problem in found
    ]
    if tail_fusion:
        if layout.expert_parallel or layout.tensor_parallel_size not in (8, 16):
            raise ValueError(f"vLLM has tail fusion at TP 8 and 16 without expert parallel, not at {layout}")
        more = gigabytes((model.layers - len(model.dense_layers)) * model.hidden * model.latent)
        reason = f"vLLM {VLLM_VERSION} fuses the end of a MoE layer only with this in BF16; {more} more"
        rules.append(IgnoreRule(name="tail fusion", pattern=r"re:.*\.routed_expert_up_proj", reason=reason))
    return tuple(rules)


class _Width(NamedTuple):
    module_class: str
    size: int
    quantized: bool


class _Weights(NamedTuple):
    """What layouts depend on. nbytes: by place (a layer, or else "first", "last" or "every" pipeline
    stage) and by how the tensors are spread ("cut", "expert", "whole")."""

    nbytes: Mapping[tuple[int | str, str], int]
    widths: tuple[_Width, ...]
    layers: int
    experts: int
    problems: tuple[Problem, ...] = ()


def _weigh(source: Served) -> _Weights:
    if isinstance(source, Plan):
        return _sum(source.output_tensors.values())
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(find_source(source))
    return _sum(checkpoint.tensors.values())._replace(problems=errors_in(checkpoint.problems))


def _sum(held: Iterable[TensorInfo]) -> _Weights:
    nbytes: Counter[tuple[int | str, str]] = Counter()
    widths, layers, experts = set(), 0, 0
    for tensor in held:
        kind, last = module_class(tensor.module), tensor.module.rpartition(".")[2]
        place: int | str = {"vision tower": "every", "projector": "every", "embeddings": "first"}.get(kind, "last")
        if numbers := _NUMBERS(tensor.name):
            place = int(numbers[1])
            layers, experts = max(layers, place + 1), max(experts, int(numbers[2] or -1) + 1)
        axis = _CUT_AXIS.get(last)
        if axis is not None and tensor.parameter == "weight" and len(tensor.shape) == 2:
            widths.add(_Width(kind, tensor.shape[axis], tensor.dtype == "F8_E4M3"))
        spread = "cut" if axis is not None or last in _VOCABULARY else "whole"
        nbytes[place, "expert" if kind == _EXPERTS else spread] += tensor.nbytes
    return _Weights(nbytes, tuple(sorted(widths)), layers, experts)


def _obstacles(weights: _Weights, layout: Layout, room: int | None) -> tuple[Problem, ...]:
    """The problems of a layout, at most one a class of modules, without advice."""
    found = {w.module_class: p for w in weights.widths if (p := _width_problem(w, layout))}
    if (stages := layout.pipeline_parallel_size) > weights.layers:
        message = f"{weights.layers} layers cannot be shared among {stages} pipeline stages"
        found["layers"] = Problem(code="layout-does-not-load", subject="layers", message=message)
    elif room is not None and (size := _heaviest(weights, layout)) > room:
        message = (
            f"about {gigabytes(size)} of weights on a GPU that has {gigabytes(room)} for them (an estimate of "
            "weights alone: KV cache and activations come on top)"
        )
        found["memory"] = Problem(
            code="layout-too-large", subject="memory", message=message, expected=room, found=size
        )
    return (*weights.problems, *found.values())


def _width_problem(width: _Width, layout: Layout) -> Problem | None:
    kind, count, code = width.module_class, layout.tensor_parallel_size, "layout-does-not-load"
    each, rest = divmod(width.size, count)
    fits = not rest and (each % BLOCK[0] == 0 or not width.quantized)
    if fits or (kind == _EXPERTS and layout.expert_parallel):
        return None
    message = f"a slice of {width.size} / {count} = {each} is no multiple of {BLOCK[0]}"
    if rest:
        message = f"{width.size} rows or columns cannot be cut into {count} equal slices"
    elif kind == _EXPERTS and count > 1 and each < _PADDED_TO:
        code = "layout-silently-wrong"
        message += f", is padded to {_PADDED_TO} and gets the wrong scales: it loads, with wrong weights"
    return Problem(code=code, subject=kind, message=message, expected=BLOCK[0], found=each)


def _room(gpu_memory: int | str | None, fraction: float) -> int | None:
    return None if gpu_memory is None else int(parse_size(gpu_memory) * fraction)


def _heaviest(weights: _Weights, layout: Layout) -> int:
    count, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    # vLLM gives layers that are left over to the stages before the last one (get_pp_indices).
    least, rest = divmod(weights.layers, stages)
    ends = [least * (n + 1) + max(0, n + 2 + rest - stages) - (n + 1 == stages and rest > 0) for n in range(stages)]
    share = {"cut": 1 / count, "expert": 1 / count, "whole": 1.0}
    if layout.expert_parallel and weights.experts:
        share["expert"] = -(-weights.experts // count) / weights.experts
    totals = [0.0] * stages
    for (place, spread), nbytes in weights.nbytes.items():
        for stage in ends:
            totals[stage] += nbytes * share[spread]
    return round(max(totals))
