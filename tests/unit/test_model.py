"""The shipped model against the plain two-token reference, and its parameter counts against the paper's sizes."""

from __future__ import annotations

import pytest
import torch

from sattle_dist.config import ModelConfig
from sattle_dist.encoder import WeightedBatchNorm
from sattle_dist.model import QueryModel, count_parameters
from sattle_dist.randomness import draw_masks
from tests import reference

CPU = torch.device("cpu")


def test_two_threads_give_the_same_gradients_every_time() -> None:
    """Few relations and more than 32,768 numbers, from where on torch lets threads add up the gradient of x[index]."""
    config = ModelConfig(dim=64, num_heads=2, dim_key=4, dim_value=4, dim_hidden=8)
    model = QueryModel(config, num_relations=2, seed=1).train()
    torch.manual_seed(0)
    source, relation, upstream = torch.randn(2048, 64), torch.randint(4, (2048,)), torch.randn(2048, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = []
    for _ in range(12):
        model.zero_grad()
        model(source, relation, torch.ones(2048, dtype=torch.int64), {}).backward(upstream)
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    torch.set_num_threads(before)
    assert all(torch.equal(grad, found[0][name]) for grads in found for name, grad in grads.items())


@pytest.mark.parametrize("decoder", ["twomult", "twomult-source", "tucker"])
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 7), (4, 33), (64, 5)])
def test_reduced_form_equals_reference(decoder: str, num_heads: int, dim: int) -> None:
    """Outputs and every gradient, with dropout; a query with k targets counts as k rows of the reference."""
    config = ModelConfig(decoder=decoder, dim=dim, num_heads=num_heads, dim_key=6, dim_value=5, dim_hidden=11)
    model = QueryModel(config, num_relations=3, seed=1).double().train()
    torch.manual_seed(0)
    count = torch.tensor([1, 3, 2, 1, 4, 1, 2])
    n = len(count)
    source = torch.randn(n, dim, dtype=torch.float64, requires_grad=True)
    relation = torch.randint(6, (n,))
    masks = {name: m.double() for name, m in draw_masks(model.mask_specs(), 0, n, 5, device=CPU).items()}
    assert set(masks) == {"input", "attention", "output", "hidden"}
    upstream = torch.randn(n, dim, dtype=torch.float64)
    out = model(source, relation, count, masks)
    out.backward(upstream * count[:, None])

    parameters = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    triple = torch.arange(n).repeat_interleave(count)
    plain_source = source.detach().clone().requires_grad_()
    expected = reference.query_vectors(
        parameters, config, plain_source[triple], relation[triple], {k: m[triple] for k, m in masks.items()}
    )
    expected.backward(upstream[triple])

    torch.testing.assert_close(out[triple], expected)
    torch.testing.assert_close(source.grad, plain_source.grad)
    for name, parameter in model.named_parameters():
        if name == "encoder.attention.key.bias":  # cancels in the softmax, so it is not trained
            assert parameter.grad is None
            assert parameters[name].grad.abs().max() < 1e-12
        else:
            torch.testing.assert_close(parameter.grad, parameters[name].grad, msg=lambda m, name=name: f"{name}: {m}")
            assert parameter.grad.abs().max() > 0, name


def test_batch_norm_equals_torch() -> None:
    """With weight 1 it is torch's BatchNorm1d: output, gradients, running statistics, evaluation mode."""
    torch.manual_seed(0)
    ours, theirs = WeightedBatchNorm(5).double(), torch.nn.BatchNorm1d(5).double()
    for step in range(3):
        x = torch.randn(11, 5, dtype=torch.float64) * 3 + 7 + step
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        upstream = torch.randn_like(x)
        out = ours(a, torch.ones(11))
        expected = theirs(b)
        torch.testing.assert_close(out, expected)
        out.backward(upstream)
        expected.backward(upstream)
        torch.testing.assert_close(a.grad, b.grad)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(ours, name).grad, getattr(theirs, name).grad)
    torch.testing.assert_close(ours.eval()(x, torch.ones(11)), theirs.eval()(x))


def test_batch_norm_weighs_by_repetition() -> None:
    """Weight k is the row k times; weight 0 is no row at all."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    weight = torch.tensor([1, 0, 3, 2, 0, 1])
    weighted, repeated = WeightedBatchNorm(4).double(), WeightedBatchNorm(4).double()
    rows = torch.arange(6).repeat_interleave(weight)
    torch.testing.assert_close(weighted(x, weight)[rows], repeated(x[rows], torch.ones(len(rows))))
    torch.testing.assert_close(weighted.running_var, repeated.running_var)


def test_parameter_counts() -> None:
    """The sizes of the paper's models, spelled out from the layers.

    FB15k-237: Q and K 2 x (100 x 2048 + 2048), V 100 x 3200 + 3200, output 3200 x 100 + 100, feed-forward
    100 x 2048 + 2048 + 2048 x 100 + 100, two layer norms and two batch norms 4 x 200, a bias for 14,541 entities.
    WN18RR differs only in d_h = 100 and its entities, so by the same sum it has 1,118,939.
    """
    fb = ModelConfig()
    assert count_parameters(fb, 14_541, 237) == (1_484_085, 1_501_500)
    attention = 2 * (100 * 2048 + 2048) + (100 * 3200 + 3200) + (3200 * 100 + 100)
    wn = ModelConfig(dim_hidden=100)
    nfp = attention + 2 * (100 * 100 + 100) + 4 * 200 + 40_943
    assert nfp == 1_118_939
    assert count_parameters(wn, 40_943, 11) == (nfp, 4_096_500)


def test_count_is_that_of_a_real_model() -> None:
    config = ModelConfig(decoder="tucker", dim=9, num_heads=3, dim_key=4, dim_value=5, dim_hidden=8)
    model = QueryModel(config, num_relations=4, seed=0)
    nfp, efp = count_parameters(config, 20, 4)
    assert sum(p.numel() for p in model.parameters()) == nfp - 20 + efp - 20 * 9
    assert model.relations.shape == (8, 9)
