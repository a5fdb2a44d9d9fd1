"""Find the nearest hash split that is possible, when the one asked for leaves valid or test empty.

It is tried out on the labels in plain Python: a split that comes out empty although it was asked for belongs to a small
graph, or to one of which nothing can be held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ingest.options import IngestOptions
from ingest.places import split_of

Triple = tuple[str, str, str]
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.48)
MAX_TRIPLES = 20_000


def try_split(triples: Sequence[Triple], options: IngestOptions) -> dict[str, set[Triple]]:
    """Split and repair triples (sorted by their labels' bytes) as an ingest with these options would."""
    splits: dict[str, set[Triple]] = {"train": set(), "valid": set(), "test": set()}
    for triple in triples:
        splits[split_of(*triple, options)].add(triple)
    known = {thing for triple in splits["train"] for thing in _things(triple)}
    first: dict[tuple[str, str], Triple] = {}
    for triple in triples:
        if triple not in splits["train"]:
            for thing in _things(triple):
                first.setdefault(thing, triple)
    moved = {triple for thing, triple in first.items() if thing not in known}
    return {
        "train": splits["train"] | moved,
        "valid": splits["valid"] - moved,
        "test": splits["test"] - moved,
    }


def _things(triple: Triple) -> tuple[tuple[str, str], ...]:
    source, relation, target = triple
    return ("entity", source), ("relation", relation), ("entity", target)


def nearest_possible(triples: Sequence[Triple], options: IngestOptions, empty: Sequence[str]) -> str:
    """Say which fractions come nearest to those asked for and leave none of the `empty` splits empty."""
    flags = [f"{split}_fraction" for split in empty]
    asked = max(getattr(options, flag) for flag in flags)
    if len(triples) <= MAX_TRIPLES:
        for step in _STEPS:
            changes: dict[str, Any] = dict.fromkeys(flags, step)
            attempt = replace(options, **changes)
            if step < asked or sum(attempt.fractions()) >= 1:
                continue
            found = try_split(triples, attempt)
            wanted = [split for split, part in zip(("valid", "test"), attempt.fractions(), strict=True) if part > 0]
            if all(found[split] for split in wanted):
                return _flags(empty, step)
    return f"{_flags(empty, 0)}, or give the files yourself with --train, --valid and --test"


def _flags(splits: Sequence[str], fraction: float) -> str:
    return " ".join(f"--{split}-fraction {fraction:g}" for split in splits)
