"""The recipes against the paper's tables, copied here by hand, and what they all have in common."""

from __future__ import annotations

import dataclasses

import pytest

from ingest.datasets import DATASETS
from sattle_dist.commands import train
from sattle_dist.commands.train import resolve_config, with_graph
from sattle_dist.config import recipe_names
from sattle_dist.schedule import learning_rate
from sattle_dist.teacher import names

# dataset, decoder, d, do_enc, do_mha, do_pff, do_sdp, d_h, queries a batch, epochs
PAPER = {
    "fb15k237-twomult-100": ("FB15k-237", "twomult", 100, 0.4, 0.3, 0.2, 0.1, 2048, 563, 1500),
    "fb15k237-twomult-64": ("FB15k-237", "twomult", 64, 0.2, 0.3, 0.2, 0.1, 2048, 563, 1500),
    "fb15k237-twomult-32": ("FB15k-237", "twomult", 32, 0.1, 0.1, 0.1, 0.1, 2048, 563, 1500),
    "fb15k237-tucker-100": ("FB15k-237", "tucker", 100, 0.4, 0.2, 0.3, 0.1, 2048, 563, 1500),
    "fb15k237-tucker-64": ("FB15k-237", "tucker", 64, 0.4, 0.2, 0.2, 0.1, 2048, 563, 1500),
    "fb15k237-tucker-32": ("FB15k-237", "tucker", 32, 0.1, 0.2, 0.1, 0.1, 2048, 563, 1500),
    "wn18rr-twomult-100": ("WN18RR", "twomult", 100, 0.3, 0.4, 0.4, 0.1, 100, 610, 4500),
    "wn18rr-tucker-64": ("WN18RR", "tucker", 64, 0.3, 0.4, 0.4, 0.1, 100, 610, 4500),
    "wn18rr-tucker-32": ("WN18RR", "tucker", 32, 0.1, 0.1, 0.3, 0.4, 100, 610, 4500),
}
# epoch: rate; 0.001 * 0.995 ** (epoch // 2) up to epoch 1050
FB15K237_RATES = {0: 0.001, 1: 0.001, 2: 0.000995, 3: 0.000995, 100: 7.783126e-4, 1050: 7.19643e-5, 1499: 7.19643e-5}


def test_every_row_of_the_paper_has_both_recipes() -> None:
    fast = {f"{name}-fast" for name in PAPER}
    named = set(fast)
    while teachers := {teacher for name in named for teacher in names(resolve_config(name, None, {}))} - named:
        named |= teachers
    assert set(recipe_names()) == {"families", *PAPER, *named}


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_hold_the_papers_settings(name: str) -> None:
    config = resolve_config(name, None, {})
    model, training = config.model, config.train
    assert PAPER[name] == (
        *(config.run.dataset, model.decoder, model.dim),
        *(model.dropout_input, model.dropout_output, model.dropout_hidden, model.dropout_attention),
        *(model.dim_hidden, training.batch_size, training.epochs),
    )
    assert (model.num_heads, model.dim_key, model.dim_value) == (64, 32, 50)
    assert (training.loss, training.label_smoothing) == ("bce", 0.1)
    decays = name.startswith("fb15k237")
    for epoch, rate in FB15K237_RATES.items():
        expected = rate if decays else 0.001
        assert learning_rate(training, epoch, 5, 266) == pytest.approx(expected, rel=1e-4)


def test_batches_hold_as_many_triples_as_the_papers() -> None:
    """149,689 queries stand for twice 272,115 triples, 103,509 for twice 86,835: inverse triples count too."""
    assert round(2048 * 149_689 / (2 * 272_115)) == 563
    assert round(1024 * 103_509 / (2 * 86_835)) == 610


@pytest.mark.parametrize("name", PAPER)
def test_fast_recipes_train_the_papers_model(name: str) -> None:
    paper, fast = resolve_config(name, None, {}), resolve_config(f"{name}-fast", None, {})
    dropouts = {f.name: 0.0 for f in dataclasses.fields(paper.model) if f.name.startswith("dropout")}
    assert dataclasses.replace(fast.model, **dropouts) == dataclasses.replace(paper.model, **dropouts)
    assert fast.run.dataset == paper.run.dataset
    assert fast.train.epochs < paper.train.epochs / 5


def test_a_recipe_brings_its_dataset_unless_a_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "dataset_graph", lambda name, progress: f"/cache/{DATASETS[name].name}.graph")
    run = with_graph(resolve_config("wn18rr-tucker-32", None, {})).run
    assert (run.graph, run.dataset) == ("/cache/WN18RR.graph", "WN18RR")
    run = with_graph(resolve_config("wn18rr-tucker-32", None, {"graph": "my.graph"})).run
    assert (run.graph, run.dataset) == ("my.graph", "")
    run = with_graph(resolve_config(None, None, {"dataset": "FB15k-237"})).run
    assert run.graph == "/cache/FB15k-237.graph"
