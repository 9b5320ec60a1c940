"""Convert on a Dask cluster: two worker processes here, or a Slurm cluster by another first line.

    pip install distributed
    python dask_cluster.py /shared/Kimi-K3 /shared/Kimi-K3-FP8-BLOCK

Dask's client is a concurrent.futures executor already. The source and the place to save must be on a
file system that every worker sees. A worker that dies costs its job: Dask runs it again elsewhere.

On a Slurm cluster, one worker for each GPU (pip install dask-jobqueue), with the rest unchanged:

    from dask_jobqueue import SLURMCluster

    cluster = SLURMCluster(
        cores=8,
        processes=1,
        memory="64GB",
        walltime="12:00:00",
        job_extra_directives=["--gpus=1"],
        worker_extra_args=["--nthreads", "1"],
    )
    cluster.scale(jobs=16)

A worker runs one job at a time, hence the one thread; torch may use more of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from distributed import Client, LocalCluster

from kimi_k3_fp8 import quantize


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert Kimi-K3 to FP8 on a Dask cluster.")
    parser.add_argument("source")
    parser.add_argument("save_directory")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-shard-size", default="5GB")
    options = parser.parse_args(arguments)

    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        report = quantize(
            options.source,
            options.save_directory,
            max_shard_size=options.max_shard_size,
            # Not pure: a job's work is the file it writes, not the receipt that Dask could remember.
            executor=client.get_executor(pure=False),
        )
    print(report)


if __name__ == "__main__":
    main()
