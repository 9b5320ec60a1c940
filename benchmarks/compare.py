"""The plain script against `quantize`: time, memory and bytes, on the same synthetic checkpoint.

    python benchmarks/compare.py experts
    python benchmarks/compare.py tiny-experts --engine transcode --workers 1 2 --verify off sampled

Each run is a fresh process; the plain script and every way of calling `quantize` take turns. *Process*
is the wall time from start to exit, imports and all. *Call* is the wall time of the call alone: ours
starts its workers inside it, and these import torch; the plain script has imported everything before.
Every output is compared with the plain script's first, tensor by tensor, byte by byte. `cp` copies
the input and the output, and is the limit. The source is in the page cache all the time; ours waits until
its shards are on the disk, the plain script and `cp` do not.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from measure import (
    Run,
    add_options,
    add_quantize_options,
    check_verify,
    cores,
    gibibytes,
    ignore_for,
    machine,
    markdown_table,
    one_layer,
    report,
    run,
    workspace,
)

from kimi_k3_fp8.checkpoint import find_source, read_checkpoint
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.synthetic import write_checkpoint

#: Sizes of the layer, and the shard size that gives each of two workers a few jobs.
CASES = {
    "experts": ({"experts": 64, "latent": 3584, "expert_intermediate": 3072}, "250MB"),
    "tiny-experts": ({"experts": 896, "latent": 128, "expert_intermediate": 256}, "12MB"),
}
PLAIN = "plain script"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--experts", type=int, help="number of experts, instead of the case's own")
    parser.add_argument(
        "--engine",
        nargs="+",
        choices=("llm_compressor", "transcode"),
        default=["llm_compressor"],
    )
    parser.add_argument("--workers", nargs="+", type=int, default=list(range(1, cores() + 1)))
    parser.add_argument("--verify", nargs="+", choices=("off", "sampled", "full"), default=[])
    parser.add_argument("--max-shard-size", help="of ours; the plain script keeps the source's shards")
    parser.add_argument("--runs", type=int, default=5)
    add_quantize_options(parser)
    add_options(parser)
    options = parser.parse_args()
    check_verify(parser, bool(options.verify))
    sizes, shard_size = CASES[options.case]
    dimensions = one_layer(**(sizes | ({"experts": options.experts} if options.experts else {})))

    with workspace(options.folder, options.keep) as folder:
        source = write_checkpoint(
            folder / "source", dimensions=dimensions, values="random", seed=options.seed
        )
        shared = {
            "source": str(source),
            "ignore": ignore_for(dimensions),
            "block_scales": options.scales,
        }
        jobs = {PLAIN: ("plain.py", shared | {"max_workers": cores(), "device": options.device})}
        ways = product(options.engine, options.workers, options.verify or [None])
        for engine, workers, verify in ways:
            name = f"`{engine}`, {workers} worker{'s' * (workers > 1)}"
            call: dict[str, Any] = {
                "engine": engine,
                "workers": workers,
                "devices": [options.device],
                "max_shard_size": options.max_shard_size or shard_size,
            }
            if verify:
                name, call = f"{name}, verify {verify}", call | {"verify": verify}
            jobs[name] = ("ours.py", shared | {"options": call})
        runs = _take_turns(jobs, options.runs, folder, options.keep)
        copies = [_copy(folder) for _ in range(options.runs)]
        bytes_in, bytes_out = (
            read_checkpoint(find_source(folder / name)).nbytes for name in ("source", "reference")
        )

    size = f"{dimensions.experts} experts of {dimensions.expert_intermediate} x {dimensions.latent}"
    text = (
        f"One layer with {size}, {gigabytes(bytes_in)} in, {gigabytes(bytes_out)} out, "
        f"{options.scales} scales, on {options.device}; medians (least to most), runs of each: "
        f"{options.runs}. All outputs hold the same bytes. {machine()}\n\n{_table(runs, copies)}"
    )
    title = f"{options.case}, {' and '.join(options.engine)}, {options.scales} scales"
    report(title, text, options.record)


def _take_turns(
    jobs: dict[str, tuple[str, dict[str, Any]]], rounds: int, folder: Path, keep: bool
) -> dict[str, list[Run]]:
    """Run all jobs in turn, several times. The first output stays, as `reference` in the folder."""
    runs: dict[str, list[Run]] = defaultdict(list)
    reference = folder / "reference"
    for turn, (name, (script, job)) in product(range(rounds), jobs.items()):
        output = folder / f"output-{turn}-{len(runs[name])}-{script.removesuffix('.py')}"
        runs[name].append(run(script, job | {"save_directory": str(output)}, folder))
        print(f"{turn + 1}/{rounds} {name}: {runs[name][-1].call_seconds:.1f} s", file=sys.stderr)
        if not reference.exists():
            output.rename(reference)
            continue
        if different := _differing_tensors(reference, output):
            raise SystemExit(f"{name}: {len(different)} tensors differ, the first is {different[0]}")
        if not keep:
            shutil.rmtree(output)
    return runs


def _differing_tensors(one: Path, other: Path) -> list[str]:
    """Names of the tensors that the two folders do not both hold with one dtype, shape and bytes."""
    first, second = (read_checkpoint(find_source(folder)) for folder in (one, other))
    if not first.tensors:
        raise SystemExit(f"{one.name} holds no tensors")
    different = set(first.tensors) ^ set(second.tensors)
    for name in set(first.tensors) & set(second.tensors):
        a, b = first.tensors[name], second.tensors[name]
        data = (
            held.files.read(tensor.shard, tensor.start, tensor.nbytes)
            for held, tensor in ((first, a), (second, b))
        )
        if (a.dtype, a.shape) != (b.dtype, b.shape) or next(data) != next(data):
            different.add(name)
    return sorted(different)


def _copy(folder: Path) -> tuple[float, float]:
    """Seconds to copy input and output with `cp`, and until the copy is on the disk as well."""
    target = folder / "copy"
    target.mkdir()
    copied = [str(folder / name) for name in ("source", "reference")]
    subprocess.run(["sync"], check=True)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", *copied, str(target)], check=True)
    copying = time.perf_counter() - started
    subprocess.run(["sync", "-f", str(target)], check=True)
    flushing = time.perf_counter() - started
    shutil.rmtree(target)
    return copying, flushing


def _table(runs: dict[str, list[Run]], copies: list[tuple[float, float]]) -> str:
    plain = runs[PLAIN]
    limit = median(copying for copying, _ in copies)

    def cells(seconds: list[float], *divisors: float) -> list[str]:
        middle = median(seconds)
        spread = f"{middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
        return [spread, *(f"{middle / divisor:.3f}" for divisor in divisors)]

    process = median(one.process_seconds for one in plain)
    call = median(one.call_seconds for one in plain)
    rows = [
        [
            name,
            *cells([one.process_seconds for one in measured], process),
            *cells([one.call_seconds for one in measured], call, limit),
            gibibytes(max(one.peak.held for one in measured)),
            gibibytes(max(one.peak.with_mapped_files for one in measured)),
        ]
        for name, measured in runs.items()
    ]
    copied = zip(("`cp`", "`cp`, flushed to disk"), zip(*copies, strict=True), strict=True)
    rows += [[name, "", "", *cells(list(seconds), call, limit), "", ""] for name, seconds in copied]
    headings = (
        "",
        "process",
        "/ plain",
        "call",
        "/ plain",
        "/ `cp`",
        "peak memory",
        "with mapped files",
    )
    return markdown_table(headings, rows)


if __name__ == "__main__":
    main()
