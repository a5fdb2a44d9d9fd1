"""Configs: layers, bounds, unknown keys, and the TOML that is written back."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sattle_dist.commands.train import resolve_config
from sattle_dist.config import LOCK, Config, ConfigError, load_toml, recipe_names, settings, to_toml


def test_layers_override_each_other(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[model]\ndim = 48\nnum_heads = 3\n[train]\nlearning_rate = 1\n")
    config = resolve_config("families", file, {"num_heads": 5})
    assert config.model.num_heads == 5  # the command line
    assert config.model.dim == 48  # over the file
    assert config.model.dim_key == 16  # over the recipe
    assert config.eval.ties == "random"  # over the defaults
    assert config.train.learning_rate == 1.0
    assert isinstance(config.train.learning_rate, float)


def test_a_run_that_was_moved_or_copied_goes_on_at_its_new_place(tmp_path: Path) -> None:
    """And not where its config.toml says that it began: that may be the original of a copy."""
    file = tmp_path / "config.toml"
    file.write_text("[run]\nout = '/runs/original'\n")
    assert resolve_config(None, file, {}).run.out == "/runs/original"  # a file that is in no run
    (tmp_path / LOCK).touch()
    assert resolve_config(None, file, {}).run.out == str(tmp_path)
    assert resolve_config(None, file, {"out": "new"}).run.out == "new"


def test_written_config_reads_back(tmp_path: Path) -> None:
    config = Config().override({"graph": 'a "b"\\c\n\U0010ffff', "learning_rate": 1e-05, "dim": 7}, "test")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load_toml(file, Config()) == config
    assert len([v for section in tomllib.loads(file.read_text()).values() for v in section]) == len(settings())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\ndimm = 3", r"c.toml: unknown setting 'dimm'; known are decoder, dim,"),
        ("[modell]\ndim = 3", r"c.toml: unknown section \[modell\]; known are model, train, eval, run"),
        ("dim = 3", r"c.toml: dim belongs in the section \[model\]"),
        ("model = 3", r"c.toml: \[model\] must be a table, got 3"),
        ("[model]\ndim = 0", r"c.toml: dim must be at least 1, got 0"),
        ("[model]\ndim = 3.5", r"c.toml: dim must be a whole number, got 3.5"),
        ("[model]\ndim = true", r"c.toml: dim must be a whole number, got True"),
        ("[model]\ndim = '3'", r"c.toml: dim must be a whole number, got '3'"),
        ("[model]\ndropout_input = 1", r"c.toml: dropout_input must be at most 0.99, got 1.0"),
        ("[train]\nlabel_smoothing = 1", r"c.toml: label_smoothing must be less than 1, got 1.0"),
        ("[model]\ndim = 99999999999", r"c.toml: dim must be at most 2147483647, got 99999999999"),
        ("[model]\ndecoder = 'x'", r"c.toml: decoder must be one of twomult, twomult-source, tucker, got 'x'"),
        ("[train]\nlearning_rate = 0", r"c.toml: learning_rate must be greater than 0, got 0.0"),
        ("[train]\nlearning_rate = nan", r"c.toml: learning_rate must be finite, got nan"),
        ("[train]\ndecay_factor = 1.5", r"c.toml: decay_factor must be at most 1, got 1.5"),
        ("[model\n", r"c.toml: "),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_toml(file, Config())
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_toml(tmp_path / "none.toml", Config())
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load_toml(tmp_path / "binary.toml", Config())


def test_every_setting_has_help_and_a_name_of_its_own() -> None:
    names = [declared.name for _, declared in settings()]
    assert len(names) == len(set(names))
    assert all(declared.metadata["help"].endswith((".", "].")) for _, declared in settings())


def test_recipes_are_valid() -> None:
    assert "families" in recipe_names()
    for name in recipe_names():
        assert resolve_config(name, None, {}) != Config()
