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
from math import ceil, log2
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3_fp8.architecture import Dimensions, module_class, tensors
from kimi_k3_fp8.checkpoint import Checkpoint, TensorInfo, find_source, read_checkpoint
from kimi_k3_fp8.decisions import expected_tensors
from kimi_k3_fp8.errors import Problem, ProblemsError, errors_in
from kimi_k3_fp8.machine import gigabytes, parse_size
from kimi_k3_fp8.planning import Plan
from kimi_k3_fp8.recipe import BLOCK, IgnoreRule, Recipe

#: The release the rules were read from.
VLLM_VERSION = "0.33.0"
#: What is to be served: a plan, a finished checkpoint, or the folder of one.
Served = Plan | Checkpoint | str | os.PathLike[str]
#: Of one GPU, as "141GB" or bytes; None leaves memory unchecked.
_Memory = int | str | None

#: Last names of modules whose [out, in] tensor parallelism cuts by rows or by columns; all others, but for
#: embeddings and head (cut, and padded to fit), are whole on every GPU.
_BY_ROWS = re.compile(r"gate_proj|up_proj|w[13]|[qkvbg]_proj|(f|q|kv)_b_proj|[qkv]_conv1d").fullmatch
_BY_COLUMNS = re.compile(r"down_proj|o_proj|w2").fullmatch
_EXPERTS = "routed experts"
#: Slices of routed experts narrower than this are padded to it (min_moe_intermediate_per_partition).
_PADDED_TO = 256
#: What an ignore rule can mend. Routed experts are not among it: ignored, they would stay MXFP4.
_RULES = {"dense mlp": r"re:.*\.layers\.{dense}\.mlp\..*", "shared experts": r"re:.*\.shared_experts\..*"}
#: Pipeline stages that hold what is in no layer; the last one holds the rest.
_PLACES = {"embeddings": "first", "vision tower": "every", "projector": "every"}
_NUMBERS = re.compile(r"\.layers\.(\d+)\.(?:block_sparse_moe\.experts\.(\d+)\.)?").search


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
    source: Served, layout: Layout, *, gpu_memory: _Memory = None, memory_fraction: float = 0.95
) -> tuple[Problem, ...]:
    """What keeps vLLM from serving a checkpoint in a layout, and what works instead.

    source: a plan, or a finished checkpoint or its folder. layout: how the GPUs share it.
    gpu_memory: of one GPU, as "141GB" or bytes; None leaves memory unchecked. memory_fraction: the
        share of it that vLLM may use (`--gpu-memory-utilization`).
    Raises SourceError where there is no such folder, ValueError for a size that is none.
    """
    weights, room = _weigh(source), _room(gpu_memory, memory_fraction)
    found = _obstacles(weights, layout, room)
    fix = _advice(weights, layout, room) if found else ""
    return (*weights.problems, *(problem.model_copy(update={"fix": fix}) for problem in found))


def layouts(
    source: Served,
    gpus: int = 16,
    nodes: int = 2,
    *,
    gpu_memory: _Memory = None,
    memory_fraction: float = 0.95,
) -> tuple[LayoutRow, ...]:
    """Every layout of so many GPUs (gpus) on so many nodes, and whether it loads.

    source, gpu_memory, memory_fraction: as for `check_layout`. Raises what that raises.
    """
    weights, room = _weigh(source), _room(gpu_memory, memory_fraction)
    return tuple(
        LayoutRow(layout, _heaviest(weights, layout), weights.problems + _obstacles(weights, layout, room))
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
    if hopeless := [problem for problem in found if not _mendable(problem)]:
        raise ProblemsError(hopeless)
    dense = "|".join(map(str, model.dense_layers))
    rules = []
    for kind, message in ((problem.subject, problem.message) for problem in found):
        pattern = _RULES[kind].format(dense=f"({dense})" if "|" in dense else dense)
        rules.append(IgnoreRule(name=kind, pattern=pattern, reason=f"for {layout}: {message}"))
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
    problems = errors_in(checkpoint.problems)
    if packed := [name for name in checkpoint.tensors if name.endswith(".weight_packed")]:
        message = "it is MXFP4: these rules are about the converted checkpoint"
        fix = "give that, or its plan"
        problems += (Problem(code="packed-left", subject=packed[0], message=message, fix=fix),)
    return _sum(checkpoint.tensors.values())._replace(problems=problems)


def _sum(held: Iterable[TensorInfo]) -> _Weights:
    nbytes: Counter[tuple[int | str, str]] = Counter()
    widths, layers, experts = set(), 0, 0
    for tensor in held:
        kind, last = module_class(tensor.module), tensor.module.rpartition(".")[2]
        place: int | str = _PLACES.get(kind, "last")
        if numbers := _NUMBERS(tensor.name):
            place = int(numbers[1])
            layers, experts = max(layers, place + 1), max(experts, int(numbers[2] or -1) + 1)
        axis = 0 if _BY_ROWS(last) else 1 if _BY_COLUMNS(last) else None
        if axis is not None and tensor.parameter == "weight" and len(tensor.shape) == 2:
            widths.add(_Width(kind, tensor.shape[axis], tensor.dtype == "F8_E4M3"))
        cut = axis is not None or kind in ("embeddings", "head")
        nbytes[place, "expert" if kind == _EXPERTS else "cut" if cut else "whole"] += tensor.nbytes
    return _Weights(nbytes, tuple(sorted(widths)), layers, experts)


def _obstacles(weights: _Weights, layout: Layout, room: int | None) -> tuple[Problem, ...]:
    """The problems of a layout, at most one a class of modules, without advice."""
    found = {w.module_class: p for w in weights.widths if (p := _width_problem(w, layout))}
    if (stages := layout.pipeline_parallel_size) > weights.layers:
        message = f"{weights.layers} layers cannot be shared among {stages} pipeline stages"
        found["layers"] = Problem(code="layout-does-not-load", subject="layers", message=message)
    elif room is not None and (size := _heaviest(weights, layout)) > room:
        message = (
            f"about {gigabytes(size)} of weights on a GPU that has {gigabytes(room)} for them (an estimate "
            "of weights alone: KV cache and activations come on top)"
        )
        found["memory"] = Problem(
            code="layout-too-large", subject="memory", message=message, expected=room, found=size
        )
    return tuple(found.values())


def _width_problem(width: _Width, layout: Layout) -> Problem | None:
    kind, count, code = width.module_class, layout.tensor_parallel_size, "layout-does-not-load"
    each, rest = divmod(width.size, count)
    fits = not rest and (each % BLOCK[0] == 0 or not width.quantized)
    if fits or (kind == _EXPERTS and layout.expert_parallel):
        return None
    if rest:
        message = f"{width.size} rows or columns cannot be cut into {count} equal slices"
        return Problem(code=code, subject=kind, message=message, found=width.size)
    message = f"a slice of {width.size} / {count} = {each} is no multiple of {BLOCK[0]}"
    if kind == _EXPERTS and count > 1 and each < _PADDED_TO:
        code = "layout-silently-wrong"
        message += f", is padded to {_PADDED_TO} and gets the wrong scales: it loads, with wrong weights"
    return Problem(code=code, subject=kind, message=message, expected=BLOCK[0], found=each)


def _mendable(problem: Problem) -> bool:
    """Whether leaving these modules unquantized helps: slices of any width are fine then."""
    return problem.subject in _RULES and problem.expected is not None


def _room(gpu_memory: _Memory, fraction: float) -> int | None:
    return None if gpu_memory is None else int(parse_size(gpu_memory) * fraction)


def _heaviest(weights: _Weights, layout: Layout) -> int:
    count, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    # vLLM gives layers that are left over to the stages before the last one (get_pp_indices).
    least, rest = divmod(weights.layers, stages)
    sizes = [least + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages)]
    held_by: dict[int | str, Iterable[int]] = {"first": [0], "last": [stages - 1], "every": range(stages)}
    held_by |= enumerate([stage] for stage, size in enumerate(sizes) for _ in range(size))
    share = {"cut": 1 / count, "expert": 1 / count, "whole": 1.0}
    if layout.expert_parallel and weights.experts:
        share["expert"] = ceil(weights.experts / count) / weights.experts
    totals = [0.0] * stages
    for (place, spread), nbytes in weights.nbytes.items():
        for stage in held_by[place]:
            totals[stage] += nbytes * share[spread]
    return round(max(totals))


def _candidates(gpus: int, nodes: int) -> Iterator[Layout]:
    for count in range(gpus, 0, -1):
        if gpus % count == 0:
            yield Layout(count, gpus // count, nodes)
            if count > 1:
                yield Layout(count, gpus // count, nodes, expert_parallel=True)


def _nearest(weights: _Weights, layout: Layout, room: int | None) -> Layout | None:
    def unlike(other: Layout) -> tuple[float, bool]:
        steps = abs(log2(other.tensor_parallel_size / layout.tensor_parallel_size))
        return steps, other.expert_parallel != layout.expert_parallel

    a_node, gpus = layout.gpus // layout.nodes, layout.gpus
    for number in (gpus, 2 * gpus, 4 * gpus, *range(gpus - 1, 0, -1)):
        nodes = ceil(number / a_node)
        for candidate in sorted(_candidates(number, nodes), key=unlike) if number % nodes == 0 else ():
            if not _obstacles(weights, candidate, room):
                return candidate
    return None


def _advice(weights: _Weights, layout: Layout, room: int | None) -> str:
    nearest = _nearest(weights, layout, room)
    whole = replace(layout, expert_parallel=True)
    left = _obstacles(weights, whole, room)
    advice = [f"serve it as {nearest}"] if nearest else []
    if left and all(map(_mendable, left)):
        kept = f"which keeps the {' and '.join(problem.subject for problem in left)} in BF16"
        advice.append(f"convert with Recipe.for_layout, {kept}, and serve it as {whole}")
    return "; or ".join(advice) or "use more GPUs, or GPUs with more memory"


# --- the command for each node

_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Text = Annotated[str, Field(pattern=r"^[^\x00]+$")]
_Word = Annotated[str, Field(pattern=r"^[^\x00-][^\x00]*$")]  # cannot be taken for an option


class Placeholder(BaseModel):
    """A shell variable that whoever runs the command sets: the one kind of value left unquoted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variable: _Name

    def __str__(self) -> str:
        return f"${self.variable}"


class ServeOptions(BaseModel):
    """The values in a serving command. All are quoted for the shell, but for a Placeholder's `$NAME`.

    form: `docker run`, or plain `vllm serve`.
    model: a Hub id or an absolute path, by default the checkpoint's. A path or a Placeholder is mounted
        into the container at the same place.
    interface: the network interface, and master_address: of node 0; used with several nodes only.
    host_network: whether the container shares the node's network; by default with several nodes.
    cache: of Hugging Face, on the node; a leading "~/" stands for the home folder.
    environment: more variables. flags: more words for vLLM; giving some replaces the default ones.

    Raises pydantic.ValidationError (a ValueError) for unknown fields and for what no command can hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: Literal["docker", "vllm"] = "docker"
    model: _Word | Placeholder | None = None
    image: _Word = f"vllm/vllm-openai:v{VLLM_VERSION}"
    port: int = Field(default=8000, ge=1, le=65535)
    interface: _Text | Placeholder = Placeholder(variable="IFACE_NAME")
    master_address: _Text | Placeholder = Placeholder(variable="HEAD_IP")
    host_network: bool | None = None
    cache: _Text = "~/.cache/huggingface"
    gpu_memory_utilization: float = Field(default=0.95, gt=0, le=1)
    load_format: _Text = "fastsafetensors"
    tool_call_parser: _Text | None = "kimi_k3"
    reasoning_parser: _Text | None = "kimi_k3"
    environment: Mapping[_Name, _Text] = {}
    flags: tuple[_Text, ...] = ("--no-enable-flashinfer-autotune", "--disable-custom-all-reduce")


#: What the card of RedHatAI/Kimi-K3-FP8-BLOCK says (2026-07-27). vLLM 0.33.0 does not load that layout.
PUBLISHED_LAYOUT = Layout(16, nodes=2)
PUBLISHED_OPTIONS = ServeOptions(
    model="RedHatAI/Kimi-K3-FP8-BLOCK",
    image="vllm/vllm-openai:kimi-k3",
    host_network=False,
    environment={"VLLM_ENABLE_K3_LATENT_MOE_TAIL_FUSION": "1"},
)


class Serving(NamedTuple):
    """One command a node, node 0 first, and what keeps them from working. Prints as text for a shell,
    the problems as comments."""

    commands: tuple[str, ...]
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        lines = [f"# {line}" for problem in self.problems for line in str(problem).splitlines()]
        for node, command in enumerate(self.commands):
            lines += [f"# node {node} of {len(self.commands)}", command]
        return "\n".join(lines)


def serve_commands(
    source: Served, layout: Layout, options: ServeOptions | None = None, *, gpu_memory: _Memory = None
) -> Serving:
    """The commands that serve a checkpoint in a layout, one a node.

    source, layout, gpu_memory: as for `check_layout`. options: image, port, addresses and the like.
    Commands come for a layout that does not load, too: `.problems` then says why, and what does load.
    Raises as `check_layout` does, and ValueError for a path with a colon, which docker cannot mount.
    """
    options = options or ServeOptions()
    fraction = options.gpu_memory_utilization
    problems = check_layout(source, layout, gpu_memory=gpu_memory, memory_fraction=fraction)
    if options.model is None:
        options = options.model_copy(update={"model": _own_name(source)})
    lines = (filter(None, _command(layout, options, node)) for node in range(layout.nodes))
    return Serving(tuple(" \\\n  ".join(command) for command in lines), problems)


def _own_name(source: Served) -> str:
    if isinstance(source, Plan):
        return str(source.save_directory)
    name = source.source if isinstance(source, Checkpoint) else os.fspath(source)
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name.partition("@")[0]  # of a Hub id, its commit


def _quoted(value: str | Placeholder | None) -> str:
    return str(value) if isinstance(value, Placeholder) else shlex.quote(value or "")


def _command(layout: Layout, options: ServeOptions, node: int) -> Iterator[str]:
    model, port = _quoted(options.model), options.port
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if layout.nodes > 1 else ()
    variables = {**dict.fromkeys(interfaces, options.interface), **options.environment}
    words = [f"{name}={_quoted(value)}" for name, value in variables.items()]
    if options.form == "docker":
        host = layout.nodes > 1 if options.host_network is None else options.host_network
        network = " --network host" if host else f" -p {port}:8000" * (node == 0)
        yield f"docker run --gpus all --privileged --ipc=host{network}"
        yield from (f"-v {mount}" for mount in _mounts(options))
        yield " ".join(f"-e {word}" for word in words)
        yield f"{_quoted(options.image)} {model}"
        port = port if host else 8000
    else:
        yield from words
        yield f"vllm serve {model}"
    yield f"--trust-remote-code --load-format {_quoted(options.load_format)}"
    yield f"--gpu-memory-utilization {options.gpu_memory_utilization}"
    yield f"--tensor-parallel-size {layout.tensor_parallel_size}"
    if layout.pipeline_parallel_size > 1:
        yield f"--pipeline-parallel-size {layout.pipeline_parallel_size}"
    yield "--enable-expert-parallel" * layout.expert_parallel
    if layout.nodes > 1:
        yield f"--nnodes {layout.nodes} --node-rank {node} --master-addr {_quoted(options.master_address)}"
    yield " ".join(map(_quoted, options.flags))
    if options.tool_call_parser:
        yield f"--enable-auto-tool-choice --tool-call-parser {_quoted(options.tool_call_parser)}"
    if options.reasoning_parser:
        yield f"--reasoning-parser {_quoted(options.reasoning_parser)}"
    if node:
        yield "--headless"  # every other node runs workers only
    elif port != 8000:
        yield f"--port {port}"


def _mounts(options: ServeOptions) -> Iterator[str]:
    inside_home = options.cache.removeprefix("~/")
    home = "~/" if inside_home != options.cache else ""
    paths = {home + _quoted(inside_home): "/root/.cache/huggingface"}
    if isinstance(options.model, Placeholder) or str(options.model).startswith("/"):
        paths[_quoted(options.model)] = _quoted(options.model)
    for outside, inside in paths.items():
        if ":" in outside:
            raise ValueError(f"docker cannot mount {outside}: a colon separates the parts of a mount")
        yield f"{outside}:{inside}"
