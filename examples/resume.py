"""Kill a conversion in the middle, and continue it by the same call.

    python examples/resume.py SOURCE SAVE_DIRECTORY [MAX_SHARD_SIZE]

For a source small enough to watch, give a size that makes several shards of it, such as 1MB.
"""

import subprocess
import sys
import time
from pathlib import Path

from kimi_k3_fp8 import Report, quantize


def kill_in_the_middle(source: str, save_directory: str, max_shard_size: str) -> None:
    """Begin in a process of its own, and kill that as soon as one job is finished."""
    size = ["--max-shard-size", max_shard_size]
    command = [sys.executable, "-m", "kimi_k3_fp8", "quantize", source, save_directory, *size]
    staging = Path(f"{save_directory}.partial")
    with subprocess.Popen(command) as run:
        while run.poll() is None and not any(staging.glob("receipts/*.json")):
            time.sleep(0.05)
        run.kill()


def main(source: str, save_directory: str, max_shard_size: str = "5GB") -> Report:
    kill_in_the_middle(source, save_directory, max_shard_size)
    print(
        f"killed; there is {'something' if Path(save_directory).exists() else 'nothing'} at the output path"
    )
    report = quantize(source, save_directory, max_shard_size=max_shard_size)
    print(f"{report.jobs_kept} jobs were kept, {report.jobs_run} ran now")
    return report


if __name__ == "__main__":
    main(*sys.argv[1:])
