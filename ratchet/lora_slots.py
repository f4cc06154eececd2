"""The LoRA slots of an engine: several runs share an engine, and each is answered by its own slot.

A slot has a name, by which calls ask for it, and the version that it serves. vLLM has one label for all weights of an
engine, so the label lists the versions of all slots, in the order of the slots: `a/3.e1;b/7.e1`. An engine of one run
has one slot, and its label is that run's version. Column `engine.version` holds the label.
"""

from collections.abc import Mapping

from ratchet.types import MODEL_NAME

FIRST_SLOT = 1
SEPARATOR = ";"
"""Separates the versions of a label; no id of a run has it."""

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Values of vLLM's `--max-lora-rank` that are used here."""


def served_rank(rank: int) -> int:
    """Return the highest rank that engines serve which are started for an adapter of this rank."""
    return next(one for one in SERVED_RANKS if one >= rank)


def slot_name(slot: int) -> str:
    """Return the name of the model by which a call asks for the slot."""
    return MODEL_NAME if slot == FIRST_SLOT else f"{MODEL_NAME}-{slot}"


def versions_of_label(label: str | None) -> dict[int, str]:
    """Return slot → version for every slot that has one."""
    parts = (label or "").split(SEPARATOR)
    return {slot: version for slot, version in enumerate(parts, FIRST_SLOT) if version}


def label_of_versions(versions: Mapping[int, str]) -> str | None:
    """Return the label of an engine whose slots serve these versions; None if none of them has one."""
    if not versions:
        return None
    return SEPARATOR.join(versions.get(slot, "") for slot in range(FIRST_SLOT, max(versions) + 1))


def version_in_label(label: str | None, slot: int) -> str | None:
    return versions_of_label(label).get(slot)


def label_with(label: str | None, slot: int, version: str) -> str:
    """Return the label after a slot got another version."""
    return label_of_versions(versions_of_label(label) | {slot: version}) or version
