"""What the benchmarks share: fresh processes with their time and memory, the machine, the tables.

Memory is that of a whole process tree, looked at ten times a second in /proc/<pid>/smaps_rollup. Two
figures: *memory* is what the processes themselves hold (Pss_Anon + Pss_Shmem), without the page cache;
*with mapped files* (Pss) adds their share of mapped files: libraries, and the safetensors files that
are open at that moment, which the system can take back. Peaks of less than a tenth of a second may
be missed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kimi_k3_fp8 import Recipe, quantize
from kimi_k3_fp8.architecture import Dimensions, tensors

#: Seconds between two looks at the memory; longer where looking takes more than a tenth of that.
INTERVAL = 0.1


class Memory(NamedTuple):
    """Bytes of a process tree; see the top of this module."""

    held: int = 0
    with_mapped_files: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One fresh process: wall time from start to exit, wall time of the call in it, peak memory."""

    process_seconds: float
    call_seconds: float
    peak: Memory


def run(script: str, job: Mapping[str, Any], folder: Path) -> Run:
    """Run a script of this folder in a fresh Python, its output kept in `folder`, and watch it.

    What earlier runs left to be written to the disk is flushed before. Raises SystemExit, with the end
    of what the script said, if it fails.
    """
    path = Path(__file__).parent / script
    answer, log = folder / "answer.json", folder / f"{path.stem}.log"
    command = [sys.executable, str(path), json.dumps(job), str(answer)]
    os.sync()
    ended = threading.Event()
    with ThreadPoolExecutor(1) as watcher, open(log, "w") as said:
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process:
            peak = watcher.submit(_peak_memory, process.pid, ended)
            try:
                code = process.wait()
            finally:
                ended.set()
        seconds = time.perf_counter() - started
    if code:
        raise SystemExit(f"{script} ended with {code}:\n{log.read_text()[-3000:]}")
    return Run(seconds, json.loads(answer.read_text()), peak.result())


def _peak_memory(pid: int, ended: threading.Event) -> Memory:
    peak, pause = Memory(), 0.0
    while not ended.wait(pause):
        started = time.perf_counter()
        peak = Memory(*map(max, peak, _memory(pid)))
        pause = max(INTERVAL, 10 * (time.perf_counter() - started))
    return peak


def _memory(pid: int) -> Memory:
    """What a process and its descendants hold now; those that end meanwhile count as nothing."""
    held = mapped = 0
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return Memory()
    for member in tree:
        try:
            text = Path(f"/proc/{member.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        kilobytes = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
        held += 1024 * sum(int(kilobytes.get(name, 0)) for name in ("Pss_Anon", "Pss_Shmem"))
        mapped += 1024 * int(kilobytes.get("Pss", 0))
    return Memory(held, mapped)


# --- what is measured


def one_layer(**sizes: int) -> Dimensions:
    """One mixture-of-experts layer; what else a checkpoint must have is small, unless given."""
    small = {"vocabulary": 256, "hidden": 256, "heads": 2, "shared_intermediate": 256}
    return Dimensions(layers=1, mla_layers=(), dense_layers=(), vision_blocks=0, **(small | sizes))


def ignore_for(dimensions: Dimensions) -> list[str]:
    """The published ignore list without rules that match nothing in a model of these dimensions."""
    modules = {spec.name.rpartition(".")[0] for spec in tensors(dimensions)}
    recipe = Recipe()
    unmatched = [rule.name for rule in recipe.ignore if not any(map(rule.matches, modules))]
    return recipe.without_rule(*unmatched).ignore_patterns


def cores() -> int:
    return len(os.sched_getaffinity(0))


# --- options that the scripts share


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave checkpoints and logs in that folder")
    parser.add_argument("--record", type=Path, metavar="FILE", help="put the result into this Markdown file")


def add_quantize_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scales", choices=("amax", "power_of_two"), default="amax")
    parser.add_argument("--device", default="cpu", help="torch's name for the device")
    parser.add_argument("--seed", type=int, default=0)


def check_verify(parser: argparse.ArgumentParser, asked: bool) -> None:
    """End with a message if `--verify` is asked for and this release's `quantize` has no such thing."""
    if asked and "verify" not in inspect.signature(quantize).parameters:
        parser.error("quantize has no parameter 'verify'")


@contextmanager
def workspace(folder: Path | None, keep: bool) -> Iterator[Path]:
    """A new folder to work in, inside `folder`. It is removed at the end unless it is to be kept."""
    path = Path(tempfile.mkdtemp(prefix="benchmark-", dir=folder))
    try:
        yield path
    finally:
        if keep:
            print(f"kept: {path}", file=sys.stderr)
        else:
            shutil.rmtree(path)


# --- what is reported


def machine() -> str:
    """The machine and the versions, in one sentence without its name."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    names = ("torch", "llmcompressor", "compressed-tensors", "transformers", "safetensors", "kimi-k3-fp8")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{cores()} cores of {found[1] if found else platform.machine()}, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory; "
        f"Python {platform.python_version()}, {versions}."
    )


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are set flush right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def report(title: str, text: str, file: Path | None) -> None:
    """Print a result; and put it into a Markdown file, in the place of an older one of that title."""
    section = f"### {title}\n\n{text}\n"
    print(section)
    if file is not None:
        begin, end = f"<!-- begin: {title} -->", f"<!-- end: {title} -->"
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        new = f"{begin}\n{section}{end}"
        replaced, count = place.subn(lambda _: new, old)
        file.write_text(replaced if count else f"{old}{new}\n", encoding="utf-8")
