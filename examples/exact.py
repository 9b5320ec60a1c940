"""FP8 that holds every MXFP4 weight as it is: scales of powers of two, and every value compared.

    python examples/exact.py SOURCE [SAVE_DIRECTORY]

The MXFP4 weights are turned into FP8 by table, which needs no GPU.
"""

import sys

from kimi_k3_fp8 import Recipe, Report, quantize


def main(source: str, save_directory: str | None = None) -> Report:
    recipe = Recipe(block_scales="power_of_two")
    report = quantize(source, save_directory, recipe, engine="transcode", verify="full")
    for found in report.fidelity:
        print(f"{found.module_class}: {found.verdict}")
    return report


if __name__ == "__main__":
    main(*sys.argv[1:])
