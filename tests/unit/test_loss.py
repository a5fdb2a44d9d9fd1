"""The blockwise losses against the dense formula in double precision: the loss and every gradient."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from sattle_dist.dense import dense_loss
from sattle_dist.loss import OneToAllLoss
from sattle_dist.task import ShardTargets, ShardTask, Teacher

CPU = torch.device("cpu")
N, D = 601, 7
NUM_TARGETS = (1, 2, 0, 5, 500, 1, 37, 0, 3)
G = len(NUM_TARGETS)


class OneProcess:
    """Stands for the group of a lone process: nothing to exchange."""

    def all_gather(self, x: torch.Tensor, _: str) -> torch.Tensor:
        return x


def make_task(
    name: str, dtype: torch.dtype, scale: float = 1.0, power: float | None = None
) -> tuple[ShardTask, list[list[int]]]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)  # noqa: E731
    rng = np.random.default_rng(1)
    targets = [sorted(rng.choice(N, k, replace=False).tolist()) for k in NUM_TARGETS]
    weight = torch.tensor([1 if name == "kvsall" else k for k in NUM_TARGETS], dtype=dtype)
    target_weight = None
    if power is not None:
        weight = torch.tensor([k**power if k else 0 for k in NUM_TARGETS], dtype=dtype)
        target_weight = torch.tensor([k**power / k if k else 0 for k in NUM_TARGETS], dtype=dtype)
    pairs = np.array([(i, t) for i, ts in enumerate(targets) for t in ts])
    task = ShardTask(
        query=draw(G, D),
        rows=draw(N, D),
        bias=draw(N),
        targets=ShardTargets.of(pairs[:, 0], pairs[:, 1], num_queries=G, device=CPU),
        query_weight=weight,
        total_weight=float(weight.sum()),
        target_weight=target_weight,
    )
    return task, targets


def run(name: str, task: ShardTask, smoothing: float, budget: int) -> tuple[torch.Tensor, ...]:
    loss = OneToAllLoss(
        name, num_entities=N, smoothing=smoothing, budget=budget, group=OneProcess(), product_dtype=task.rows.dtype
    )
    grad_rows, grad_bias = torch.full_like(task.rows, 7), torch.full_like(task.bias, 7)  # must be overwritten
    value, grad_query = loss(task, grad_rows, grad_bias, report=True)
    silent, silent_grad = loss(task, grad_rows, grad_bias, report=False)
    assert silent is None
    torch.testing.assert_close(silent_grad, grad_query)
    return value, grad_query, grad_rows, grad_bias


def run_dense(
    name: str, task: ShardTask, targets: list[list[int]], smoothing: float, power: float = 1.0
) -> tuple[torch.Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in (task.query, task.rows, task.bias)]
    teacher = None
    if heard := task.teacher:
        scores = heard.query.double() @ heard.rows.double().T + heard.bias.double()
        teacher = (scores, heard.weight)
    value = dense_loss(name, *leaves, targets, smoothing, power, teacher)
    value.backward()
    return value.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("name", ["bce", "kvsall", "softmax", "filtered"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("block", [1, 7, N, N + 100])
def test_equals_dense_formula(name: str, smoothing: float, block: int) -> None:
    """Query target counts from 0 to 500, blocks of one row, of seven, of all rows and of more."""
    task, targets = make_task(name, torch.float64)
    ours = run(name, task, smoothing, budget=block * G * 8)
    for mine, theirs in zip(ours, run_dense(name, task, targets, smoothing), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["bce", "softmax", "filtered"])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_queries_may_weigh_less_than_their_targets_number(name: str, power: float) -> None:
    """Against the mean over triples, each with the weight of its query's power."""
    task, targets = make_task(name, torch.float64, power=power)
    ours = run(name, task, 0.1, budget=7 * G * 8)
    for mine, theirs in zip(ours, run_dense(name, task, targets, 0.1, power), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def taught(task: ShardTask, weight: float, scale: float = 1.0) -> ShardTask:
    """Give the task a teacher of another dim."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=task.rows.dtype) * scale  # noqa: E731
    return dataclasses.replace(
        task, teacher=Teacher(query=draw(G, D + 4), rows=draw(N, D + 4), bias=draw(N), weight=weight)
    )


@pytest.mark.parametrize("name", ["softmax", "filtered"])
@pytest.mark.parametrize("block", [1, 7, N, 2 * N, 2 * N + 100])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_teacher_adds_the_cross_entropy_with_its_softmax(name: str, block: int, power: float) -> None:
    """Against the dense formula; in blocks of one row, of seven, and where both models' scores are kept."""
    plain, targets = make_task(name, torch.float64, power=power)
    task = taught(plain, 0.7)
    ours = run(name, task, 0.1, budget=block * G * 8)
    assert not torch.allclose(ours[1], run(name, plain, 0.1, budget=block * G * 8)[1], rtol=0.1)
    for mine, theirs in zip(ours, run_dense(name, task, targets, 0.1, power), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_a_teacher_with_huge_scores_is_heeded_in_single_precision() -> None:
    plain, targets = make_task("filtered", torch.float32, scale=10.0)
    task = taught(plain, 2.0, scale=30.0)
    for mine, theirs in zip(
        run("filtered", task, 0.0, 1 << 20), run_dense("filtered", task, targets, 0.0), strict=True
    ):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("name", ["bce", "kvsall", "softmax", "filtered"])
@pytest.mark.parametrize("block", [7, N])
def test_single_precision_and_huge_scores(name: str, block: int) -> None:
    """float32 at scores up to about 1e4 in size: finite, and as near to the double result as float32 allows."""
    task, targets = make_task(name, torch.float32, scale=35.0)
    assert (task.query @ task.rows.T + task.bias).abs().max() > 9000
    ours = run(name, task, 0.1, budget=block * G * 4)
    for mine, theirs in zip(ours, run_dense(name, task, targets, 0.1), strict=True):
        assert mine.isfinite().all()
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("with_teacher", [False, True])
def test_a_query_with_every_entity_as_a_target_is_passed_over(
    with_teacher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left for its targets to win against; the other queries are as they would be without it."""
    teach = (lambda task: taught(task, 0.5)) if with_teacher else lambda task: task
    monkeypatch.setattr("tests.unit.test_loss.NUM_TARGETS", (*NUM_TARGETS[:-1], N))
    full = teach(make_task("filtered", torch.float32, power=0.0)[0])
    ours = run("filtered", full, 0.1, budget=1 << 20)
    monkeypatch.setattr("tests.unit.test_loss.NUM_TARGETS", (*NUM_TARGETS[:-1], 0))
    task, targets = make_task("filtered", torch.float32, power=0.0)
    task = teach(task)
    share = task.total_weight / full.total_weight
    for mine, theirs in zip(ours, run_dense("filtered", task, targets, 0.1, 0.0), strict=True):
        torch.testing.assert_close(mine.double(), theirs * share, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["bce", "softmax", "filtered"])
def test_rounded_products_stay_near(name: str) -> None:
    """bfloat16 factors: within their three digits of the double result."""
    task, targets = make_task(name, torch.float32)
    loss = OneToAllLoss(
        name, num_entities=N, smoothing=0.1, budget=1 << 20, group=OneProcess(), product_dtype=torch.bfloat16
    )
    grad_rows, grad_bias = torch.empty_like(task.rows), torch.empty_like(task.bias)
    value, grad_query = loss(task, grad_rows, grad_bias, report=True)
    expected = run_dense(name, task, targets, 0.1)
    for mine, theirs in zip((value, grad_query, grad_rows, grad_bias), expected, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < 0.02


def test_many_targets_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    task, targets = make_task("bce", torch.float64)
    monkeypatch.setattr("sattle_dist.task.TARGETS_AT_ONCE", 10)
    for mine, theirs in zip(run("bce", task, 0.0, 1 << 20), run_dense("bce", task, targets, 0.0), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_repeated_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="same target twice"):
        ShardTargets.of(np.array([0, 1, 0]), np.array([5, 5, 5]), num_queries=2, device=CPU)


@pytest.mark.parametrize("name", ["bce", "kvsall", "softmax", "filtered"])
def test_small_blocks_of_a_kept_buffer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores fit the budget, but the cache holds only some rows at a time."""
    task, targets = make_task(name, torch.float64)
    monkeypatch.setattr("sattle_dist.loss.CACHE_BYTES", 13 * G * 8)
    for mine, theirs in zip(run(name, task, 0.1, 1 << 20), run_dense(name, task, targets, 0.1), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_the_score_buffer_keeps_to_its_budget() -> None:
    task, _ = make_task("bce", torch.float32)
    loss = OneToAllLoss("bce", num_entities=N, smoothing=0.1, budget=1000, group=OneProcess())
    loss(task, torch.empty_like(task.rows), torch.empty_like(task.bias), report=False)
    assert 0 < loss._buffer.numel() * 4 <= 1000
    loss = OneToAllLoss("softmax", num_entities=N, smoothing=0.1, budget=1000, group=OneProcess())
    loss(taught(task, 1.0), torch.empty_like(task.rows), torch.empty_like(task.bias), report=True)
    assert 0 < loss._buffer.numel() * 4 <= 1000
