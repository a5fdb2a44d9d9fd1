"""The counts of the planner against what real models hold, allocate, compute and write."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ingest.families import ensure_family_graph
from sattle_dist import costs
from sattle_dist.calibrate import random_index
from sattle_dist.collectives import Group
from sattle_dist.config import Config, RunConfig
from sattle_dist.costs import Workload
from sattle_dist.data import Batch, Batches
from sattle_dist.evaluator import evaluate
from sattle_dist.graph import Graph, QueryIndex
from sattle_dist.learner import Learner, Teachers
from sattle_dist.memory import memory_peaks, with_setting
from sattle_dist.runtime import joined
from sattle_dist.saver import Saver
from tests.graphs import random_splits, write_graph
from tests.tracing import LiveBytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with joined(RunConfig(threads=1)) as (group, _):
        yield group


def make_work(num_entities: int = 500, **settings: Any) -> Workload:
    small = {"dim": 24, "num_heads": 6, "dim_key": 8, "dim_value": 10, "dim_hidden": 96, "batch_size": 64}
    return Workload(
        config=Config().override({**small, **settings}, "test"),
        num_entities=num_entities,
        num_relations=7,
        num_triples=10_000,
        num_queries=5_000,
        world_size=1,
    )


def start(work: Workload, group: Group) -> tuple[Learner, list[Batch]]:
    """Make the learner of a workload and a few batches, and take one step."""
    learner = Learner(work.config, work.num_entities, work.num_relations, group, CPU)
    size = work.config.train.batch_size
    batches = list(
        Batches(
            random_index(work, 3 * size),
            batch_size=size,
            weigh_by_targets=work.config.train.loss != "kvsall",
            hearsay=work.config.train.hearsay,
            seed=0,
            sharding=learner.sharding,
            group=group,
            device=CPU,
        ).epoch(0)
    )
    learner.step(batches[0], 0, 0, 0.001, report=False)
    return learner, batches


def save(learner: Learner, run_dir: Path, *, background: bool) -> None:
    saver = Saver(learner, run_dir, keep=1, background=background, timeout=1)
    saver.start({"epoch": 1, "step": 0, "history": []})
    assert saver.wait() == ""


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("decoder", ["twomult", "twomult-source", "tucker"])
def test_parameters_and_state_are_those_of_a_real_learner(decoder: str, group: Group) -> None:
    work = make_work(decoder=decoder)
    learner, _ = start(work, group)
    held = {**dict(learner.model.named_parameters(prefix="model")), **dict(learner.table.named_parameters("table"))}
    assert sum(work.parameters) == sum(p.numel() for p in held.values())
    assert work.parameters[1] == learner.table.rows.numel() + learner.model.relations.numel()
    assert work.num_replicated == sum(p.numel() for p in learner.model.parameters())

    trained = dict(learner.named_parameters())
    tensors = [*held.values(), *(p.grad for p in trained.values() if p.grad is not None)]
    tensors += [t for p in trained.values() for t in learner.optimizer.state[p].values() if t.dim()]
    parts = costs.memory_parts(work)
    assert sum(parts[name] for name in costs.STATE) == sum(size(t) for t in tensors)
    assert parts["their gradients"] == sum(size(p.grad) for p in learner.table.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("decoder", "loss", "keeps"),
    [
        ("twomult", "bce", True),
        ("twomult", "softmax", True),
        ("tucker", "filtered", False),
        ("tucker", "kvsall", False),
    ],
)
def test_operations_are_those_of_a_real_step(decoder: str, loss: str, keeps: bool, group: Group) -> None:
    work = make_work(10_000, decoder=decoder, loss=loss, score_memory=0 if keeps else 1)
    assert work.keeps_scores == keeps
    learner, batches = start(work, group)
    with FlopCounterMode(display=False) as counter:
        learner.step(batches[1], 0, 1, 0.001, report=False)
    counted = costs.encoder_flops(work) + costs.score_flops(work)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.01)
    assert costs.encoder_flops(work) == pytest.approx(counter.get_total_flops() - costs.score_flops(work), rel=0.03)


@pytest.mark.parametrize("decoder", ["twomult", "tucker"])
def test_hearsay_is_counted(decoder: str, group: Group) -> None:
    """Over a graph of 64 entities with as many facts of each of their 14 relations, of which one query in 14 asks."""
    plain = replace(make_work(64, decoder=decoder), num_queries=64 * 14)
    work = replace(plain, config=plain.config.override({"hearsay": 1.0}, "test"))
    learner = Learner(work.config, work.num_entities, work.num_relations, group, CPU)
    everything = QueryIndex(
        queries=np.arange(64 * 14),
        offsets=np.arange(64 * 14 + 1),
        targets=np.arange(64 * 14, dtype=np.int32) % 64,
        num_relations_both=14,
    )
    settings: dict[str, Any] = {"batch_size": 64, "weigh_by_targets": True, "seed": 0, "sharding": learner.sharding}
    batches = list(Batches(everything, hearsay=1.0, group=group, device=CPU, **settings).epoch(0))
    for batch in batches[:2]:
        with FlopCounterMode(display=False) as counter:
            learner.step(batch, 0, 0, 0.001, report=False)
        assert counter.get_total_flops() == pytest.approx(costs.encoder_flops(work) + costs.score_flops(work), rel=0.02)
    assert costs.encoder_flops(work) > 1.2 * costs.encoder_flops(plain)


@pytest.mark.parametrize(("loss", "keeps"), [("softmax", True), ("filtered", False)])
def test_a_teacher_is_counted(loss: str, keeps: bool, group: Group) -> None:
    """Memory and operations in a step are those of a real one, with one of another model and a second of the same."""
    plain = make_work(10_000, loss=loss, score_memory=0 if keeps else 1)
    teaching = make_work(10_000, decoder="tucker", dim=40, num_heads=3)
    configs = [teaching.config, plain.config]
    work = replace(plain, teachers=tuple(config.model for config in configs))
    assert work.keeps_scores == keeps
    learner, batches = start(plain, group)
    teachers = [Learner(config, work.num_entities, work.num_relations, group, CPU) for config in configs]
    learner.teachers = Teachers(teachers)
    with FlopCounterMode(display=False) as counter:
        learner.step(batches[1], 0, 1, 0.001, report=False)
    counted = costs.encoder_flops(work) + costs.score_flops(work)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.01)
    assert costs.score_flops(work) > costs.score_flops(plain)
    held = [p for teacher in teachers for p in (*teacher.table.parameters(), *teacher.model.parameters())]
    bucketed = [p for teacher in teachers for p in teacher.model.parameters() if p.requires_grad]
    assert all(t.table.rows.untyped_storage().data_ptr() == learner.teachers.rows.data_ptr() for t in teachers)
    counted_bytes = sum(size(p) for p in held) + sum(size(p) for p in bucketed)
    assert costs.memory_parts(work)["teachers"] == pytest.approx(counted_bytes, rel=0.01)
    assert costs.memory_parts(plain)["teachers"] == 0
    assert costs.score_bytes(work) == size(learner.loss._buffer)


SHAPES: list[dict[str, Any]] = [
    {"dim": 100, "num_heads": 16, "dim_key": 32, "dim_hidden": 64},  # the attention is the largest
    {"dim": 16, "num_heads": 2, "dim_key": 8, "dim_hidden": 2048},  # the feed-forward layer
    {"dim": 64, "num_heads": 4, "dim_key": 8, "dim_hidden": 64},  # with Tucker, the decoder
]


@pytest.mark.parametrize(("decoder", "shape"), list(itertools.product(("twomult", "tucker"), SHAPES)))
def test_activations_are_those_of_a_real_step(decoder: str, shape: dict[str, Any], group: Group) -> None:
    work = make_work(decoder=decoder, batch_size=256, **shape)
    learner, batches = start(work, group)
    with LiveBytes() as live:
        learner.step(batches[1], 0, 1, 0.001, report=False)
    counted = costs.activation_bytes(work) + costs.query_bytes(work)
    assert counted == pytest.approx(live.peak, rel=0.15)


@pytest.mark.parametrize(("loss", "score_memory"), [("bce", 0), ("softmax", 0), ("softmax", 1)])
def test_score_buffer_is_that_of_a_real_step(loss: str, score_memory: int, group: Group) -> None:
    work = make_work(40_000, loss=loss, score_memory=score_memory, dim=4)
    with LiveBytes() as live:  # the first step makes the buffer, the gradients and Adam's state
        start(work, group)
    parts = costs.memory_parts(work)
    counted = sum(parts[name] for name in costs.STATE) + parts["score buffer"] + costs.activation_bytes(work)
    drawn = size(torch.empty(40_000, 4))  # the rows themselves, which numpy draws
    assert counted - drawn == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize("decoder", ["twomult", "tucker"])
def test_evaluation_adds_what_a_real_one_does(decoder: str, tmp_path: Path, group: Group) -> None:
    splits = random_splits(0, num_entities=20_000, num_relations=7, num_triples=12_000)
    graph = Graph.open(write_graph(tmp_path / "g", splits, num_entities=20_000, num_relations=7))
    work = make_work(20_000, decoder=decoder, dim=64, num_heads=16)
    learner, _ = start(work, group)
    with LiveBytes() as live:
        evaluate(learner, graph, "valid", "mean", 0)
    assert costs.evaluation_bytes(work) == pytest.approx(live.peak, rel=0.2)


@pytest.mark.parametrize("ties", ["random", "mean"])
def test_positions_take_the_memory_of_real_ones(ties: str, tmp_path: Path, group: Group) -> None:
    splits = random_splits(0, num_entities=300, num_relations=7, num_triples=60_000)
    graph = Graph.open(write_graph(tmp_path / "g", splits, num_entities=300, num_relations=7))
    work = make_work(300, dim=4, num_heads=1, dim_hidden=4)
    learner, _ = start(work, group)
    evaluate(learner, graph, "valid", ties, 0)
    tracemalloc.start()  # numpy's arrays; torch's tensors are not among them
    evaluate(learner, graph, "train", ties, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    evaluated = replace(work, num_evaluated=graph.num_triples["train"])
    counted = costs.evaluation_bytes(evaluated) - costs.evaluation_bytes(work)
    assert counted == pytest.approx(peak, rel=0.2)
    assert costs.evaluation_bytes(replace(evaluated, cuda=True)) == costs.evaluation_bytes(replace(work, cuda=True))


def test_checkpoint_and_index_are_as_large_as_real_ones(tmp_path: Path, group: Group) -> None:
    work = make_work(3_000, decoder="tucker")
    learner, _ = start(work, group)
    save(learner, tmp_path, background=True)
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("**/*.safetensors"))
    assert costs.checkpoint_bytes(work) == pytest.approx(on_disk, rel=0.03)

    graph = Graph.open(ensure_family_graph())
    files = list((graph.path / "index" / "split=train").iterdir())
    counted = costs.index_bytes(len(graph.index("train")), graph.num_triples["train"])
    assert counted == sum(file.stat().st_size for file in files) - 128 * len(files)  # 128: numpy's header


PEAKS = """
import json, sys
from pathlib import Path
from benchmarks.record import memory
from sattle_dist.config import RunConfig
from sattle_dist.runtime import joined
from tests.unit.test_costs import make_peak_work, save, start
with joined(RunConfig(threads=1)) as (group, _):
    learner, batches = start(make_peak_work(), group)
    for i in (1, 2):
        learner.step(batches[i], 0, i, 0.001, report=False)
        assert learner.gradient_norm().isfinite()
    found = {"training": memory("VmHWM")}
    for how in ("blocking", "background"):
        save(learner, Path(sys.argv[1]), background=how == "background")
        found[how] = memory("VmHWM")
    print(json.dumps(found))
"""


def make_peak_work() -> Workload:
    """The copy for a checkpoint is a fifth of all: more than the error that is allowed."""
    return make_work(200_000, dim=64, num_heads=32, dim_hidden=2048, batch_size=64)


def test_peaks_are_those_of_a_real_process(tmp_path: Path) -> None:
    """Resident memory, as the system counts it, of a process that trains and then saves."""
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    work = make_peak_work()
    assert memory_peaks(work)["training"] == pytest.approx(measured["training"], rel=0.1)
    for how in ("blocking", "background"):
        counted = memory_peaks(with_setting(work, "saving", how))["saving"]
        assert counted == pytest.approx(measured[how], rel=0.1), how


def test_padding_counts() -> None:
    """510 queries on 4 processes are 128 each: whole cache lines of scores."""
    work = replace(make_work(batch_size=510), world_size=4)
    assert (work.num_own, work.num_scored, work.num_rows) == (128, 512, 125)
