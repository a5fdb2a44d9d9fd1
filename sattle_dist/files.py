"""Writing a result file: whole or not at all, and refused before any work where it cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sattle_dist.config import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place beside a file to write it to; it takes the file's name when it is whole.

    A link, a pipe or a device is no file to be replaced: it is written through.
    """
    if is_written_through(path):
        yield path
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def is_written_through(path: Path) -> bool:
    """Tell whether a path leads to something that must not be replaced by a file."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def require_writable(path: Path, option: str) -> None:
    """Raise UserError, before any work is done, where a result could not be written to this file."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        if is_written_through(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "it is not writable")
            return
        probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror or error}); choose another file") from None
