"""The whole story on one page: plan, run the jobs, assemble, validate, publish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor

from kimi_k3_fp8.assembly import assemble, publish, write_record
from kimi_k3_fp8.execution import execute, open_run
from kimi_k3_fp8.fidelity import Verify, merged
from kimi_k3_fp8.model_card import write_card
from kimi_k3_fp8.planning import Engine, plan
from kimi_k3_fp8.recipe import Recipe
from kimi_k3_fp8.validation import Report, validate


def quantize(
    source: str | os.PathLike[str],
    save_directory: str | os.PathLike[str] | None = None,
    recipe: Recipe | None = None,
    *,
    revision: str | None = None,
    devices: Sequence[str] | None = None,
    workers: int | None = None,
    max_shard_size: int | str = "5GB",
    executor: Executor | None = None,
    engine: Engine = "llm_compressor",
    verify: Verify = "sampled",
    keep_source: bool = True,
    prefetch: int | None = None,
    card: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> Report:
    """Make an FP8_BLOCK checkpoint of a Kimi-K3 checkpoint. The defaults are the published recipe.

    source: the folder of the checkpoint, or its id on the Hugging Face Hub ("org/name"), of which
        `revision` names a branch, tag or commit.
    recipe: what to make of it.
    save_directory: where the result appears, whole, at the end; by default the source's last name +
        "-FP8-BLOCK".
    devices: torch's names, e.g. ["cuda:0", "cuda:1"]; by default every accelerator, else the CPU.
    workers: processes; by default one per accelerator, or on the CPU as many as cores and memory let.
    max_shard_size: the most bytes of tensors in an output shard, written like "5GB".
    executor: any concurrent.futures.Executor whose workers see source and save_directory, in place of
        this machine's workers.
    engine: "llm_compressor" sends everything through its `model_free_ptq`. "transcode" turns MXFP4
        weights into the same bytes by table, many times faster, on the CPU.
    verify: dequantize what was just written and compare it with the source: "off", "full", or
        "sampled", one quantized module in 64 and at least one of each class in each job.
    card: write a model card as README.md, and keep the source's as README-source.md.
    keep_source, prefetch: from the Hub, shards are downloaded while others are converted, at most
        `prefetch` of them ahead. keep_source=False drops each once no job needs it: never more than
        `prefetch` are on disk. By default they stay in the Hub's cache.
    overwrite: replace what is at save_directory; it stays until the result is complete.
    progress: show one bar of bytes written.

    Killed or failed, the same call continues: finished jobs are kept in save_directory + ".partial".

    Raises SourceError and PlanError before anything is created; JobError, ResumeError and
    RunLockedError during the run; ValidationError if the result is not what the recipe promises.
    """
    work = plan(
        source,
        recipe,
        revision=revision,
        save_directory=save_directory,
        max_shard_size=max_shard_size,
        devices=devices,
        workers=workers,
        executor=executor,
        engine=engine,
        keep_source=keep_source,
        prefetch=prefetch,
        overwrite=overwrite,
    )
    work.raise_for_problems()
    with open_run(work) as staging:
        receipts, ran = execute(work, staging, executor=executor, verify=verify, progress=progress)
        folder = assemble(work, staging)
        report = validate(folder, work.recipe, source=work.checkpoint)
        report.raise_for_problems()
        report = report.model_copy(
            update={
                "checkpoint": str(work.save_directory),
                "problems": (*work.problems, *report.problems),
                "fidelity": merged(found for receipt in receipts for found in receipt.fidelity),
                "jobs_run": ran,
                "jobs_kept": len(receipts) - ran,
            }
        )
        if card:
            write_card(folder, work, report=report)
        write_record(folder, work, receipts, report)
        publish(folder, work.save_directory)
    shutil.rmtree(staging.path, ignore_errors=True)
    return report
