"""Put a finished directory in its place at once, and leave nothing behind when that does not come about.

A directory under work is named `.NAME.ingest-RANDOM`, beside the place it is meant for, and holds a lock as long as its
process lives. One whose lock is free was left by a killed process, and the next ingest removes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingest.errors import IngestError

_LOCK = ".lock"
GRAPH_ENTRIES = {"manifest.json", "entities.parquet", "relations.parquet", "triples", "index", "rejects.parquet", _LOCK}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_YOUNG_SECONDS = 60


@contextmanager
def working_directory(beside: Path) -> Iterator[Path]:
    """Make a locked directory beside a path and remove what is left of it at the end; sweep those of dead processes."""
    parent, prefix = beside.parent, f".{beside.name}.ingest-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, prefix)
        work, lock = _make_locked(parent, prefix)
    except OSError as error:
        raise IngestError(f"cannot write to {parent}: {error.strerror}") from None
    try:
        yield work
    finally:
        _remove(work)
        os.close(lock)


def _remove(work: Path) -> None:
    """Remove a working directory so that a process killed at it leaves nothing that looks better than it is.

    Manifests go first: a graph half removed does not open as one. The lock goes last: by it the next ingest finds
    the rest.
    """
    entries = [entry for entry in work.iterdir() if not entry.is_symlink()]  # what a link points to is not ours
    for entry in entries:
        if entry.is_dir():
            (entry / "manifest.json").unlink(missing_ok=True)
    for entry in entries:
        if entry.name != _LOCK:
            shutil.rmtree(entry, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a directory with a lock that this process holds."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(work / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return work, lock
        # Another process swept the directory between the making of the file and the locking.
        os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the working directories that killed processes left."""
    for left in parent.iterdir():
        if not left.name.startswith(prefix) or not left.is_dir():
            continue
        try:
            lock = os.open(left / _LOCK, os.O_RDWR)
        except OSError:
            # Its process is just beginning, or another one is removing it, or it was killed before it had a lock.
            if time.time() - left.stat().st_mtime > _YOUNG_SECONDS:
                _remove(left)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)
        except OSError:
            pass  # alive
        finally:
            os.close(lock)


def check_place(out: Path, replace: bool) -> None:
    """Raise IngestError where `out` is taken, before any work is done."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise IngestError(f"{out} exists and is not a directory; choose another --out")
    if not any(out.iterdir()):
        return
    if not (out / "manifest.json").is_file():
        raise IngestError(f"{out} exists and is not a graph; choose another --out")
    if foreign := sorted({entry.name for entry in out.iterdir()} - GRAPH_ENTRIES):
        raise IngestError(
            f"{out} holds {foreign[0]}, which is no part of a graph and would be lost; choose another --out"
        )
    if not replace:
        raise IngestError(f"{out} exists; --force replaces it, --out names another place")


def put_in_place(graph: Path, out: Path, replace: bool) -> None:
    """Rename a finished graph to `out`, exchanging it with the old one where `replace` allows."""
    check_place(out, replace)
    try:
        os.rename(graph, out)
    except OSError:
        if not replace:
            raise IngestError(f"{out} appeared meanwhile; --force replaces it") from None
        exchange(graph, out)
    _sync_directory(out.parent)


def exchange(graph: Path, out: Path) -> None:
    """Swap two directories, at one stroke where the system can; the old graph is left at `graph`."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        old, new = os.fsencode(graph), os.fsencode(out)
        if renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE) == 0:
            return
    aside = graph.with_name(graph.name + ".old")
    os.rename(out, aside)
    os.rename(graph, out)
    os.rename(aside, graph)


def sync(graph: Path) -> None:
    """Make sure that the files are on disk before the name is."""
    for folder, _, files in os.walk(graph):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        _sync_directory(Path(folder))


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
