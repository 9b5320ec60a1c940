"""Machine: the devices, cores and memory there are, and how a run uses them.

Figures are bytes. `Machine` is a plain value so that the choice can be tested with any figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

#: Share of the free memory that a run allows itself; the rest is for everybody else.
USABLE = 0.8
#: Memory of one worker before it has loaded a tensor: torch and llmcompressor, measured 0.46 GB.
WORKER_BYTES = 500_000_000
#: No job is made smaller than this just to run more workers at once.
SMALLEST_JOB = 250_000_000
#: A small checkpoint is cut into twice as many jobs as workers, so that they end together, but into none
#: smaller than this.
SMALLEST_SHARE = 10_000_000
#: A device holds the kernels and contexts of one process besides the job: 1 GB.
DEVICE_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Device:
    """A device by torch's name ("cpu", "cuda:0") and its free memory; for "cpu" that is the host's."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: accelerators (none on a CPU-only machine), cores, and the host's free memory."""

    accelerators: tuple[Device, ...]
    cores: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Workers:
    """How a run uses a machine: a device for each worker, its threads, the largest job's output in
    bytes, and why."""

    devices: tuple[str, ...]
    threads: int
    job_bytes: int
    reason: str


def read_machine() -> Machine:
    """Look at this machine. Accelerators are asked for in a process of their own, so that the caller
    neither imports torch nor holds a context on a device."""
    return Machine(_accelerators(), len(os.sched_getaffinity(0)), _free_host_bytes())


def choose_workers(
    machine: Machine,
    *,
    max_job_bytes: int,
    bytes_per_output_byte: float,
    fixed: bool = False,
    extra_bytes: int = 0,
    total_bytes: int | None = None,
    devices: Sequence[str] | None = None,
    workers: int | None = None,
) -> Workers | None:
    """One worker per accelerator, or on the CPU one per core, and the largest job that fits them all.

    max_job_bytes: the most output one job may have. bytes_per_output_byte: memory a job needs for each
        byte of its output. extra_bytes: what it needs on top of that.
    total_bytes: all output there will be; a small one is shared out among the workers.
    fixed: the job size is given, only the workers may be fewer.
    devices, workers: what the caller asks for instead. None means that not even one worker fits.
    Raises ValueError for workers below 1 or a device that is not there.
    """
    names = tuple(devices) if devices else tuple(d.name for d in machine.accelerators) or ("cpu",)
    free = {device.name: device.free_bytes for device in machine.accelerators}
    for name in names:
        if name != "cpu" and name not in free:
            there = ", ".join([*free, "cpu"])
            raise ValueError(f"there is no device {name!r} here; there are: {there}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")

    on_cpu = set(names) == {"cpu"}
    count = workers or (machine.cores if on_cpu else len(names))
    smallest = max_job_bytes if fixed else min(SMALLEST_JOB, max_job_bytes)
    while True:
        used = tuple(names[i % len(names)] for i in range(count))
        room = (USABLE * machine.free_bytes / count - WORKER_BYTES - extra_bytes) / bytes_per_output_byte
        for name in set(used) - {"cpu"}:
            usable = USABLE * free[name] / used.count(name) - DEVICE_BYTES - extra_bytes
            room = min(room, usable / bytes_per_output_byte)
        if room >= smallest or count == 1:
            break
        count -= 1
    if room < smallest:
        return None
    job_bytes = min(max_job_bytes, int(room))
    if total_bytes is not None and not fixed:
        job_bytes = min(job_bytes, max(SMALLEST_SHARE, -(-total_bytes // (2 * count))))
    if total_bytes is not None:
        count = max(1, min(count, -(-total_bytes // job_bytes)))
        used = used[:count]
    threads = max(1, machine.cores // count)
    return Workers(used, threads, job_bytes, _reason(machine, used, threads, job_bytes, max_job_bytes))


def gigabytes(count: float) -> str:
    """Bytes as people read them: 2,819.87 GB, 12.3 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:.0f} B"


def parse_size(size: int | str) -> int:
    """Bytes of a size as Hugging Face writes it: "5GB", "500MB", "2GiB", or a number of bytes.

    Raises ValueError for anything else and for sizes below 1.
    """
    text = str(size).strip().replace("_", "")
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "B": 1, "": 1}
    digits = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(digits) :].strip().upper()
    try:
        count = int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"{size!r} is not a size; write it like '5GB', '500MB' or a number of bytes")
    return count


def _reason(machine: Machine, used: tuple[str, ...], threads: int, job_bytes: int, max_job_bytes: int) -> str:
    text = (
        f"{len(used)} worker{'s' * (len(used) > 1)} on {', '.join(dict.fromkeys(used))}, {threads} "
        f"thread{'s' * (threads > 1)} each; {machine.cores} cores and "
        f"{gigabytes(machine.free_bytes)} of memory are free"
    )
    if job_bytes < max_job_bytes:
        text += f"; a job is at most {gigabytes(job_bytes)} of output instead of {gigabytes(max_job_bytes)}"
    return text


def _free_host_bytes() -> int:
    """Free memory, or what a container's limit leaves of it (control groups, version 2)."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


_ASK_TORCH = """
import json, torch
found = []
if torch.accelerator.is_available():
    kind = torch.accelerator.current_accelerator().type
    for i in range(torch.accelerator.device_count()):
        found.append([f"{kind}:{i}", torch.accelerator.get_memory_info(i)[0]])
print(json.dumps(found))
"""


def _accelerators() -> tuple[Device, ...]:
    if version("torch").endswith("+cpu"):
        return ()
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True)
    if asked.returncode != 0:
        return ()
    return tuple(Device(name, free) for name, free in json.loads(asked.stdout.splitlines()[-1]))
