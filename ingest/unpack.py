"""Take named files out of a tar archive whose content nobody vouches for."""

from __future__ import annotations

import shutil
import tarfile
import zlib
from pathlib import Path


def unpack(archive: Path, sizes: dict[str, int], folder: Path) -> str:
    """Write the files of these names and sizes into a new folder; say what is wrong, nothing if all is well.

    Members are found by their last name only and written under that name, so no path of the archive is followed, and
    no more is written than the sizes allow.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    missing = dict(sizes)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                if not member.isfile() or name not in missing:
                    continue
                if member.size != missing.pop(name):
                    return f"{name} has {member.size:,} bytes, expected {sizes[name]:,}"
                content = tar.extractfile(member)
                assert content is not None
                with content, (folder / name).open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        return f"the archive cannot be read: {error}"
    return f"the archive lacks {', '.join(missing)}" if missing else ""
