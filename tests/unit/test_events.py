"""TensorBoard event files hold the numbers of metrics.jsonl; without TensorBoard the option is refused in one line."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from sattle_dist import events
from sattle_dist.cli import main
from sattle_dist.config import ConfigError

RECORDS = [
    {"epoch": 1, "loss": 2.5, "seconds": 1.0, "name": "no number"},
    {"epoch": 2, "loss": 1.5, "seconds": 1.0, "valid": {"mrr": 0.25}},
]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(events, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sattle-dist\[tensorboard\]'"):
        events.log_epoch(RECORDS[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_numbers_of_a_record() -> None:
    assert list(events.scalars(RECORDS[1])) == [("epoch", 2), ("loss", 1.5), ("seconds", 1), ("valid/mrr", 0.25)]
    assert [name for name, _ in events.scalars(RECORDS[0])] == ["epoch", "loss", "seconds"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the extra `tensorboard`")
def test_events_are_read_back_by_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(events, "_writers", {})
    for record in RECORDS:
        events.log_epoch(record, tmp_path)
    monkeypatch.setattr(events, "_writers", {})  # another process, resumed after epoch 1: it trains epoch 2 again
    events.log_epoch({**RECORDS[1], "loss": 1.75}, tmp_path)
    found = EventAccumulator(str(tmp_path / events.FOLDER))
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == {1: 2.5, 2: 1.75}
    assert [(event.step, event.value) for event in found.Scalars("valid/mrr")][-1] == (2, 0.25)


def test_training_refuses_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "find_spec", lambda name: None)
    arguments = ["train", "--graph", str(tmp_path), "--out", str(tmp_path / "run"), "--tensorboard", "on"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --tensorboard on needs the package tensorboard; install it with")
    assert len(done.stderr.splitlines()) == 1
