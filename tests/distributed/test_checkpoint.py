"""Checkpoints: any number of processes reads what any other wrote, a resumed run is the uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sattle_dist import checkpoint, storage
from sattle_dist.collectives import Group
from sattle_dist.config import Config
from sattle_dist.graph import Graph
from sattle_dist.run import open_run
from sattle_dist.stopping import Interrupted
from sattle_dist.storage import CheckpointError, DamagedCheckpoint
from sattle_dist.trainer import Trainer, TrainingError
from tests.distributed.test_step import make_config, near
from tests.graphs import random_splits, write_graph
from tests.processes import run_processes

CPU = torch.device("cpu")
N, R = 131, 3
EPOCHS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = random_splits(1, num_entities=N, num_relations=R, num_triples=200)
    return write_graph(tmp_path_factory.mktemp("g") / "g", splits, num_entities=N, num_relations=R)


def config_for(epochs: int = EPOCHS, **more: Any) -> Config:
    settings = {"schedule": "constant", "eval_every": 0, "save_every": 2, **more}
    return make_config("softmax", "twomult", epochs=epochs, **settings)


def make_trainer(group: Group, path: Path, run_dir: Path, config: Config) -> Trainer:
    if group.rank == 0:
        run_dir.mkdir(exist_ok=True)
    group.barrier()
    return Trainer(config, Graph.open(path), run_dir, group, CPU)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Give every number that a run ends with, on this rank; times left out."""
    tensors = checkpoint.local_tensors(trainer.learner, with_optimizer=True)
    history = [{k: v for k, v in record.items() if "second" not in k} for record in trainer.history]
    return {"history": history, **{name: tensor.clone() for name, tensor in tensors.items()}}


def train(group: Group, path: Path, run_dir: Path, epochs: int = EPOCHS, **more: Any) -> dict[str, Any]:
    trainer = make_trainer(group, path, run_dir, config_for(epochs, **more))
    first = (trainer.epoch, trainer.step)
    trainer.run()
    return {"first": first, **state_of(trainer)}


def train_and_stop(group: Group, path: Path, run_dir: Path, after: int, **more: Any) -> str:
    """Train until the last rank alone is told to stop, at its `after`-th step from here; give what was said."""
    trainer = make_trainer(group, path, run_dir, config_for(**more))
    begun: list[int] = []
    trainer.on_step = lambda epoch, step: begun.append(step)
    is_told = group.rank == group.world_size - 1
    trainer.asked_to_stop = lambda: signal.SIGTERM if is_told and len(begun) >= after else 0
    with pytest.raises(Interrupted) as caught:
        trainer.run()
    assert caught.value.exit_code == 143
    return str(caught.value)


def train_with_stops(group: Group, path: Path, run_dir: Path, afters: list[int], **more: Any) -> dict[str, Any]:
    said = [train_and_stop(group, path, run_dir, after, **more) for after in afters]
    return {"said": said, **train(group, path, run_dir, **more)}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    names = [name for name in a if name not in ("first", "said", "history")]
    return all(torch.equal(a[name], b[name]) for name in names) and a["history"] == b["history"]


def test_an_interrupted_run_ends_as_the_uninterrupted_one(path: Path, tmp_path: Path) -> None:
    """Bit for bit at the same number of processes, wherever it was stopped; within rounding at another."""
    whole = run_processes(2, train, path, tmp_path / "whole")
    # 17 steps an epoch; after steps 1, 11 and 17 the ranks confer.
    parts = run_processes(2, train_with_stops, path, tmp_path / "parts", [5, 5, 25, 1, 9])
    for a, b in zip(whole, parts, strict=True):
        assert equal(a, b)
    names = [Path(text.split()[-1]).name for text in parts[0]["said"]]
    assert names[:2] == ["epoch-00000-step-0000011", "epoch-00000-step-0000017"]  # the latter before its evaluation
    assert len(set(names)) == 5
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]

    run_processes(1, train_and_stop, path, tmp_path / "moved", 5)
    run_processes(3, train_and_stop, path, tmp_path / "moved", 25)
    moved = run_processes(2, train, path, tmp_path / "moved")
    for a, b in zip(whole, moved, strict=True):
        assert b["first"] == (2, 11)
        for name in ("table.rows", "table.bias", "model.relations", "optimizer.table.rows.exp_avg_sq"):
            near(b[name], a[name], name)
        assert [r["loss"] for r in b["history"]] == pytest.approx([r["loss"] for r in a["history"]], rel=1e-5)


def test_an_empty_shard_is_saved_and_loaded(tmp_path: Path) -> None:
    """5 entities over 4 processes: the last has no rows, and evaluates with the others."""
    splits = {"train": [(0, 0, 1), (1, 0, 2), (3, 0, 4), (4, 0, 0)], "valid": [(2, 0, 3)], "test": [(1, 0, 4)]}
    path = write_graph(tmp_path / "g", splits, num_entities=5, num_relations=1)
    trained = run_processes(4, train, path, tmp_path / "run", 2)
    resumed = run_processes(1, train, path, tmp_path / "run", 2)[0]
    assert resumed["first"] == (2, 0)
    assert torch.equal(torch.cat([r["table.rows"] for r in trained]), resumed["table.rows"])


@pytest.fixture(scope="module")
def run(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of 2 processes, 8 epochs, evaluated every epoch; and what it ended with."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    more = {"eval_every": 1, "keep": 1, "saving": "blocking", "learning_rate": 0.03}
    return run_dir, run_processes(2, train_and_look, path, run_dir, more)


def train_and_look(group: Group, path: Path, run_dir: Path, more: dict[str, Any]) -> dict[str, Any]:
    trainer = make_trainer(group, path, run_dir, config_for(8, **more))
    trainer.train()
    ended = state_of(trainer)
    trainer.test()
    return {"tested": trainer.learner.table.rows.detach().clone(), **ended}


def test_few_checkpoints_are_kept_the_best_among_them(
    path: Path, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run_dir, ranks = run
    mrr = [record["valid"]["mrr"] for record in ranks[0]["history"]]
    best = mrr.index(max(mrr)) + 1
    assert best < 8, "the example must have its best epoch before its last"
    kept = {file.name for file in (run_dir / "checkpoints").iterdir()}
    assert kept == {f"epoch-{best:05d}", "epoch-00008", "best", "latest"}
    assert os.readlink(run_dir / "checkpoints" / "best") == f"epoch-{best:05d}"
    assert os.readlink(run_dir / "checkpoints" / "latest") == "epoch-00008"
    # Test was evaluated with the best weights, not the last.
    rows = read_whole(run_dir / "checkpoints" / "best")["table.rows"]
    assert np.array_equal(np.concatenate([rank["tested"].numpy() for rank in ranks]), rows)
    last = read_whole(run_dir / "checkpoints" / "latest")
    assert np.array_equal(np.concatenate([rank["table.rows"].numpy() for rank in ranks]), last["table.rows"])
    assert not np.array_equal(rows, last["table.rows"])


def read_whole(folder: Path) -> dict[str, Any]:
    """Read a checkpoint by the description of the safetensors format, in plain Python."""
    parts: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__")
        for name, tensor in header.items():
            start, stop = (8 + length + place for place in tensor["data_offsets"])
            kind = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}[tensor["dtype"]]
            parts.setdefault(name, []).append(np.frombuffer(content[start:stop], kind).reshape(tensor["shape"]))
    return {name: np.concatenate(found) if found[0].ndim else found[0] for name, found in parts.items()}


def early_stop(group: Group, path: Path, run_dir: Path, more: dict[str, Any]) -> tuple[int, int, int]:
    trained = make_trainer(group, path, run_dir, config_for(8, **more, patience=1))
    trained.run()
    again = make_trainer(group, path, run_dir, config_for(8, **more, patience=1))
    begun: list[int] = []
    again.on_step = lambda epoch, step: begun.append(step)
    again.run()
    return trained.epoch, again.epoch, len([step for step in begun if step >= 0])


def test_training_stops_early(path: Path, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    mrr = [record["valid"]["mrr"] for record in run[1][0]["history"]]
    first_worse = next(i for i in range(1, 8) if mrr[i] <= max(mrr[:i])) + 1
    more = {"eval_every": 1, "learning_rate": 0.03}
    stopped = run_processes(2, early_stop, path, tmp_path / "run", more)
    assert stopped == [(first_worse, first_worse, 0)] * 2  # and it stays stopped when it is started again


def damage_everything(group: Group, path: Path, folder: Path, work: Path, number: int) -> list[str]:
    """Flip a bit or cut the end off a random file, many times; give what loading says each time."""
    rng = random.Random(7)
    trainer = make_trainer(group, path, work / "x", config_for())
    before = {name: t.clone() for name, t in checkpoint.local_tensors(trainer.learner, with_optimizer=True).items()}
    said = []
    for _ in range(number):
        file = work / "c" / rng.choice(sorted(file.name for file in folder.iterdir()))
        shutil.rmtree(work / "c", ignore_errors=True)
        shutil.copytree(folder, work / "c")
        content = bytearray(file.read_bytes())
        if rng.random() < 0.5:
            content = content[: rng.randrange(len(content))]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        try:
            checkpoint.load(trainer.learner, work / "c", with_optimizer=True)
            said.append(f"LOADED with {file.name} damaged")
        except DamagedCheckpoint as error:
            said.append(str(error) if file.name in str(error) else f"{error} does not name {file.name}")
    after = checkpoint.local_tensors(trainer.learner, with_optimizer=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return said


def test_every_flipped_bit_and_lost_byte_is_noticed(
    path: Path, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder = run[0] / "checkpoints" / "epoch-00008"
    (said,) = run_processes(1, damage_everything, path, folder, tmp_path, 200)
    assert len(said) == 200
    wrong = [line for line in said if " is damaged: " not in line or "does not name" in line or "\n" in line]
    assert not wrong
    assert {word for line in said for word in ("checksum", "bytes, not") if word in line} == {"checksum", "bytes, not"}


class Evil:
    """Unpickled, it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def load_foreign(group: Group, path: Path, folder: Path, work: Path) -> list[str]:
    """Load checkpoints that are whole, but not what the run wants or not even checkpoints."""
    trainer = make_trainer(group, path, work / "x", config_for())
    facts = storage.read_facts(folder)
    evil = pickle.dumps(Evil(work / "mark"))

    def put(name: str, content: bytes) -> None:
        (work / "c" / name).write_bytes(content)
        facts["files"][name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        storage.write_state(work / "c", {k: v for k, v in facts.items() if not k.startswith(("format", "crc32"))})

    def missing() -> None:
        (work / "c" / "shard-00002.safetensors").unlink()

    def pickled() -> None:
        put("shard-00002.safetensors", evil)

    def metadata() -> None:  # where torch's own format has a pickle: not even looked at
        (work / "c" / ".metadata").write_bytes(evil)

    def stranger() -> None:
        shutil.copy(work / "c" / "shard-00001.safetensors", work / "c" / "shard-00003.safetensors")

    said = []
    for harm in (missing, pickled, metadata, stranger):
        shutil.rmtree(work / "c", ignore_errors=True)
        shutil.copytree(folder, work / "c")
        harm()
        try:
            checkpoint.load(trainer.learner, work / "c", with_optimizer=True)
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    other = make_trainer(group, path, work / "y", config_for(dim=8))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(other.learner, folder, with_optimizer=True)
    return [*said, str(caught.value)]


def test_foreign_files_are_refused_and_nothing_is_unpickled(
    path: Path, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder = run[0] / "checkpoints" / "epoch-00008"
    assert {file.suffix for file in folder.iterdir()} == {".safetensors", ".json"}
    assert not any(file.read_bytes().startswith((b"PK", b"\x80")) for file in folder.iterdir())
    assert set(read_whole(folder)) >= {"table.rows", "table.bias", "model.relations", "optimizer.table.rows.exp_avg"}
    missing, pickled, metadata, stranger, misfit = run_processes(1, load_foreign, path, folder, tmp_path)[0]
    assert "shard-00002.safetensors is missing" in missing
    assert "cannot be read" in pickled
    assert metadata == "loaded"
    assert "shard-00003.safetensors does not belong to it" in stranger
    assert misfit.startswith(f"{folder} cannot be read: Size mismatch")
    assert not (tmp_path / "mark").exists()
    assert not any("\n" in line for line in (missing, pickled, stranger, misfit))
    with pytest.raises(CheckpointError, match="no run at"):
        checkpoint.latest(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def resume_damaged(group: Group, path: Path, run_dir: Path) -> dict[str, Any]:
    """Train four epochs, damage the last checkpoint, and continue in every way."""
    train(group, path, run_dir)
    two, four = (run_dir / "checkpoints" / name for name in ("epoch-00002", "epoch-00004"))
    if group.rank == 0:
        flip(four / "shard-00002.safetensors")
    group.barrier()
    said = []
    for resume in ("latest", "epoch-00003"):
        with pytest.raises(CheckpointError) as caught:
            make_trainer(group, path, run_dir, config_for(resume=resume))
        said.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        open_latest(group, path, run_dir)
    said.append(str(caught.value))
    again = train(group, path, run_dir)
    if group.rank == 0:
        flip(two / "state.json")
        (four / "state.json").unlink()
    group.barrier()
    with pytest.raises(CheckpointError) as caught:
        make_trainer(group, path, run_dir, config_for())
    return {"said": [*said, str(caught.value)], **again}


def open_latest(group: Group, path: Path, run_dir: Path) -> None:
    if group.rank == 0:
        (run_dir / "config.toml").write_text(f"[run]\ngraph = '{path}'\n")
    group.barrier()
    open_run(run_dir, group, CPU, which="latest")


def warned_on_resuming(group: Group, path: Path, run_dir: Path) -> list[str]:
    """Train in float32; give what is said when the run is taken up in float32, and in bfloat16."""
    train(group, path, run_dir, 1)
    said = []
    for precision in ("float32", "bf16"):
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            make_trainer(group, path, run_dir, config_for(2, precision=precision))
        said.append(stream.getvalue())
    return said


def test_a_run_that_goes_on_in_another_precision_says_so(path: Path, tmp_path: Path) -> None:
    (same, other), (_, from_another_rank) = run_processes(2, warned_on_resuming, path, tmp_path / "run")
    assert same == from_another_rank == ""
    assert "has multiplied in float32 so far and goes on in bf16" in other


def test_a_damaged_checkpoint_is_refused_and_the_one_before_offered_or_taken(path: Path, tmp_path: Path) -> None:
    whole = run_processes(2, train, path, tmp_path / "whole")
    for a, b in zip(whole, run_processes(2, resume_damaged, path, tmp_path / "run"), strict=True):
        strict, unknown, opened, none = b["said"]
        damage = "epoch-00004 is damaged: the checksum of shard-00002.safetensors differs; "
        assert strict.endswith(damage + "`--resume epoch-00002` continues from the one before")
        assert "holds no checkpoint 'epoch-00003'; it holds epoch-00002, epoch-00004" in unknown
        assert opened.endswith(
            damage + "`--checkpoint NAME` of sattle eval, predict, export and report opens another: epoch-00002"
        )
        assert b["first"] == (2, 0)  # auto went back
        assert equal(a, b)
        assert "epoch-00004 is damaged: state.json is missing; no whole checkpoint is left" in none
    assert (tmp_path / "run" / "checkpoints" / "epoch-00004.aside").is_dir()


def take_damaged_best(group: Group, path: Path, run_dir: Path) -> tuple[tuple[str, int], bool, str]:
    """Train four epochs, the second by far the best and then the third; damage the second, and take the best."""
    trainer = make_trainer(group, path, run_dir, config_for(eval_every=1, save_every=1, keep=9))
    trainer.run()
    for record in trainer.history:
        record["valid"]["mrr"] = {2: 0.9, 3: 0.8}.get(record["epoch"], 0.1)
    trainer.epoch = EPOCHS + 1  # the weights at hand are no epoch's
    trainer.learner.table.rows.data.fill_(7)
    if group.rank == 0:
        flip(run_dir / "checkpoints" / "epoch-00002" / "shard-00002.safetensors")
    group.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        taken = trainer._take_best()
    rows = trainer.learner.table.rows.detach().clone()
    checkpoint.load(trainer.learner, run_dir / "checkpoints" / "epoch-00003", with_optimizer=False)
    return taken, torch.equal(rows, trainer.learner.table.rows), stream.getvalue()


def test_a_damaged_best_checkpoint_leaves_the_next_best_to_be_tested(path: Path, tmp_path: Path) -> None:
    for rank, (taken, same, warned) in enumerate(run_processes(2, take_damaged_best, path, tmp_path / "run")):
        assert taken == ("epoch-00003", 3)
        assert same
        assert rank or "epoch-00002 is damaged: the checksum of shard-00002.safetensors differs; it is set " in warned
    assert (tmp_path / "run" / "checkpoints" / "epoch-00002.aside").is_dir()
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == Path("epoch-00003")


def open_while_it_trains(group: Group, path: Path, run_dir: Path, step: str) -> tuple[bool, str]:
    """Open the newest checkpoint, which is removed before a step of that."""
    make_trainer(group, path, run_dir, config_for(save_every=1, keep=9)).run()
    function, folder = getattr(checkpoint, step), run_dir / "checkpoints"

    def removed_before(*arguments: Any, **more: Any) -> Any:
        if group.rank == 0 and (folder / "epoch-00004").exists():
            shutil.rmtree(folder / "epoch-00004")
        group.barrier()
        return function(*arguments, **more)

    if group.rank == 0:
        (run_dir / "config.toml").write_text(f"[run]\ngraph = '{path}'\n")
    group.barrier()
    with mock.patch.object(checkpoint, step, removed_before), contextlib.redirect_stderr(io.StringIO()) as stream:
        opened, _, _ = open_run(run_dir, group, CPU, which="latest")
    rows = opened.table.rows.detach().clone()
    checkpoint.load(opened, folder / "epoch-00003", with_optimizer=False)
    return torch.equal(rows, opened.table.rows), stream.getvalue()


@pytest.mark.parametrize("step", ["verify", "load"])
def test_a_checkpoint_that_training_removes_meanwhile_gives_way_to_the_next(
    step: str, path: Path, tmp_path: Path
) -> None:
    assert run_processes(2, open_while_it_trains, path, tmp_path / "run", step) == [(True, "")] * 2


def train_on_full_disk(group: Group, path: Path, run_dir: Path) -> tuple[str, int, str]:
    """Write errors on one rank while epochs 3 and 4 are trained: files may not grow beyond a few bytes there."""
    trainer = make_trainer(group, path, run_dir, config_for(save_every=1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(epoch: int, step: int) -> None:
        if epoch == 2 and step == 0:
            trainer.saver.wait()
            if group.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

    trainer.on_step = fill
    warned = io.StringIO()
    with pytest.raises(TrainingError) as caught, contextlib.redirect_stderr(warned):
        trainer.run()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value), len(trainer.history), warned.getvalue()


def test_a_full_disk_costs_nothing_but_the_checkpoints_it_refused(path: Path, tmp_path: Path) -> None:
    for rank, (said, epochs, warned) in enumerate(run_processes(2, train_on_full_disk, path, tmp_path / "run")):
        assert epochs == 4  # training went on
        assert said.startswith("epoch-00004 could not be written: [Errno 27] File too large")
        assert said.endswith("the last checkpoint is " + str(tmp_path / "run/checkpoints/epoch-00002"))
        assert len(warned.splitlines()) == (1 if rank == 0 else 0)
        assert rank or "epoch-00003 could not be written: [Errno 27] File too large; training goes on" in warned
    left = {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"epoch-00001", "epoch-00002", "latest"}
    whole = run_processes(2, train, path, tmp_path / "whole")
    resumed = run_processes(2, train, path, tmp_path / "run")
    assert resumed[0]["first"] == (2, 0)
    assert all(equal(a, b) for a, b in zip(whole, resumed, strict=True))


def train_with_poison(group: Group, path: Path, run_dir: Path) -> str:
    """Train two epochs; then a single number of one rank's shard goes bad at epoch 3, step 2."""
    trainer = make_trainer(group, path, run_dir, config_for())
    step = trainer.learner.step

    def poisoned(batch: Any, epoch: int, number: int, rate: float, *, report: bool) -> Any:
        if (epoch, number) == (2, 1) and group.rank == 1:
            trainer.learner.table.bias.data[3] = float("nan")
        return step(batch, epoch, number, rate, report=report)

    trainer.learner.step = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as caught:
        trainer.run()
    return str(caught.value)


def test_a_bad_gradient_stops_every_rank_and_keeps_the_checkpoint(path: Path, tmp_path: Path) -> None:
    for message in run_processes(2, train_with_poison, path, tmp_path / "run"):
        assert "not finite at epoch 3, step 2" in message
        assert "epoch-00002" in message
        assert "--learning-rate" in message
    assert checkpoint.latest(tmp_path / "run").name == "epoch-00002"
