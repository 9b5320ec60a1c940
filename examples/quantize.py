"""The published job: Kimi-K3 in FP8_BLOCK, by the recipe of RedHatAI/Kimi-K3-FP8-BLOCK.

    python examples/quantize.py [SOURCE [SAVE_DIRECTORY]]

The source is a folder or a Hub id. Stopped in the middle, the same line continues.
"""

import sys

from kimi_k3_fp8 import Report, quantize


def main(source: str = "moonshotai/Kimi-K3", save_directory: str | None = None) -> Report:
    report = quantize(source, save_directory)
    print(report)
    return report


if __name__ == "__main__":
    main(*sys.argv[1:])
