"""The card of the result: README.md as the Hub reads it, saying only what is true of this checkpoint."""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3_fp8.architecture import module_class
from kimi_k3_fp8.checkpoint import find_source, read_checkpoint
from kimi_k3_fp8.machine import gigabytes
from kimi_k3_fp8.planning import Plan
from kimi_k3_fp8.recipe import Recipe
from kimi_k3_fp8.serving import (
    VLLM_VERSION,
    Layout,
    Placeholder,
    Served,
    ServeOptions,
    layouts,
    nearest_layout,
    serve_commands,
)
from kimi_k3_fp8.staging import write_whole
from kimi_k3_fp8.validation import Report, recorded_recipe

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

CARD_NAME = "README.md"
#: Where the README.md that came with the source is kept.
SOURCE_CARD_NAME = "README-source.md"


class CardDetails(BaseModel):
    """What the weights do not tell. name: of the result, best as a Hub id ("you/Kimi-K3-FP8-BLOCK"); by
    default the folder's. developers: by default the Hub id's owner. released: by default today.
    layout: to serve it in, by default two nodes of eight GPUs, or the nearest that loads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    base_model: str = "moonshotai/Kimi-K3"
    developers: str | None = None
    released: datetime.date = Field(default_factory=datetime.date.today)
    version: str = "1.0"
    layout: Layout = Layout(8, 2, 2)
    options: ServeOptions = ServeOptions()


def write_card(
    folder: str | os.PathLike[str],
    source: Served | None = None,
    recipe: Recipe | None = None,
    report: Report | None = None,
    details: CardDetails | None = None,
) -> Path:
    """Write the card as the folder's README.md. A README.md of the source is kept as README-source.md,
    which the card links to; written again, the card replaces only itself.

    source: the Plan or Checkpoint the card is about, by default the one in the folder.
    Raises as `model_card` does, and OSError where the folder cannot be written.
    """
    path, kept = Path(folder, CARD_NAME), Path(folder, SOURCE_CARD_NAME)
    card = model_card(folder if source is None else source, recipe, report, details)
    if path.exists() and not kept.exists():
        path.rename(kept)
    link = f"The base model's own card is kept as [{kept.name}]({kept.name}).\n" if kept.exists() else ""
    write_whole(path, f"{card}\n{link}" if link else f"{card}")
    return path


def model_card(
    source: Served,
    recipe: Recipe | None = None,
    report: Report | None = None,
    details: CardDetails | None = None,
) -> ModelCard:
    """The card of a planned or finished checkpoint.

    recipe: by default the plan's, or the one recorded in the checkpoint, or else the published one.
    report: of its validation; the fidelity table is its, and the only ground for saying "exact".
    Raises SourceError where there is no such checkpoint.
    """
    from huggingface_hub import ModelCard, ModelCardData

    details = details or CardDetails()
