"""Measure and draw what docs/exactness.md shows: error per module class, on the tiny checkpoint.

    python docs/plots.py

Writes docs/images/fidelity.svg and the table in docs/exactness.md. Needs matplotlib, and a minute.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

from kimi_k3_fp8 import Recipe, quantize
from kimi_k3_fp8.checkpoint import Checkpoint, find_source, read_checkpoint
from kimi_k3_fp8.fidelity import Fidelity, measure, quantized_modules
from kimi_k3_fp8.synthetic import write_checkpoint

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "exactness.md", DOCS / "images" / "fidelity.svg"

#: By kind of scales and by what is looked at: one record for each module class.
Errors = Mapping[tuple[str, str], tuple[Fidelity, ...]]


def measured(source: Path, folder: Path, executor: Executor | None = None) -> Errors:
    """Convert a checkpoint with both kinds of scales, and compare every value, as stored and at load."""
    errors = {}
    for scales in ("amax", "power_of_two"):
        quantize(source, folder / scales, Recipe(block_scales=scales), executor=executor, progress=False)
        before, after = (read_checkpoint(find_source(path)) for path in (source, folder / scales))
        errors[scales, "stored"] = _compared(before, after, as_loaded=False)
        errors[scales, "at load"] = _compared(before, after, as_loaded=True)
    return errors


def _compared(before: Checkpoint, after: Checkpoint, *, as_loaded: bool) -> tuple[Fidelity, ...]:
    outputs = [*after.tensors.values()]
    names = quantized_modules(outputs)
    inputs = before.tensors.values()
    return measure(before.files, inputs, after.files, outputs, names, as_loaded=as_loaded)


def table(errors: Errors) -> str:
    """The errors as a Markdown table, with the share of routed-expert weights that differ."""
    heads = [f"{scales}, {when}" for scales, when in errors]
    lines = [f"| modules | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for row in zip(*errors.values(), strict=True):
        cells = [f"{found.relative_rms_error:.2%}" if found.differing else "0" for found in row]
        lines.append(f"| {row[0].module_class} | {' | '.join(cells)} |")
    shares = [
        f"{found.differing / found.elements:.1%}" if found.differing else "0"
        for records in errors.values()
        for found in records
        if found.module_class == "routed experts"
    ]
    return "\n".join([*lines, f"| routed-expert weights that differ | {' | '.join(shares)} |"])


def draw(errors: Errors, path: Path) -> None:
    """Bars of relative RMS error: a group for each module class, a bar for each column of the table."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = {
        ("amax", "stored"): "#9db4d3",
        ("amax", "at load"): "#3b5f91",
        ("power_of_two", "stored"): "#f2c08a",
        ("power_of_two", "at load"): "#c8741a",
    }
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kimi_k3_fp8", "font.size": 10}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, (key, records) in enumerate(errors.items()):
            places = [group + (number - 1.5) * 0.2 for group in range(len(records))]
            heights = [100 * found.relative_rms_error for found in records]
            bars = axes.bar(places, heights, 0.18, color=colours[key], label=", ".join(key))
            labels = [
                f"{height:.1f}" if found.differing else "0"
                for height, found in zip(heights, records, strict=True)
            ]
            axes.bar_label(bars, labels, padding=1, fontsize=8)
        axes.set_xticks(range(len(records)), [found.module_class for found in records])
        axes.set_ylabel("relative RMS error, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=2, loc="upper right")
        axes.set_ylim(top=6.5)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(Path(folder, "Kimi-K3"))
        errors = measured(source, Path(folder))
    draw(errors, PICTURE)
    marks = "<!-- table by docs/plots.py -->", "<!-- end -->"
    text = PAGE.read_text(encoding="utf-8")
    between = re.compile(f"(?<={marks[0]}\n).*(?={marks[1]})", re.DOTALL)
    PAGE.write_text(between.sub(lambda _: f"\n{table(errors)}\n\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
