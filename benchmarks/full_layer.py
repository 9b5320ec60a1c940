"""One full-size layer through `quantize`: time, memory, and what follows for the whole model.

    python benchmarks/full_layer.py --engine transcode

The layer has 896 experts of 3072 x 3584 and all else at full size: 17 GB in, 30 GB out, so have 50 GB
free. `--experts 8` tries the script out. Every worker's start-up is in the time, and so is the disk's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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

from kimi_k3_fp8.architecture import Dimensions, tensors
from kimi_k3_fp8.checkpoint import find_source, read_checkpoint
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.synthetic import write_checkpoint

#: The machine that the whole model's time is worked out for.
MANY_CORES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=Dimensions().experts)
    parser.add_argument("--engine", choices=("llm_compressor", "transcode"), default="llm_compressor")
    parser.add_argument("--workers", type=int, help="by default quantize chooses")
    parser.add_argument("--verify", choices=("off", "sampled", "full"))
    parser.add_argument("--max-shard-size", default="1GB")
    add_quantize_options(parser)
    add_options(parser)
    options = parser.parse_args()
    check_verify(parser, options.verify is not None)
    full = Dimensions()
    dimensions = one_layer(
        experts=options.experts,
        hidden=full.hidden,
        heads=full.heads,
        shared_intermediate=full.shared_intermediate,
    )

    with workspace(options.folder, options.keep) as folder:
        source = write_checkpoint(
            folder / "source", dimensions=dimensions, values="random", seed=options.seed
        )
        output = folder / "output"
        call = {
            "engine": options.engine,
            "devices": [options.device],
            "max_shard_size": options.max_shard_size,
            **({"workers": options.workers} if options.workers else {}),
            **({"verify": options.verify} if options.verify else {}),
        }
        job = {
            "source": str(source),
            "save_directory": str(output),
            "ignore": ignore_for(dimensions),
            "block_scales": options.scales,
            "options": call,
        }
        measured = run("ours.py", job, folder)
        bytes_in, bytes_out = (_bytes(path) for path in (source, output))

    workers = f"{options.workers} workers" if options.workers else "workers as `quantize` chooses"
    verify = f", verify {options.verify}" if options.verify else ""
    text = (
        f"One layer with {options.experts} experts and everything else at full size, "
        f"{options.scales} scales{verify}, shards of at most {options.max_shard_size}, {workers} on "
        f"{options.device}. {machine()}\n\n"
        f"{_table(measured, bytes_in, bytes_out)}\n\n{_whole_model(measured, bytes_in, bytes_out)}"
    )
    report(f"full layer, {options.engine}, {options.scales} scales{verify}", text, options.record)


def _bytes(folder: Path) -> int:
    return read_checkpoint(find_source(folder)).nbytes


def _table(measured: Run, bytes_in: int, bytes_out: int) -> str:
    rows = [
        ("tensors read", gigabytes(bytes_in)),
        ("tensors written", gigabytes(bytes_out)),
        ("wall time of the process", f"{measured.process_seconds:.1f} s"),
        ("wall time of the call", f"{measured.call_seconds:.1f} s"),
        ("peak memory of the process tree", gibibytes(measured.peak.held)),
        ("the same, with mapped files", gibibytes(measured.peak.with_mapped_files)),
    ]
    return markdown_table(("", "measured"), rows)


def _whole_model(measured: Run, bytes_in: int, bytes_out: int) -> str:
    """The arithmetic from this layer to the model: in proportion to bytes read and to cores."""
    model = sum(spec.nbytes for spec in tensors(Dimensions()))
    layers = model / bytes_in
    core_seconds = measured.call_seconds * cores()
    seconds = layers * core_seconds / MANY_CORES
    return (
        f"The whole model on {MANY_CORES} cores, in proportion: {measured.call_seconds:.1f} s x {cores()} "
        f"cores = {core_seconds:.0f} core-seconds for {gigabytes(bytes_in)}; the model's "
        f"{gigabytes(model)} are {layers:.1f} times that; {core_seconds:.0f} x {layers:.1f} / "
        f"{MANY_CORES} = {seconds:.0f} s, or {seconds / 60:.1f} minutes. For that the disk has to read "
        f"{gigabytes(model / seconds)} and to write {gigabytes(layers * bytes_out / seconds)} a second; a "
        "slower one sets the time itself."
    )


if __name__ == "__main__":
    main()
