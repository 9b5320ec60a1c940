"""The choice of workers and job size, with faked figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_fp8.machine import (
    DEVICE_BYTES,
    SMALLEST_JOB,
    USABLE,
    WORKER_BYTES,
    Device,
    Machine,
    choose_workers,
    parse_size,
    read_machine,
)

GB = 10**9
ASK = {"max_job_bytes": 5 * GB, "bytes_per_output_byte": 3.6}


def test_24_gib_and_no_gpu() -> None:
    """Two workers on two cores; the job shrinks so that both fit."""
    chosen = choose_workers(Machine((), 2, 23 * 2**30), **ASK)
    assert chosen is not None
    assert (chosen.devices, chosen.threads) == (("cpu", "cpu"), 1)
    assert SMALLEST_JOB < chosen.job_bytes < 5 * GB
    assert "instead of 5.00 GB" in chosen.reason


def test_one_gpu_of_24_gb() -> None:
    chosen = choose_workers(Machine((Device("cuda:0", 24 * GB),), 16, 64 * GB), **ASK)
    assert chosen is not None
    assert (chosen.devices, chosen.threads) == (("cuda:0",), 16)
    assert chosen.job_bytes * 3.6 + DEVICE_BYTES <= USABLE * 24 * GB
    assert chosen.job_bytes > 4 * GB


def test_eight_gpus_of_80_gb() -> None:
    gpus = tuple(Device(f"cuda:{i}", 79 * GB) for i in range(8))
    chosen = choose_workers(Machine(gpus, 128, 1000 * GB), **ASK)
    assert chosen is not None
    assert chosen.devices == tuple(f"cuda:{i}" for i in range(8))
    assert chosen.threads == 16
    assert chosen.job_bytes == 5 * GB
    assert "instead of" not in chosen.reason


def test_many_cores_and_little_memory_means_fewer_workers() -> None:
    chosen = choose_workers(Machine((), 64, 32 * GB), **ASK)
    assert chosen is not None
    assert 1 < len(chosen.devices) < 64
    assert chosen.job_bytes >= SMALLEST_JOB


def test_the_callers_wishes() -> None:
    machine = Machine((Device("cuda:0", 80 * GB), Device("cuda:1", 80 * GB)), 8, 500 * GB)
    assert choose_workers(machine, **ASK, devices=["cuda:1"]).devices == ("cuda:1",)  # type: ignore[union-attr]
    assert choose_workers(machine, **ASK, devices=["cpu"]).devices == ("cpu",) * 8  # type: ignore[union-attr]
    two = choose_workers(machine, **ASK, devices=["cuda:0"], workers=2)
    assert two is not None
    assert two.devices == ("cuda:0", "cuda:0")
    with pytest.raises(ValueError, match=r"no device 'cuda:2' here; there are: cuda:0, cuda:1, cpu"):
        choose_workers(machine, **ASK, devices=["cuda:2"])


def test_a_begun_runs_job_size_stays() -> None:
    machine = Machine((), 8, 40 * GB)
    chosen = choose_workers(machine, max_job_bytes=4 * GB, bytes_per_output_byte=3.6, fixed=True)
    assert chosen is not None
    assert chosen.job_bytes == 4 * GB
    assert len(chosen.devices) == 2


def test_a_small_checkpoint_is_shared_out() -> None:
    machine = Machine((), 4, 100 * GB)
    chosen = choose_workers(machine, **ASK, total_bytes=2 * GB)
    assert chosen is not None
    assert (len(chosen.devices), chosen.job_bytes) == (4, GB // 4)
    alone = choose_workers(machine, **ASK, total_bytes=7_000_000)
    assert alone is not None
    assert (len(alone.devices), alone.threads) == (1, 4)


@given(
    cores=st.integers(1, 256),
    host=st.integers(0, 2000 * GB),
    gpus=st.lists(st.integers(0, 200 * GB), max_size=8),
    size=st.integers(10**6, 50 * GB),
    per_byte=st.floats(1, 8),
    extra=st.integers(0, 5 * GB),
    workers=st.one_of(st.none(), st.integers(1, 32)),
)
def test_the_choice_never_exceeds_what_there_is(
    cores: int, host: int, gpus: list[int], size: int, per_byte: float, extra: int, workers: int | None
) -> None:
    machine = Machine(tuple(Device(f"cuda:{i}", free) for i, free in enumerate(gpus)), cores, host)
    chosen = choose_workers(
        machine, max_job_bytes=size, bytes_per_output_byte=per_byte, extra_bytes=extra, workers=workers
    )
    if chosen is None:
        return
    job = chosen.job_bytes * per_byte + extra
    assert 0 < chosen.job_bytes <= size
    assert len(chosen.devices) * (WORKER_BYTES + job) <= USABLE * host + 1
    for i, free in enumerate(gpus):
        on_it = chosen.devices.count(f"cuda:{i}")
        assert on_it == 0 or on_it * (DEVICE_BYTES + job) <= USABLE * free + 1
    assert len(chosen.devices) <= (workers or max(cores, len(gpus)))
    assert chosen.threads * len(chosen.devices) <= max(cores, len(chosen.devices))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * GB),
        ("500MB", 5 * 10**8),
        ("2GiB", 2**31),
        ("1.5 GB", 15 * 10**8),
        ("7", 7),
        (9, 9),
        ("5gb", 5 * GB),
    ],
)
def test_sizes_as_hugging_face_writes_them(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "0", 0, "1e400GB", "nan", "5 G B"])
def test_texts_that_are_no_size(text: int | str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_this_machine_is_described() -> None:
    import os

    import psutil

    machine = read_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert 0 < machine.free_bytes <= psutil.virtual_memory().total
