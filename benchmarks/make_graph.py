"""Write a generated graph of any size as lines of triples, for scale tests: streamed, deterministic, power-law degrees.

    python -m benchmarks.make_graph --entities 1e6 --triples 1e8 --out graph.tsv

The file is a function of the options alone: chunk i draws from a generator seeded by (seed, i). Every entity occurs
when there are at least as many triples as entities, because triple i < num_entities has the i-th entity as its source;
all other ends follow a power law (the probability of the entity of popularity rank k falls like k ** -skew).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

CHUNK = 1 << 20
Int64s = npt.NDArray[np.int64]


class Count(click.ParamType[int]):
    """A whole number that may be written 1e8."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not 1 <= number <= 2**31 or number != int(number):
            self.fail(f"{value} is not a whole number from 1 to 2**31", param, ctx)
        return int(number)


def draw_power_law(rng: np.random.Generator, size: int, bound: int, skew: float) -> Int64s:
    """Draw [size] ranks below `bound`, where rank k has a density like (k + 1) ** -skew (0 <= skew < 1)."""
    uniform = rng.random(size)
    return np.minimum((bound * uniform ** (1.0 / (1.0 - skew))).astype(np.int64), bound - 1)


def scramble(ranks: Int64s, bound: int, ratio: float) -> Int64s:
    """Map [0, bound) onto itself one to one, so that popular entities are spread over the labels."""
    multiplier = max(1, int(bound * ratio))
    while math.gcd(multiplier, bound) != 1:
        multiplier += 1
    return ranks * multiplier % bound


def make_chunk(chunk: int, size: int, entities: int, relations: int, seed: int, skew: float) -> list[Int64s]:
    """Draw the sources, relations and targets of one chunk."""
    rng = np.random.default_rng((seed, chunk))
    ordinal = np.arange(chunk * CHUNK, chunk * CHUNK + size, dtype=np.int64)
    sources = np.where(ordinal < entities, ordinal, draw_power_law(rng, size, entities, skew))
    targets = draw_power_law(rng, size, entities, skew)
    predicates = draw_power_law(rng, size, relations, skew)
    # Two ratios, so that the popular sources are not the popular targets.
    return [scramble(sources, entities, 0.6180339887), predicates, scramble(targets, entities, 0.4142135624)]


def lines(triples: list[Int64s]) -> bytes:
    """Render triples as tab-separated lines such as Q17<tab>P3<tab>Q4."""
    source, relation, target = (pc.cast(pa.array(column), pa.string()) for column in triples)
    tail = pc.binary_join_element_wise(relation, target, "\tQ")
    rows = pc.binary_join_element_wise("Q", pc.binary_join_element_wise(source, tail, "\tP"), "\n", "")
    # The rows of one array lie one after the other in its data buffer.
    _, offsets, data = rows.buffers()
    end = np.frombuffer(offsets, np.int32)[len(rows)]
    return memoryview(data)[:end].tobytes()


def generate(entities: int, triples: int, relations: int, seed: int, skew: float) -> Iterator[bytes]:
    """Yield the file in pieces of up to CHUNK lines."""
    for chunk, start in enumerate(range(0, triples, CHUNK)):
        yield lines(make_chunk(chunk, min(CHUNK, triples - start), entities, relations, seed, skew))


def write(sink: BinaryIO, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        sink.write(piece)


@click.command()
@click.option("--entities", type=Count(), required=True, help="Number of entities, such as 1e6.")
@click.option("--triples", type=Count(), required=True, help="Number of lines, such as 1e8.")
@click.option("--relations", type=Count(), default=1000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--skew", type=click.FloatRange(0, 0.95), default=0.6, show_default=True, help="0: all alike.")
@click.option("--out", type=click.Path(path_type=Path, allow_dash=True), default="-", show_default="stdout")
def main(entities: int, triples: int, relations: int, seed: int, skew: float, out: Path) -> None:
    """Write generated triples as tab-separated lines."""
    pieces = generate(entities, triples, relations, seed, skew)
    if str(out) == "-":
        write(sys.stdout.buffer, pieces)
        return
    with out.open("wb") as sink:
        write(sink, pieces)


if __name__ == "__main__":
    main()
