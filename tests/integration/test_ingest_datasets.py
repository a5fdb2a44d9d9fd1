"""The published benchmarks, when SATTLE_DATA holds them: exact counts, and no dependence on the order of lines."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from ingest import IngestOptions, ingest_triples
from tests.ingest_reference import labels, manifest

FACTS = {
    "FB15k-237": (14541, 237, 272115, 17535, 20466, 149689),
    "WN18RR": (40943, 11, 86835, 3034, 3134, 103509),
}
UNSEEN = {"FB15k-237": 36, "WN18RR": 384}


def dataset(name):
    root = os.environ.get("SATTLE_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"SATTLE_DATA names no folder with {name}")
    return Path(root) / name


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Ingest a dataset once, as published."""
    made = {}

    def make(name):
        if name not in made:
            out = tmp_path_factory.mktemp("graphs") / name
            ingest_triples([dataset(name)], options=IngestOptions(out=out))
            made[name] = out
        return made[name]

    return make


@pytest.mark.parametrize("name", FACTS)
def test_counts_are_those_of_the_paper(name, graphs):
    graph = graphs(name)
    said = manifest(graph)
    entities, relations, train, valid, test, queries = FACTS[name]
    assert (said["num_entities"], said["num_relations"]) == (entities, relations)
    assert [said["splits"][split]["triples"] for split in ("train", "valid", "test")] == [train, valid, test]
    assert said["splits"]["train"]["queries"] == queries
    assert len(np.load(graph / "index/split=train/queries.npy", mmap_mode="r")) == queries
    assert said["lines"] == {
        "read": train + valid + test,
        "kept": train + valid + test,
        "duplicates": 0,
        "rejected": 0,
        "blank": 0,
        "comments": 0,
        "headers": 0,
    }


@pytest.mark.parametrize("name", FACTS)
def test_ids_are_the_order_of_sorted_labels(name, graphs):
    lines = [line.split(b"\t") for file in dataset(name).glob("*.txt") for line in file.read_bytes().splitlines()]
    entities = sorted({line[0] for line in lines} | {line[2] for line in lines})
    relations = sorted({line[1] for line in lines})
    assert [label.encode() for label in labels(graphs(name), "entities")] == entities
    assert [label.encode() for label in labels(graphs(name), "relations")] == relations


@pytest.mark.parametrize("name", FACTS)
def test_any_order_of_lines_gives_the_same_graph(name, graphs, tmp_path):
    rng = random.Random(11)
    shuffled = tmp_path / "shuffled"
    shuffled.mkdir()
    for file in sorted(dataset(name).glob("*.txt")):
        lines = file.read_bytes().splitlines(keepends=True)
        rng.shuffle(lines)
        (shuffled / file.name).write_bytes(b"".join(lines))
    ingest_triples([shuffled], options=IngestOptions(out=tmp_path / "graph", threads=1))
    before, after = manifest(graphs(name)), manifest(tmp_path / "graph")
    assert after["checksum"] == before["checksum"]
    assert after["files"] == before["files"], "every file is the same, byte for byte"


@pytest.mark.parametrize("name", FACTS)
def test_a_hash_split_does_not_depend_on_order_threads_or_memory(name, tmp_path):
    lines = b"".join(file.read_bytes() for file in sorted(dataset(name).glob("*.txt"))).splitlines(keepends=True)
    manifests = []
    for i, (threads, memory) in enumerate([(1, 1 << 30), (2, 200 << 20)]):
        random.Random(i).shuffle(lines)
        file = tmp_path / f"all-{i}.tsv"
        file.write_bytes(b"".join(lines))
        options = IngestOptions(out=tmp_path / f"graph-{i}", threads=threads, memory_limit=memory, seed=3)
        manifests.append(ingest_triples([file], options=options).manifest)
    assert manifests[0]["checksum"] == manifests[1]["checksum"]
    assert manifests[0]["split"] == manifests[1]["split"]
    assert abs(manifests[0]["splits"]["valid"]["triples"] / len(lines) - 0.05) < 0.01
