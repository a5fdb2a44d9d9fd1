"""Counts, sizes and durations as people write and read them."""

from __future__ import annotations

import re

from sattle_dist.config import ConfigError

DAY = 86400.0
COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
SIZES = {f"{prefix}B": n for prefix, n in COUNTS.items()} | {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_number(text: str, units: dict[str, int], where: str, example: str) -> float:
    """Read a positive number with one of these units behind it."""
    found = re.fullmatch(r"([0-9][0-9_,]*\.?[0-9]*(?:[eE]\+?[0-9]+)?) *([a-zA-Z]*)", text.strip())
    by_lower = {unit.lower(): n for unit, n in units.items()}
    if not found or found[2].lower() not in by_lower:
        known = ", ".join(unit for unit in units if unit)
        raise ConfigError(f"{where} must be a number such as {example}, with one of {known} behind it; got {text!r}")
    value = float(re.sub("[_,]", "", found[1])) * by_lower[found[2].lower()]
    if not 0 < value < 1e30:
        raise ConfigError(f"{where} must be positive and below 1e30, got {text!r}")
    return value


def parse_count(text: str, where: str) -> int:
    """Read a whole number such as 90M."""
    value = parse_number(text, COUNTS, where, "14541 or 90M")
    if value != int(value) or value >= 2**53:
        raise ConfigError(f"{where} must be a whole number below 2^53, got {text!r}")
    return int(value)


def size_text(num_bytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            whole = unit == "bytes" or num_bytes >= 100
            return f"{num_bytes:.0f} {unit}" if whole else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def time_text(seconds: float) -> str:
    """Write a duration for people."""
    for unit, length in (("days", DAY), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
