"""The authors' published model, trained as their main.py does, to see the beginning of its curve on FB15k-237.

python -m benchmarks.authors CODE --epochs 20 --out runs/authors

CODE is a folder with model.py and utils.py of the code that the paper links to, which is no part of this project. Its
classes make the model; seed, batches, optimizer and schedule are those of its main.py. Without a GPU that would take
hours, so the forward pass is written anew: nothing is computed past the attention for the token that nobody reads, and
the loss goes over the scores in slices. The first batch proves each time that its gradients are those of the authors'
own forward pass and loss. Ranks are counted here, of raw scores, on valid and on test. The training is saved after
every epoch; the same command goes on with it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import record
from benchmarks.file_order import in_batches, read_triples
from ingest.datasets import dataset_folder
from ingest.errors import IngestError

SEED = 2411
DIM, HEADS, DIM_KEY, DIM_VALUE, DIM_HIDDEN = 100, 64, 32, 50, 2048
DROPOUTS = {"dr_enc": 0.4, "dr_mha": 0.3, "dr_pff": 0.2, "dr_sdp": 0.1}
BATCH_SIZE = 2048
LEARNING_RATE, DECAY, DECAY_EVERY = 0.001, 0.995, 2
SMOOTHING = 0.1
EVALUATE_EVERY = 10
SLICE = 512
"""Rows of scores that are in memory at once."""
TOLERANCE = 1e-9
"""How far a gradient may be from the authors', in double precision, relative to its largest entry."""

Encode = Callable[[nn.Module, Tensor], Tensor]
"""`vectors`, compiled or not."""


@click.command()
@click.argument("code", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--epochs", type=int, default=20, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Keeps the state of the training.")
@click.option("--threads", type=int, default=2, show_default=True)
def main(code: Path, epochs: int, out: Path, threads: int) -> None:
    """Train the authors' model in CODE on FB15k-237 and record its MRR by epoch."""
    if missing := [name for name in ("model.py", "utils.py") if not (code / name).exists()]:
        raise click.ClickException(f"{code} has no {missing[0]}; it must hold the code that the paper links to")
    sys.path.insert(0, str(code))
    from model import SAttLE  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    try:
        splits, num_entities, num_relations = read_triples(dataset_folder("FB15k-237"))
    except IngestError as error:
        raise click.ClickException(str(error)) from None
    train = both_directions(splits["train"], num_relations)
    half = len(splits["train"])
    order = in_batches(np.arange(half), half + np.arange(half), BATCH_SIZE // 2)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    sizes = (1, DIM, DIM_KEY, DIM_VALUE, DIM, DIM_HIDDEN, HEADS)
    model = SAttLE(num_entities, num_relations, *sizes, **DROPOUTS, decoder="twomult")
    triples = torch.from_numpy(train[order])
    # Compiled, the steps between the matrix products take one pass each; without a compiler it is only slower.
    encode = torch.compile(vectors, dynamic=False) if shutil.which("g++") else vectors
    compare(model, triples[:BATCH_SIZE], encode)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=DECAY_EVERY, gamma=DECAY)
    saved = out / "state.pt"
    first, curve = load(saved, model, optimizer, schedule)
    known = known_targets(splits.values(), num_relations)
    for epoch in range(first + 1, epochs + 1):
        started = time.monotonic()
        model.train()
        for batch in triples.split(BATCH_SIZE):
            optimizer.zero_grad()
            backward(model, batch, encode)
            optimizer.step()
        schedule.step()
        if epoch % EVALUATE_EVERY == 0:
            for name in ("valid", "test"):
                curve[name][epoch] = mrr(model, both_directions(splits[name], num_relations), known)
        save(saved, model, optimizer, schedule, epoch, curve)
        shown = {name: f"{values[epoch]:.4f}" for name, values in curve.items() if epoch in values}
        click.echo(f"epoch {epoch}/{epochs}  {time.monotonic() - started:.0f} s  {shown or ''}")
    write(curve)


def both_directions(triples: np.ndarray, num_relations: int) -> np.ndarray:
    """Put the inverses after the triples."""
    return np.concatenate([triples, triples[:, ::-1] + [0, num_relations, 0]])


def vectors(model: nn.Module, triples: Tensor) -> Tensor:
    """Encode source and relation into the query vectors [B, D], by the weights and dropouts of the authors' layers."""
    drop_token = model.encoder.dropout
    source = drop_token(model.ent_bn(model.tr_ent_embedding[triples[:, 0]]))
    relation = drop_token(model.rel_bn(model.rel_embedding[triples[:, 1]]))
    (layer,) = model.encoder.layer_stack
    attention, feed = layer.slf_attn, layer.pos_ffn
    heads = (len(triples), attention.n_head, -1)
    query = attention.w_qs(relation).view(heads)
    apart = F.linear(source - relation, attention.w_ks.weight).view(heads)  # of the two keys: their bias cancels
    share = torch.sigmoid((query * apart).sum(-1, keepdim=True) / attention.attention.temperature)  # [B, H, 1]
    drop_share = attention.attention.dropout
    of_source, of_relation = drop_share(share), drop_share(1 - share)
    # The values of a head and what is made of them are one matrix: it is multiplied once, with the mixed tokens.
    value, bias = attention.w_vs.weight.view(heads[1], -1, source.shape[1]), attention.w_vs.bias.view(heads[1], -1)
    out_of = attention.fc.weight.view(source.shape[1], heads[1], -1)
    mixed = of_source * source[:, None] + of_relation * relation[:, None]  # [B, H, D]
    attended = mixed.flatten(1) @ torch.einsum("ohv,hvi->hio", out_of, value).flatten(0, 1) + attention.fc.bias
    attended = attended + (of_source + of_relation)[..., 0] @ torch.einsum("ohv,hv->ho", out_of, bias)
    x = attention.layer_norm(attention.dropout(attended) + relation)
    hidden = F.relu(F.linear(x, feed.w_1.weight.squeeze(2), feed.w_1.bias))
    out: Tensor = feed.layer_norm(feed.dropout(F.linear(hidden, feed.w_2.weight.squeeze(2), feed.w_2.bias)) + x)
    return out


def backward(model: nn.Module, triples: Tensor, encode: Encode) -> None:
    """Leave the gradients of the authors' loss in the parameters."""
    query = encode(model, triples)
    table, bias, target = model.tr_ent_embedding, model.b, triples[:, 2]
    with torch.no_grad():
        # One more column each, so that the products add the bias and its gradient too.
        query_1, table_1 = F.pad(query, (0, 1), value=1.0), torch.cat([table, bias[:, None]], 1)
        of_query, of_table = torch.empty_like(query_1), torch.zeros_like(table_1)
        for first in range(0, len(query), SLICE):
            rows = slice(first, first + SLICE)
            positive = torch.mm(query_1[rows], table_1.T).sigmoid_()
            of_query[rows] = positive @ table_1
            of_table.addmm_(positive.T, query_1[rows])
        # Less the labels: 1 / N for every entity, and most of the rest for the target.
        of_query -= table_1.mean(0) + (1 - SMOOTHING) * table_1[target]
        of_table -= query_1.sum(0) / len(table)
        of_table.index_add_(0, target, query_1, alpha=SMOOTHING - 1)
    scale = 1 / (len(query) * len(table))
    query.backward(of_query[:, :-1] * scale)
    table.grad += of_table[:, :-1] * scale
    bias.grad = of_table[:, -1] * scale


def compare(model: nn.Module, triples: Tensor, encode: Encode) -> None:
    """Hold the gradients of a batch, without dropout, against those of the authors' own forward pass and loss."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    backward(model, triples, encode)
    ours = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    zeros_like = torch.zeros_like
    with mock.patch.object(torch, "zeros_like", lambda x, device: zeros_like(x)):  # they have their labels on a GPU
        loss = model.cal_loss(model(triples), triples)
    loss.backward()
    theirs = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    # The keys' bias adds the same to both logits of a softmax: it changes nothing, and its gradient is rounding.
    theirs = {name: grad for name, grad in theirs.items() if not name.endswith("w_ks.bias")}
    assert ours.keys() == theirs.keys()
    apart = {name: ((ours[name] - grad).abs().max() / grad.abs().max()).item() for name, grad in theirs.items()}
    worst = max(apart, key=apart.__getitem__)
    click.echo(f"gradients as the authors': the worst is {worst}, apart by {apart[worst]:.1e} of its largest entry")
    assert apart[worst] < TOLERANCE
    model.float().zero_grad()
    model.load_state_dict(before)


def known_targets(splits: Any, num_relations: int) -> dict[tuple[int, int], list[int]]:
    """Collect the targets of every query over all splits."""
    known: dict[tuple[int, int], list[int]] = {}
    for source, relation, target in np.concatenate([both_directions(x, num_relations) for x in splits]).tolist():
        known.setdefault((source, relation), []).append(target)
    return known


@torch.no_grad()
def mrr(model: nn.Module, triples: np.ndarray, known: dict[tuple[int, int], list[int]]) -> float:
    """Give the filtered MRR over these triples."""
    model.eval()
    total = 0.0
    for part in torch.from_numpy(triples).split(512):
        scores = torch.addmm(model.b, vectors(model, part), model.tr_ent_embedding.T)
        rows = torch.arange(len(part))
        of_target = scores[rows, part[:, 2]]
        for row, (source, relation) in enumerate(part[:, :2].tolist()):
            scores[row, known[source, relation]] = -torch.inf
        total += (1 / (1 + (scores >= of_target[:, None]).sum(1))).sum().item()
    return total / len(triples)


def save(path: Path, model: nn.Module, optimizer: Any, schedule: Any, epoch: int, curve: dict[str, Any]) -> None:
    """Keep the state after an epoch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    states = [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]
    new = path.with_suffix(".new")
    torch.save((states, torch.get_rng_state(), epoch, curve), new)
    new.replace(path)


def load(path: Path, model: nn.Module, optimizer: Any, schedule: Any) -> tuple[int, dict[str, dict[int, float]]]:
    """Take up what was saved, if anything was; give its epoch and the curve so far."""
    if not path.exists():
        return 0, {"valid": {}, "test": {}}
    states, rng, epoch, curve = torch.load(path)
    for owner, state in zip((model, optimizer, schedule), states, strict=True):
        owner.load_state_dict(state)
    torch.set_rng_state(rng)
    return epoch, curve


def write(curve: dict[str, dict[int, float]]) -> None:
    """Record the curve beside the other results."""
    result = {"seed": SEED, **curve, "stamp": record.stamp()}
    (record.RESULTS / "authors.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
