"""Which epoch is best, and when to stop: pure functions of a run's metrics on valid. Test never takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]  # a line of metrics.jsonl


def evaluated(history: Sequence[Record]) -> list[Record]:
    """List the epochs that were evaluated on valid."""
    return [record for record in history if "mrr" in record.get("valid", ())]


def best_record(history: Sequence[Record]) -> Record | None:
    """Give the epoch of the highest validation MRR, the first of equals; None where none was evaluated."""
    return max(evaluated(history), key=lambda record: float(record["valid"]["mrr"]), default=None)


def is_exhausted(history: Sequence[Record], patience: int) -> bool:
    """Tell whether the last `patience` evaluations were no better than one before them (0: never)."""
    best, records = best_record(history), evaluated(history)
    return bool(patience) and best is not None and len(records) - 1 - records.index(best) >= patience
