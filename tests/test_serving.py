"""Which layouts of vLLM load a checkpoint, and the commands, at the dimensions of the real model."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kimi_k3_fp8 import Recipe, plan
from kimi_k3_fp8.architecture import Dimensions, module_class, tensors
from kimi_k3_fp8.checkpoint import Checkpoint, Folder, TensorInfo, find_source, read_checkpoint
from kimi_k3_fp8.decisions import expected_tensors
from kimi_k3_fp8.errors import ProblemsError, SourceError
from kimi_k3_fp8.serving import (
    PUBLISHED_LAYOUT,
    PUBLISHED_OPTIONS,
    VLLM_VERSION,
    Layout,
    Placeholder,
    ServeOptions,
    check_layout,
    layouts,
    nearest_layout,
    rules_for_layout,
    serve_commands,
    weights_per_gpu,
)
from kimi_k3_fp8.synthetic import write_checkpoint

SIZES = (1, 2, 4, 8, 16, 32)
#: Few experts, everything else as in the real model: the widths are the real ones.
REAL = Dimensions(experts=16)
BITS = {"F8_E4M3": 8, "BF16": 16, "F32": 32}


def finished(dimensions: Dimensions, recipe: Recipe | None = None) -> Checkpoint:
    """The headers of a finished checkpoint of this size."""
    source = (TensorInfo(s.name, s.dtype, s.shape, "", 0, s.nbytes) for s in tensors(dimensions))
    made = expected_tensors(source, recipe or Recipe(), "mxfp4")
    held = {
        name: TensorInfo(name, dtype, shape, "", 0, BITS[dtype] * math.prod(shape) // 8)
        for name, (dtype, shape) in made.items()
    }
    return Checkpoint(Folder(Path("/nowhere")), {}, held, {}, (), {}, None, None, ())


@pytest.fixture(scope="module")
def real() -> Checkpoint:
    return finished(REAL)


def adapted(layout: Layout, **more: Any) -> Recipe:
    recipe = Recipe()
    for rule in rules_for_layout(layout, recipe, **more):
        recipe = recipe.with_rule(rule.name, rule.pattern, rule.reason)
    return recipe


# --- what loads

#: Modules, expert parallel or not, the sizes that load, and the code for those that do not.
LOADS = [
    ("dense mlp", False, (1, 2, 4, 8), "layout-does-not-load", REAL.dense_intermediate),
    ("dense mlp", True, (1, 2, 4, 8), "layout-does-not-load", REAL.dense_intermediate),
    ("shared experts", False, (1, 2, 4, 8, 16), "layout-does-not-load", REAL.shared_intermediate),
    ("shared experts", True, (1, 2, 4, 8, 16), "layout-does-not-load", REAL.shared_intermediate),
    ("latent projections", False, SIZES, "", REAL.latent),
    ("latent projections", True, SIZES, "", REAL.latent),
    ("routed experts", True, SIZES, "", REAL.expert_intermediate),
    ("routed experts", False, (1, 2, 4, 8), "layout-silently-wrong", REAL.expert_intermediate),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("modules", "expert", "loads", "code", "width"), LOADS)
def test_every_cell_of_what_loads(
    real: Checkpoint, modules: str, expert: bool, loads: tuple[int, ...], code: str, width: int, size: int
) -> None:
    problems = check_layout(real, Layout(size, expert_parallel=expert))
    found = [(p.code, p.found) for p in problems if p.subject == modules]
    assert found == ([] if size in loads else [(code, width // size)])
    assert {p.subject for p in problems} <= {row[0] for row in LOADS}


@pytest.mark.slow
def test_the_full_size_checkpoint(tmp_path: Path) -> None:
    work = plan(write_checkpoint(tmp_path / "Kimi-K3", "full"), save_directory=tmp_path / "out")
    assert [(p.code, p.subject) for p in check_layout(work, PUBLISHED_LAYOUT)] == [
        ("layout-does-not-load", "dense mlp"),
        ("layout-silently-wrong", "routed experts"),
    ]
    loads = {str(row.layout) for row in layouts(work) if not row.problems}
    assert "TP 8 x PP 2 on 2 nodes" in loads
    assert not any(name.startswith("TP 16") for name in loads)
    assert weights_per_gpu(work, Layout(1)) == work.output_bytes
    # Two nodes of eight H200 are too small, of eight B300 large enough.
    (small,) = check_layout(work, Layout(8, 2, 2), gpu_memory="141GB")
    assert small.code == "layout-too-large"
    assert check_layout(work, Layout(8, 2, 2), gpu_memory="288GB") == ()


def test_the_published_layout_and_what_works_instead(real: Checkpoint) -> None:
    problems = check_layout(real, PUBLISHED_LAYOUT)
    assert [p.code for p in problems] == ["layout-does-not-load", "layout-silently-wrong"]
    for problem in problems:
        assert "TP 8 x PP 2 on 2 nodes" in problem.fix
        assert "dense mlp in BF16" in problem.fix
        assert "TP 16 with expert parallel on 2 nodes" in problem.fix
    assert nearest_layout(real, PUBLISHED_LAYOUT) == Layout(8, 2, 2)
    whole = replace(PUBLISHED_LAYOUT, expert_parallel=True)
    assert check_layout(real, whole)
    assert check_layout(finished(REAL, adapted(whole)), whole) == ()


@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(2, 2, expert_parallel=True)], ids=str)
def test_plan_checkpoint_and_folder_say_the_same(tiny: Path, converted: Path, layout: Layout) -> None:
    work = plan(tiny, save_directory=converted.parent / "other")
    expected = check_layout(work, layout)
    assert bool(expected) == (layout.tensor_parallel_size > 1)  # 384 / 2 is no multiple of 128
    for source in (converted, str(converted), read_checkpoint(find_source(converted))):
        assert check_layout(source, layout) == expected
        assert weights_per_gpu(source, layout) == weights_per_gpu(work, layout)


def test_a_source_and_a_broken_checkpoint_do_not_pass(tiny: Path, output: Path) -> None:
    (packed,) = check_layout(tiny, Layout(1))
    assert packed.code == "packed-left"
    shard = sorted(output.glob("*.safetensors"))[0]
    shard.unlink()
    (missing,) = check_layout(output, Layout(1))
    assert (missing.code, missing.subject) == ("shard-missing", shard.name)
    assert [row.problems for row in layouts(output, 1, 1)] == [(missing,)]
    with pytest.raises(SourceError):
        check_layout(output / "nowhere", Layout(1))


def test_attention_heads_must_divide(real: Checkpoint) -> None:
    """Unquantized modules may have slices of any width, but equal ones."""
    assert REAL.heads % 48 == 0
    assert "attention" not in {p.subject for p in check_layout(real, Layout(48))}
    (problem,) = (p for p in check_layout(real, Layout(64)) if p.subject == "attention")
    assert str(REAL.heads) in problem.message


def test_more_stages_than_layers(real: Checkpoint) -> None:
    assert check_layout(real, Layout(1, REAL.layers)) == ()
    (problem,) = check_layout(real, Layout(1, REAL.layers + 1))
    assert (problem.code, problem.subject) == ("layout-does-not-load", "layers")


def test_layouts_lists_every_way_to_use_the_gpus(real: Checkpoint) -> None:
    rows = layouts(real, 12, 3)
    ways = [(count, whole) for count in (12, 6, 4, 3, 2, 1) for whole in (False, True)][:-1]
    assert [row.layout for row in rows] == [Layout(n, 12 // n, 3, whole) for n, whole in ways]
    for row in rows:
        assert row.weight_bytes == weights_per_gpu(real, row.layout)
        assert [p.code for p in row.problems] == [p.code for p in check_layout(real, row.layout)]


def test_layouts_that_cannot_be() -> None:
    for sizes in [(0,), (1, 0), (1, 1, 0), (8, 2, 3)]:
        with pytest.raises(ValueError, match=r"at least 1|evenly"):
            Layout(*sizes)


# --- memory

#: Modules that are whole on every GPU: the others of the text model are cut.
WHOLE = re.compile(r"norm|gate$|_res_proj|f_a_proj|q_a_proj|kv_a_proj|routed_expert_|self_attn$|^vision|^mm_")


def fullest(held: dict[str, TensorInfo], d: Dimensions, layout: Layout) -> float:
    """Bytes on the fullest GPU, counted tensor by tensor."""
    size, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    layers = [d.layers // stages] * stages
    for i in range(d.layers % stages):
        layers[-2 - i] += 1
    stage_of = [stage for stage in range(stages) for _ in range(layers[stage])]
    totals = [0.0] * stages
    for tensor in held.values():
        share = 1.0 if WHOLE.search(tensor.module) else 1 / size
        if layout.expert_parallel and ".experts." in tensor.module:
            share = math.ceil(d.experts / size) / d.experts
        if number := re.search(r"layers\.(\d+)\.", tensor.name):
            there = [stage_of[int(number[1])]]
        elif not tensor.name.startswith("language_model"):
            there = [*range(stages)]
        else:
            there = [0 if "embed_tokens" in tensor.name else stages - 1]
        for stage in there:
            totals[stage] += tensor.nbytes * share
    return max(totals)


@given(
    size=st.integers(1, 24),
    stages=st.integers(1, 9),
    expert=st.booleans(),
    layers=st.integers(9, 12),
    experts=st.integers(1, 6),
)
@settings(deadline=None, max_examples=40)
def test_weights_per_gpu(size: int, stages: int, expert: bool, layers: int, experts: int) -> None:
    d = replace(Dimensions.tiny(), layers=layers, experts=experts)
    checkpoint, layout = finished(d), Layout(size, stages, expert_parallel=expert)
    assert weights_per_gpu(checkpoint, layout) == pytest.approx(
        fullest({**checkpoint.tensors}, d, layout), abs=1
    )


def test_everything_is_on_a_single_gpu(converted: Path) -> None:
    assert weights_per_gpu(converted, Layout(1)) == read_checkpoint(find_source(converted)).nbytes


def test_memory_is_refused_with_numbers(real: Checkpoint) -> None:
    layout = Layout(8, 2, 2)
    needed = weights_per_gpu(real, layout)
    assert check_layout(real, layout, gpu_memory=2 * needed, memory_fraction=0.5) == ()
    (problem,) = check_layout(real, layout, gpu_memory=2 * needed - 2, memory_fraction=0.5)
    assert (problem.code, problem.expected, problem.found) == ("layout-too-large", needed - 1, needed)
    assert "KV cache" in problem.message
    advised = re.search(r"TP (\d+) x PP (\d+) on (\d+) nodes", problem.fix)
    assert advised
    smaller = Layout(*map(int, advised.groups()))
    assert smaller.gpus // smaller.nodes == 8
    assert check_layout(real, smaller, gpu_memory=2 * needed - 2, memory_fraction=0.5) == ()
    assert any(p.code == "layout-too-large" for p in layouts(real, 8, 1, gpu_memory="1GB")[0].problems)
    with pytest.raises(ValueError, match="not a size"):
        check_layout(real, layout, gpu_memory="plenty")


# --- rules for a layout


def test_rules_for_a_layout() -> None:
    assert rules_for_layout(Layout(8, 2, 2)) == ()
    (dense,) = rules_for_layout(Layout(16, nodes=2, expert_parallel=True))
    layer = "language_model.model.layers.{}.mlp.{}_proj"
    assert all(dense.matches(layer.format(0, name)) for name in ("gate", "up", "gate_up", "down"))
    assert not dense.matches(layer.format(10, "gate"))
    assert str(REAL.dense_intermediate) in dense.reason
    assert {r.name for r in rules_for_layout(Layout(32, nodes=4, expert_parallel=True))} == {
        "dense mlp",
        "shared experts",
    }


def test_no_rule_helps_routed_experts() -> None:
    with pytest.raises(ProblemsError) as caught:
        rules_for_layout(PUBLISHED_LAYOUT)
    assert [p.subject for p in caught.value.problems] == ["routed experts"]


def test_tail_fusion(real: Checkpoint) -> None:
    (rule,) = rules_for_layout(Layout(8), tail_fusion=True)
    kept = {tensor.module for tensor in real.tensors.values() if rule.matches(tensor.module)}
    moe = REAL.layers - len(REAL.dense_layers)
    assert len(kept) == moe
    assert {name.rpartition(".")[2] for name in kept} == {"routed_expert_up_proj"}
    assert f"{moe * REAL.hidden * REAL.latent / 1e9:.2f} GB more" in rule.reason
    for layout in (Layout(4), Layout(8, expert_parallel=True)):
        with pytest.raises(ValueError, match="tail fusion"):
            rules_for_layout(layout, tail_fusion=True)


@given(
    size=st.sampled_from((2, 3, 4, 6)),
    dense=st.sampled_from((384, 512, 640, 768)),
    shared=st.sampled_from((256, 384, 768)),
    dense_layers=st.sampled_from(((0,), (0, 2))),
)
@settings(deadline=None, max_examples=40)
def test_the_rules_suffice_and_are_needed(
    size: int, dense: int, shared: int, dense_layers: tuple[int, ...]
) -> None:
    d = replace(
        Dimensions.tiny(),
        heads=12,
        dense_intermediate=dense,
        shared_intermediate=shared,
        dense_layers=dense_layers,
    )
    layout = Layout(size, expert_parallel=True)
    if dense % size or shared % size:
        with pytest.raises(ProblemsError, match="equal slices"):  # which no ignore rule changes
            rules_for_layout(layout, dimensions=d)
        return
    recipe = adapted(layout, dimensions=d)
    assert check_layout(finished(d, recipe), layout) == ()
    stuck = {p.subject for p in check_layout(finished(d), layout)}
    assert stuck == {r.name for r in recipe.ignore} - {r.name for r in Recipe().ignore}
    for name in stuck:
        assert check_layout(finished(d, recipe.without_rule(name)), layout)
    kept = {module_class(t.module) for t in finished(d, recipe).tensors.values() if t.dtype == "F8_E4M3"}
    assert kept == {"routed experts", "shared experts", "latent projections", "dense mlp"} - stuck


# --- the commands

PUBLISHED = r"""
docker run --gpus all --privileged --ipc=host -p 8000:8000 \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e GLOO_SOCKET_IFNAME=$IFACE_NAME -e NCCL_SOCKET_IFNAME=$IFACE_NAME \
  -e VLLM_ENABLE_K3_LATENT_MOE_TAIL_FUSION=1 \
  vllm/vllm-openai:kimi-k3 RedHatAI/Kimi-K3-FP8-BLOCK \
  --trust-remote-code --load-format fastsafetensors --gpu-memory-utilization 0.95 \
  --tensor-parallel-size 16 --nnodes 2 --node-rank 0 --master-addr $HEAD_IP \
  --no-enable-flashinfer-autotune --disable-custom-all-reduce \
  --enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3
"""


def folded(command: str) -> str:
    return " ".join(command.replace("\\\n", " ").split())


def test_the_published_command(real: Checkpoint) -> None:
    served = serve_commands(real, PUBLISHED_LAYOUT, PUBLISHED_OPTIONS)
    assert folded(served.commands[0]) == folded(PUBLISHED)
    assert served.problems == check_layout(real, PUBLISHED_LAYOUT)
    assert len(served.problems) == 2
    # Printed, the problems are comments above the commands.
    first = str(served).index("docker run")
    assert all(line.startswith("# ") for line in str(served)[:first].splitlines())
    assert all(problem.message in str(served)[:first] for problem in served.problems)


@pytest.mark.parametrize("form", ["docker", "vllm"])
def test_one_command_a_node(real: Checkpoint, form: Any) -> None:
    options = ServeOptions(form=form, model="you/K3", port=9000)
    served = serve_commands(real, Layout(8, 4, 4, expert_parallel=True), options)
    assert served.problems == ()
    assert len(served.commands) == 4
    for node, command in enumerate(map(folded, served.commands)):
        assert f"--nnodes 4 --node-rank {node} --master-addr $HEAD_IP" in command
        assert "--tensor-parallel-size 8 --pipeline-parallel-size 4 --enable-expert-parallel" in command
        assert command.endswith("--headless") == (node > 0)
        assert ("--port 9000" in command) == (node == 0)
        assert ("--network host" in command) == (form == "docker")


def test_one_node_needs_no_network_names(real: Checkpoint) -> None:
    (command,) = serve_commands(real, Layout(8), ServeOptions(model="you/K3", port=9000)).commands
    assert not re.search(r"IFNAME|nnodes|master|headless|network", command)
    assert "-p 9000:8000" in command
    assert f"vllm-openai:v{VLLM_VERSION} you/K3" in command
    (command,) = serve_commands(real, Layout(8), ServeOptions(form="vllm")).commands
    assert command.startswith("vllm serve /nowhere \\\n")


def test_the_model_is_the_checkpoint_itself(tiny: Path, converted: Path, tmp_path: Path) -> None:
    target = tmp_path / "a place"
    work = plan(tiny, save_directory=target)
    for source, path in ((work, target), (converted, converted)):
        (command,) = serve_commands(source, Layout(1)).commands
        words = shlex.split(folded(command))
        assert words[words.index(f"vllm/vllm-openai:v{VLLM_VERSION}") + 1] == str(path)
        assert f"{path}:{path}" in words


def test_memory_is_checked_with_the_fraction_served_with(real: Checkpoint) -> None:
    needed = weights_per_gpu(real, Layout(8))
    for fraction, fits in ((0.5, False), (0.75, True)):
        options = ServeOptions(gpu_memory_utilization=fraction)
        served = serve_commands(real, Layout(8), options, gpu_memory=3 * needed // 2)
        assert (served.problems == ()) == fits
        assert f"--gpu-memory-utilization {fraction}" in served.commands[0]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
NASTY = TEXT | st.sampled_from(
    ["$HOME", "`id`", "$(id)", "a b", "it's", '"', "\\", "\n", "!!", "~", "*", "#x"]
)
WORD = NASTY.filter(lambda text: text[0] != "-")
NO_COLON = WORD.filter(lambda text: ":" not in text)


def run_in_bash(command: str) -> list[str]:
    """The words and two variables that the command's program gets, where HOME and HEAD_IP are set."""
    subprocess.run(["bash", "-n"], input=command.encode(), check=True)
    spy = r"""{ printf '%s\0' "$GLOO_SOCKET_IFNAME" "$KEY" "$@"; }"""
    script = f"HOME=/home/me; HEAD_IP=10.0.0.1; docker() {spy}\nvllm() {spy}\n{command}"
    printed = subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    assert not printed.stderr
    return printed.stdout.decode().split("\0")[:-1]


@given(
    model=NO_COLON,
    image=WORD,
    interface=NASTY,
    address=NASTY | st.none(),
    cache=NO_COLON,
    home=st.booleans(),
    value=NASTY,
    load_format=NASTY,
    parsers=st.tuples(NASTY, NASTY),
    flags=st.lists(NASTY, max_size=3),
    form=st.sampled_from(["docker", "vllm"]),
)
@settings(deadline=None, max_examples=60)
def test_every_value_reaches_the_program_as_it_is(
    tiny_done: Checkpoint,
    model: str,
    image: str,
    interface: str,
    address: str | None,
    cache: str,
    home: bool,
    value: str,
    load_format: str,
    parsers: tuple[str, str],
    flags: list[str],
    form: Any,
) -> None:
    assume(not cache.startswith("~/"))
    options = ServeOptions(
        form=form,
        model=model,
        image=image,
        interface=interface,
        master_address=address or Placeholder(variable="HEAD_IP"),
        cache=f"~/{cache}" if home else cache,
        environment={"KEY": value},
        load_format=load_format,
        tool_call_parser=parsers[0],
        reasoning_parser=parsers[1],
        flags=tuple(flags),
    )
    first, second = serve_commands(tiny_done, Layout(1, 2, 2), options).commands
    seen, variable, *words = run_in_bash(first)
    common = ["--trust-remote-code", "--load-format", load_format, "--gpu-memory-utilization", "0.95"]
    common += ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2", "--nnodes", "2"]
    common += ["--node-rank", "0", "--master-addr", address or "10.0.0.1", *flags]
    common += ["--enable-auto-tool-choice", "--tool-call-parser", parsers[0]]
    common += ["--reasoning-parser", parsers[1]]
    if form == "vllm":
        assert (seen, variable) == (interface, value)
        assert words == ["serve", model, *common]
    else:
        place = f"/home/me/{cache}" if home else cache
        mounts = ["-v", f"{place}:/root/.cache/huggingface"]
        mounts += ["-v", f"{model}:{model}"] if model.startswith("/") else []
        names = ["-e", f"GLOO_SOCKET_IFNAME={interface}", "-e", f"NCCL_SOCKET_IFNAME={interface}"]
        start = ["run", "--gpus", "all", "--privileged", "--ipc=host", "--network", "host"]
        assert words == [*start, *mounts, *names, "-e", f"KEY={value}", image, model, *common]
    assert run_in_bash(second)[-1] == "--headless"
    if "\\\n" not in "".join(
        [model, image, interface, address or "", cache, value, load_format, *parsers, *flags]
    ):
        assert shlex.split(first.replace("\\\n", ""))[-1] == parsers[1]


@pytest.fixture(scope="module")
def tiny_done() -> Checkpoint:
    return finished(Dimensions.tiny())


def test_placeholders_are_the_only_thing_unquoted(tiny_done: Checkpoint) -> None:
    (command,) = serve_commands(
        tiny_done, Layout(1), ServeOptions(model=Placeholder(variable="MODEL_DIR"), image="$IMAGE")
    ).commands
    assert "-v $MODEL_DIR:$MODEL_DIR" in command
    assert "'$IMAGE' $MODEL_DIR" in command


@pytest.mark.parametrize(
    "values",
    [
        {"image": "--rm"},
        {"model": "-x"},
        {"model": ""},
        {"interface": "a\0b"},
        {"environment": {"A B": "1"}},
        {"environment": {"A": "\0"}},
        {"port": 0},
        {"gpu_memory_utilization": 1.5},
        {"imag": "x"},
    ],
    ids=str,
)
def test_options_that_no_command_can_hold(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServeOptions(**values)


@pytest.mark.parametrize("name", ["", "1A", "A B", "A;id", "A\n", "A$(id)"])
def test_a_placeholder_is_a_name(name: str) -> None:
    with pytest.raises(ValidationError):
        Placeholder(variable=name)


@pytest.mark.parametrize("values", [{"cache": "/a:b"}, {"model": "/a:b"}])
def test_docker_cannot_mount_a_colon(tiny_done: Checkpoint, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="colon"):
        serve_commands(tiny_done, Layout(1), ServeOptions(**values))
