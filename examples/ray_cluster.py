"""Convert on a Ray cluster: this machine, or the cluster that `ray.init` finds.

    pip install ray
    python ray_cluster.py /shared/Kimi-K3 /shared/Kimi-K3-FP8-BLOCK --gpus-per-job 1

`RayExecutor` is all that is between Ray and this library. The source and the place to save must be on a
file system that every node sees. A worker that dies costs its job: Ray runs it again elsewhere.

On a running cluster set RAY_ADDRESS (or start this with `ray job submit`); without it, Ray starts on
this machine with all of its cores and GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import ray

from kimi_k3_fp8 import quantize


class RayExecutor(Executor):
    """Each call is a Ray task with cores and GPUs of its own.

    num_gpus: GPUs that a job gets to itself; Ray shows it no others, so it uses the first it sees.
    max_retries: how often a job whose worker died is run again.
    """

    def __init__(self, *, num_cpus: float = 1, num_gpus: float = 0, max_retries: int = 3) -> None:
        self._call = ray.remote(_call).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=max_retries)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def finish(done: Future[Any]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is not None:
                future.set_exception(getattr(error, "cause", None) or error)  # what the job raised
            else:
                future.set_result(done.result())

        self._call.remote(fn, args, kwargs).future().add_done_callback(finish)
        return future


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert Kimi-K3 to FP8 on a Ray cluster.")
    parser.add_argument("source")
    parser.add_argument("save_directory")
    parser.add_argument("--cpus-per-job", type=float, default=1)
    parser.add_argument("--gpus-per-job", type=float, default=0)
    parser.add_argument("--max-shard-size", default="5GB")
    options = parser.parse_args(arguments)

    with ray.init(log_to_driver=False):
        report = quantize(
            options.source,
            options.save_directory,
            max_shard_size=options.max_shard_size,
            executor=RayExecutor(num_cpus=options.cpus_per_job, num_gpus=options.gpus_per_job),
        )
    print(report)


if __name__ == "__main__":
    main()
