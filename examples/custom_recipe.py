"""A recipe of one's own: change the published one by name, look at the plan, keep the file, convert.

    python examples/custom_recipe.py SOURCE SAVE_DIRECTORY

The result can be served with tensor parallel 16 and expert parallel, which the published one cannot.
"""

import sys
from pathlib import Path

from kimi_k3_fp8 import Layout, Recipe, Report, plan, quantize

RECIPE = (
    Recipe(block_scales="power_of_two")
    .for_layout(Layout(tensor_parallel_size=16, nodes=2, expert_parallel=True))
    .with_rule(
        name="first shared experts",
        pattern=r"re:.*\.layers\.1\.block_sparse_moe\.shared_experts\..*",
        reason="an experiment: keep these in BF16",
    )
)


def main(source: str, save_directory: str) -> Report:
    file = RECIPE.save(Path(f"{save_directory}.yaml"))  # for `kimi-k3-fp8 quantize --recipe`
    recipe = Recipe.from_file(file)
    for rule in recipe.ignore:
        print(f"{rule.name}: {rule.reason}")

    work = plan(source, recipe, save_directory=save_directory)
    print(work)
    work.raise_for_problems()
    return quantize(source, save_directory, recipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
