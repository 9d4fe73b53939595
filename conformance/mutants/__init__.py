"""Planted faults that the suite must catch. `--impl conformance.mutants:NAME` judges one, `python -m conformance.mutants` judges all."""

from __future__ import annotations

import importlib
from typing import Any

SUBJECTS = (
    "batches", "batch_sizes", "store", "large_offsets", "attention_tables", "attention_masks", "attention_tiles", "attention_numbers",
    "attention_heads", "attention_rows", "attention_paths", "attention_shares", "attention_launch", "attention_cheats", "slot_layouts",
    "steps", "lives", "claims", "logits", "sampling", "sampling_paths",
)  # fmt: skip


def all_mutants() -> dict[str, Any]:
    """Every mutant by name."""
    for subject in SUBJECTS:
        importlib.import_module(f"conformance.mutants.{subject}")
    return importlib.import_module("conformance.mutants.catalogue").CATALOGUE


def __getattr__(name: str) -> Any:
    if name == "sound":
        return importlib.import_module("conformance.mutants.sound_kernels").SoundKernels()
    if not name.startswith("_"):
        mutants = all_mutants()
        if name in mutants:
            return mutants[name].implementation()
    raise AttributeError(name)
