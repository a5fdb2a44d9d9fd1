"""Benchmarks by name: their files from a folder that holds them, from the cache, or downloaded, and always verified.

    sattle-ingest --dataset FB15k-237                       # -> FB15k-237.graph
    sattle-ingest --dataset WN18RR --data-dir ~/datasets    # from ~/datasets/WN18RR/{train,valid,test}.txt

A folder is looked for in this order: --data-dir, SATTLE_DATA, the cache folder. What is found nowhere is downloaded
into the cache. Whatever its way, a file is used only if it has the published checksum.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ingest.build import Progress, ingest_triples
from ingest.cache import CACHE_VARIABLE, cache_folder, is_graph
from ingest.download import DownloadError, fetch
from ingest.errors import IngestError
from ingest.options import IngestOptions
from ingest.unpack import unpack

DATA_VARIABLE = "SATTLE_DATA"
"""Environment variable with a folder that holds datasets, each in a folder of its name."""

ADDRESS_VARIABLE = "SATTLE_DATA_URL"
"""Environment variable with the address of a mirror that has NAME.tar.gz."""

PUBLISHED_AT = "https://raw.githubusercontent.com/TimDettmers/ConvE/master"
"""Where the authors of ConvE publish both datasets, as NAME.tar.gz."""

GRAPH_VERSION = 1
"""Names the cached graphs: raise it when the graph format changes."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A published benchmark: its name, and the size and SHA-256 of each of its files."""

    name: str
    files: dict[str, tuple[int, str]]

    def address(self) -> str:
        """Say where the archive is, on the mirror that the environment names if it names one."""
        return f"{(os.environ.get(ADDRESS_VARIABLE) or PUBLISHED_AT).rstrip('/')}/{self.name}.tar.gz"

    def problem_in(self, folder: Path) -> str:
        """Say what is wrong with the files in this folder; nothing if they are the published ones."""
        for name, (_, checksum) in self.files.items():
            path = folder / name
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                return f"{path}: {error.strerror}"
            if found != checksum:
                return f"{path} is not the published file: its SHA-256 is {found}, expected {checksum}"
        return ""


DATASETS = {
    "FB15k-237": Dataset(
        name="FB15k-237",
        files={
            "train.txt": (21277292, "6e4c2782169af21e9743f3b1d200886f5d595bf6bc504ec1351720949c5cdfae"),
            "valid.txt": (1303101, "cf6309010852f6a8d47a45df830a426415d1ee6f7a3970a8376ff1fb81db4a5c"),
            "test.txt": (1519499, "5711cf41623ceb4eacc50eb6108a3ca6565c7492e3caaf82a3e355cc660d1574"),
        },
    ),
    "WN18RR": Dataset(
        name="WN18RR",
        files={
            "train.txt": (3135377, "038612e783c215ee5f3ca9fbfca27b8d0739be1028fe4ee7c174aecf0b83d5df"),
            "valid.txt": (110415, "453ce7202afa58094a04d2b1560ee2b02660f1c260b32ce6651c8ccedd1028ab"),
            "test.txt": (113180, "0383bceaaa1096cf3c03ec021ed0048068e2355dbfc0239b292cefdac821cec5"),
        },
    ),
}


def dataset_folder(name: str, data_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Give a folder with the verified files of a dataset, downloading them into the cache if need be.

    Several processes may call this at once: one downloads, the others wait for it.
    """
    dataset = find_dataset(name)
    if given := _given_folder(dataset, data_dir):
        return given
    folder = cache_folder() / "datasets" / dataset.name
    with _locked(folder):
        if not folder.exists():
            _download(dataset, folder, progress or (lambda stage, count: None))
        elif problem := dataset.problem_in(folder):
            raise IngestError(f"the cache is damaged: {problem}; delete {folder} to download it again")
    return folder


def dataset_graph(name: str, progress: Progress | None = None) -> Path:
    """Give the graph of a dataset in the cache folder, ingesting it first where it is not there yet."""
    dataset = find_dataset(name)
    graph = cache_folder() / f"{dataset.name}-v{GRAPH_VERSION}.graph"
    if is_graph(graph):
        return graph
    with _locked(graph):
        if not is_graph(graph):  # otherwise another process was first
            folder = dataset_folder(name, progress=progress)
            ingest_triples([folder], options=IngestOptions(out=graph, name=dataset.name), progress=progress)
    return graph


def find_dataset(name: str) -> Dataset:
    """Find a dataset by its name, in whatever case it is written."""
    for known, dataset in DATASETS.items():
        if known.lower() == name.lower():
            return dataset
    raise IngestError(f"no dataset is called {name!r}; known are {', '.join(DATASETS)}")


def _given_folder(dataset: Dataset, data_dir: Path | None) -> Path | None:
    """Look where the user says the files are; a folder named by an option must have them."""
    if data_dir is not None:
        place, of = data_dir, "--data-dir"
    elif variable := os.environ.get(DATA_VARIABLE):
        place, of = Path(variable), DATA_VARIABLE
    else:
        return None
    folder = place / dataset.name
    if not folder.is_dir():
        if of == DATA_VARIABLE:
            return None
        raise IngestError(f"{of} {place} holds no folder {dataset.name} with {_listed(dataset)}")
    if problem := dataset.problem_in(folder):
        raise IngestError(f"{of}: {problem}. Put the published file there, or name another folder")
    return folder


def _download(dataset: Dataset, folder: Path, progress: Progress) -> None:
    """Download, unpack and verify beside the folder, then put it in place whole."""
    archive = folder.with_name(f"{dataset.name}.tar.gz")
    address = dataset.address()
    sizes = {name: size for name, (size, _) in dataset.files.items()}
    for last_try in (False, True):
        try:
            resumed = fetch(address, archive, lambda done: progress("download", done))
        except DownloadError as error:
            raise IngestError(offline_help(dataset, address, str(error))) from None
        problem = unpack(archive, sizes, beside := folder.with_name(f"{dataset.name}.unpacked"))
        problem = problem or dataset.problem_in(beside)
        archive.unlink(missing_ok=True)
        if not problem:
            beside.rename(folder)
            return
        if last_try or not resumed:  # the rest of another file does not fit; a whole one that is wrong stays wrong
            break
    raise IngestError(offline_help(dataset, address, f"what is there is not the dataset ({problem})"))


def offline_help(dataset: Dataset, address: str, reason: str) -> str:
    """Say why the download failed and how to do without it."""
    return (
        f"cannot download {dataset.name} from {address}: {reason}. Without a network: put {_listed(dataset)} into a "
        f"folder FOLDER/{dataset.name} and set {DATA_VARIABLE}=FOLDER (or sattle-ingest --data-dir FOLDER); a mirror "
        f"that has {dataset.name}.tar.gz can be named by {ADDRESS_VARIABLE}"
    )


def _listed(dataset: Dataset) -> str:
    first, *middle, last = dataset.files
    return f"{', '.join([first, *middle])} and {last}"


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Let one process at a time make what is at this place of the cache."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise IngestError(
            f"cannot use the cache folder {place.parent}: {error.strerror or error}. "
            f"Mend that, or set {CACHE_VARIABLE} to another folder that can be written"
        ) from error
