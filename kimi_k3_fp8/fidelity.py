"""Fidelity: how far stored values are from the source's, a module class at a time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fidelity(BaseModel):
    """What a comparison of values found for one class of modules."""

    model_config = ConfigDict(frozen=True)

    module_class: str
