"""Planning the full-size model: CPU time on one core and peak memory, from headers alone.

    python benchmarks/plan.py

The checkpoint is the real one's headers with holes for data: 1.56 TB in size, about 130 MB on disk.
The plan is made in a fresh process that is held to one core.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from measure import add_options, gibibytes, machine, markdown_table, report, workspace

import kimi_k3_fp8
from kimi_k3_fp8.errors import errors_in
from kimi_k3_fp8.synthetic import write_checkpoint


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning took, and what the plan counts. Sizes are bytes."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    quantized_modules: int
    output_tensors: int
    output_bytes: int
    output_file_bytes: int
    scale_bytes: int
    jobs: int
    errors: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    add_options(parser)
    options = parser.parse_args()
    with workspace(options.folder, options.keep) as folder:
        source = write_checkpoint(folder / "source", options.size, values="sparse")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            planned = fresh.submit(_plan, source).result()
    rows = [
        ("CPU time, one core", f"{planned.cpu_seconds:.1f} s"),
        ("wall time", f"{planned.wall_seconds:.1f} s"),
        ("peak resident memory of the process", gibibytes(planned.peak_bytes)),
        ("quantized modules", f"{planned.quantized_modules:,}"),
        ("output tensors", f"{planned.output_tensors:,}"),
        ("output bytes", f"{planned.output_bytes:,}"),
        ("of these, block scales", f"{planned.scale_bytes:,}"),
        ("output files, bytes", f"{planned.output_file_bytes:,}"),
        ("jobs", f"{planned.jobs:,}"),
        ("errors in the plan", ", ".join(f"{n} {code}" for code, n in planned.errors.items()) or "none"),
    ]
    report(
        f"plan, {options.size} size", f"{machine()}\n\n{markdown_table(('', 'plan'), rows)}", options.record
    )


def _plan(source: Path) -> Planned:
    """Plan in this process, on one core. The peak includes the interpreter and the imports."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wall, cpu = time.perf_counter(), time.process_time()
    plan = kimi_k3_fp8.plan(source, save_directory=source.with_name("output"))
    cpu_seconds, wall_seconds = time.process_time() - cpu, time.perf_counter() - wall
    # Not getrusage: its maximum may be inherited from the process that started this one.
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None
    return Planned(
        cpu_seconds=cpu_seconds,
        wall_seconds=wall_seconds,
        peak_bytes=1024 * int(peak[1]),
        quantized_modules=len(plan.quantized_modules),
        output_tensors=len(plan.output_tensors),
        output_bytes=plan.output_bytes,
        output_file_bytes=plan.output_file_bytes,
        scale_bytes=plan.scale_bytes,
        jobs=len(plan.jobs),
        errors=dict(Counter(problem.code for problem in errors_in(plan.problems))),
    )


if __name__ == "__main__":
    main()
