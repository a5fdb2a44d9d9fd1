"""Result files: whole or not at all, and what is no file is written through."""

from __future__ import annotations

from pathlib import Path

import pytest

from sattle_dist.config import UserError
from sattle_dist.files import replacing, require_writable


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")

    def write_half() -> None:
        with replacing(file) as draft:
            draft.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert file.read_text() == "old"
    with replacing(file) as draft:
        draft.write_text("new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "target", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    with replacing(link) as draft:
        draft.write_text("new")
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_devices_are_never_replaced() -> None:
    require_writable(Path("/dev/null"), "--json")
    with replacing(Path("/dev/null")) as draft:
        draft.write_text("gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("place", [".", "missing/result.json"])
def test_an_unwritable_place_is_refused_before_the_work(place: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--json .* cannot be written"):
        require_writable(tmp_path / place, "--json")
