"""The user's cache folder, and whether a graph in it is whole."""

from __future__ import annotations

import os
from pathlib import Path

from ingest.errors import IngestError

CACHE_VARIABLE = "SATTLE_CACHE"
"""Environment variable with the folder to use in place of the user's cache folder."""


def cache_folder() -> Path:
    """Find the cache folder; empty variables count as unset, and so does a relative XDG_CACHE_HOME (its standard)."""
    own, xdg = os.environ.get(CACHE_VARIABLE, ""), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own).absolute()
    if os.path.isabs(xdg):
        return Path(xdg) / "sattle-dist"
    try:
        return Path.home() / ".cache" / "sattle-dist"
    except RuntimeError:
        raise IngestError(f"this user has no home folder to cache in; set {CACHE_VARIABLE} to a folder") from None


def is_graph(graph: Path) -> bool:
    """Tell whether a whole graph is at this place."""
    try:
        return (graph / "manifest.json").is_file()  # written last, so the graph is whole
    except OSError:
        return False  # a folder that may not be entered; making the graph will say so
