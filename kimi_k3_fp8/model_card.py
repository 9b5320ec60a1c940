"""The card of the result: README.md as the Hub reads it, saying only what holds for this checkpoint."""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3_fp8.architecture import module_class
from kimi_k3_fp8.checkpoint import Checkpoint, TensorInfo, find_source, read_checkpoint
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.planning import Plan
from kimi_k3_fp8.recipe import Recipe
from kimi_k3_fp8.serving import (
    VLLM_VERSION,
    Layout,
    Placeholder,
    Served,
    ServeOptions,
    layouts,
    nearest_layout,
    serve_commands,
)
from kimi_k3_fp8.staging import write_whole
from kimi_k3_fp8.validation import Report, recorded_recipe

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

CARD_NAME = "README.md"
#: Where the README.md that came with the source is kept.
SOURCE_CARD_NAME = "README-source.md"
_MARK = "<!-- Written by kimi_k3_fp8. -->"

#: How LLM Compressor's own script has the scales rounded up.
_POWER_OF_TWO = """from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from kimi_k3_fp8.engine.observer import POWER_OF_TWO
scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
scheme.weights.observer = POWER_OF_TWO
config = QuantizationConfig(config_groups={"FP8_BLOCK": scheme}, ignore=ignore)
"""
_SCALES = {
    "amax": f"""
The scale of a block is its largest magnitude / 448. With DeepGEMM and power-of-two scales, its default on
Hopper and Blackwell, vLLM {VLLM_VERSION} rounds the scales of linear layers up to powers of two when it loads
them, and rounds those weights once more.""",
    "power_of_two": f"""
The scale of a block is the smallest power of two that is not below its largest magnitude / 448. An MXFP4
weight keeps its value where the exponents in its block differ by 14 or less; a BF16 weight is rounded.
Where vLLM {VLLM_VERSION} rounds scales up to powers of two when it loads them, these do not change.""",
}


class CardDetails(BaseModel):
    """What the weights do not tell.

    name: of the result, best as a Hub id ("you/Kimi-K3-FP8-BLOCK"); by default its folder's.
    developers: by default the owner in that id. released: by default today.
    layout: to serve it in; by default two nodes of eight GPUs. The nearest that loads is shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    base_model: str = "moonshotai/Kimi-K3"
    developers: str | None = None
    released: datetime.date = Field(default_factory=datetime.date.today)
    version: str = "1.0"
    layout: Layout = Layout(8, 2, 2)
    options: ServeOptions = ServeOptions()


def write_card(
    folder: str | os.PathLike[str],
    source: Plan | Checkpoint | None = None,
    recipe: Recipe | None = None,
    report: Report | None = None,
    details: CardDetails | None = None,
) -> Path:
    """Write the card as the folder's README.md. The README.md that came with the source is kept as
    README-source.md, which the card links to; a card written before is replaced.

    source: what the card is about, by default the checkpoint in the folder.
    Raises as `model_card` does, and FileExistsError if another README would have to be thrown away.
    """
    path, kept = Path(folder, CARD_NAME), Path(folder, SOURCE_CARD_NAME)
    card = str(model_card(folder if source is None else source, recipe, report, details))
    if path.exists() and _MARK not in path.read_text(encoding="utf-8"):
        if kept.exists() and kept.read_bytes() != path.read_bytes():
            raise FileExistsError(f"{path} is not this library's, and {kept} exists: move one of them away")
        path.replace(kept)
    link = f"The base model's own card: [{kept.name}]({kept.name}).\n\n" if kept.exists() else ""
    write_whole(path, f"{card}\n{link}{_MARK}\n")
    return path


def model_card(
    source: Served,
    recipe: Recipe | None = None,
    report: Report | None = None,
    details: CardDetails | None = None,
) -> ModelCard:
    """The card of a planned or finished checkpoint.

    recipe: by default the plan's, or the one recorded in the checkpoint, else the published one.
    report: of its validation. Its fidelity becomes a table, and nothing else is called exact.
    Raises SourceError where there is no such checkpoint.
    """
    from huggingface_hub import ModelCard, ModelCardData

    details = details or CardDetails()
    if isinstance(source, Plan):
        checkpoint, folder, recipe = source.checkpoint, source.save_directory, recipe or source.recipe
    else:
        source = source if isinstance(source, Checkpoint) else read_checkpoint(find_source(source))
        checkpoint, folder = source, Path(source.source)
        recipe = recipe or recorded_recipe(source) or Recipe()
    held: Mapping[str, TensorInfo] = source.output_tensors if isinstance(source, Plan) else source.tensors
    quantized = Counter(module_class(t.module) for t in held.values() if t.dtype == "F8_E4M3")
    name = details.name or folder.name
    kept = (f"- {_span(rule.pattern)}: {_plain(rule.reason or rule.name)}" for rule in recipe.ignore)
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    text = text.format(
        details=details,
        recipe=recipe,
        name=_plain(name),
        architecture=_plain(", ".join(checkpoint.config.get("architectures") or ["unknown"])),
        input="Text / Image" if any(t.startswith("vision_tower.") for t in held) else "Text",
        version=_plain(details.version),
        developers=_plain(details.developers or name.rpartition("/")[0] or "not stated"),
        base=_linked(details.base_model),
        quantized=f"{quantized.total():,}",
        size=gigabytes(sum(tensor.nbytes for tensor in held.values())),
        modules=_table(("FP8 modules", "Number"), [(kind, f"{n:,}") for kind, n in quantized.items()]),
        scales=_SCALES[recipe.block_scales],
        kept="\n".join(kept),
        vllm=VLLM_VERSION,
        layouts=_layouts(source, details.layout),
        commands=_commands(source, name, details),
        save_directory=name.rpartition("/")[2],
        **_creation(recipe),
        fidelity=_fidelity(report),
        license="; see [LICENSE](LICENSE)" if "LICENSE" in checkpoint.side_files else "",
    )
    data = ModelCardData(
        base_model=details.base_model,
        library_name="compressed-tensors",
        license="other",
        license_name="kimi-k3",
        pipeline_tag="image-text-to-text",
        tags=["fp8", "vllm", "llm-compressor", "compressed-tensors", "conversational"],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _creation(recipe: Recipe) -> dict[str, str]:
    """What the template needs for this library's call and for LLM Compressor's script."""
    default, powers = Recipe(), recipe.block_scales == "power_of_two"
    own_ignore = recipe.ignore_patterns != default.ignore_patterns
    others = ("block_scales", "dequantize_dtype", "accept")
    changed = [field for field in others if getattr(recipe, field) != getattr(default, field)]
    arguments = ["ignore=ignore"] * own_ignore + [f"{field}={getattr(recipe, field)!r}" for field in changed]
    ignore = "".join(f"    {pattern!r},\n" for pattern in recipe.ignore_patterns)
    ignore = f"ignore = [\n{ignore}]\n"
    return {
        "own_ignore": ignore * own_ignore,
        "arguments": ", ".join(arguments),
        "ignore": ignore,
        "config": _POWER_OF_TWO * powers,
        "scheme": "config=config" if powers else 'scheme="FP8_BLOCK", ignore=ignore',
    }


def _layouts(source: Served, layout: Layout) -> str:
    rows = []
    for row in layouts(source, layout.gpus, layout.nodes):
        found = "; ".join(f"no, {problem.subject}: {problem.message}" for problem in row.problems)
        rows.append((str(row.layout), gigabytes(row.weight_bytes), found or "yes"))
    return _table(("Layout", "Weights", "Loads"), rows)


def _commands(source: Served, name: str, details: CardDetails) -> str:
    options, layout = details.options, nearest_layout(source, details.layout)
    if layout is None:
        return f"No layout like {details.layout} loads."
    model = options.model or (name if "/" in name else Placeholder(variable="MODEL_DIR"))
    meanings = {model: "the absolute path of this folder"}
    if layout.nodes > 1:
        meanings[options.interface] = "the network interface between the nodes"
        meanings[options.master_address] = "the address of node 0"
    to_set = [f"`{word}` is {what}" for word, what in meanings.items() if isinstance(word, Placeholder)]
    parts = [f"For {layout}{', where ' * bool(to_set)}{', '.join(to_set)}, with Docker or with vLLM itself:"]
    for form in ("docker", "vllm"):
        served = serve_commands(source, layout, options.model_copy(update={"form": form, "model": model}))
        parts.append(f"```bash\n{served}\n```")
    return "\n\n".join(parts)


def _fidelity(report: Report | None) -> str:
    compared = report.fidelity if report else ()
    if not compared:
        return "The stored values were not compared with the source's when this card was written."
    headings = "Modules", "Compared", "Weights", "Differing", "Relative RMS error", "Largest error", "Verdict"
    rows = [
        (
            f.module_class,
            f"{f.modules:,} of {f.of_modules:,}",
            *(f"{f.elements:,}", f"{f.differing:,}", f"{f.relative_rms_error:.3%}", f"{f.largest_error:.3g}"),
            f.verdict,
        )
        for f in compared
    ]
    return f"Stored values, compared with the source's:\n\n{_table(headings, rows)}"


def _linked(base_model: str) -> str:
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base_model)
    return f"[{base_model}](https://huggingface.co/{base_model})" if on_hub else _span(base_model)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *(map(_plain, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line, within a table too."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", " ".join(text.split()))


def _span(code: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{fence} {code} {fence}" if "`" in code else f"`{code}`"
