"""What a run costs, counted: memory by part, bytes exchanged by kind, operations. The one place that counts them.

Every count is a formula of the sizes below, and tests hold each to real models, real steps and real exchanges: a change
of the step that changes a count fails there, and is mended here.

Shapes: N entities, R relations, W processes, S = ceil(N / W) rows of a shard, G queries of a step with padding,
B = G / W, D dim, H heads, K dim_key, V dim_value, F dim_hidden, T tokens that the decoder reads (1 or 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sattle_dist.config import Config, ModelConfig
from sattle_dist.counting import Sizes
from sattle_dist.data import STEPS_PER_PLAN, part_size
from sattle_dist.decoder import make_decoder
from sattle_dist.evaluator import MAX_QUERIES_PER_BLOCK
from sattle_dist.learner import MIB, score_budget
from sattle_dist.loss import CACHE_BYTES, SOFTMAXES
from sattle_dist.model import count_parameters
from sattle_dist.settled import DISCOUNT_BYTES
from sattle_dist.sharding import Sharding

FLOAT, DOUBLE, INT = 4, 8, 8  # bytes
POSITION_BYTES = 9 * INT  # of a (query, target) pair: three counts, its query and target, its position and draw

# Measured, as no count gives them: tests hold them to real processes.
PROCESS = 324 * MIB  # Python, torch and this library, resident before anything is made
WORKSPACE = 24 * MIB  # what the matrix-product and thread libraries take for themselves in the first steps
FRAGMENTATION = 0.7  # of the activations: freed pieces that the C library keeps, see runtime.keep_freed_memory
LARGE_PIECE = 32 * MIB  # it keeps none beyond this size
CUDA_CONTEXT = 600 * MIB  # an assumption: the driver's and cuBLAS's own memory on a GPU


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and on how many processes: the sizes that decide every cost."""

    config: Config
    num_entities: int
    num_relations: int
    num_triples: int
    num_queries: int
    world_size: int
    cuda: bool = False
    num_evaluated: int = 0  # triples of valid or test, the larger
    teachers: tuple[ModelConfig, ...] = ()  # the models of the run's teachers

    @property
    def dim(self) -> int:
        return self.config.model.dim

    @property
    def num_rows(self) -> int:
        """S, the rows of the largest shard."""
        return Sharding(self.num_entities, self.world_size).rows_per_shard

    @property
    def num_own(self) -> int:
        """B, the queries of one process in a step, padding included."""
        return part_size(min(self.config.train.batch_size, self.num_queries), self.world_size)

    @property
    def num_heard(self) -> float:
        """H, those of them whose source is known by hearsay, for sources of as many relations as the average."""
        real = min(self.config.train.batch_size, self.num_queries) / self.world_size
        return self.config.train.hearsay * real * max(0, 1 - self.num_entities / self.num_queries)

    @property
    def num_scored(self) -> int:
        """G, the queries that every process scores in a step."""
        return self.num_own * self.world_size

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_queries // self.config.train.batch_size)

    @property
    def targets_per_query(self) -> float:
        return 2 * self.num_triples / self.num_queries

    @property
    def num_read(self) -> int:
        """T, the tokens that the decoder reads."""
        return len(make_decoder(self.config.model.decoder, 1).reads)

    @cached_property
    def parameters(self) -> tuple[int, int]:
        """(NFP, EFP), as the paper counts them."""
        return count_parameters(self.config.model, self.num_entities, self.num_relations)

    @property
    def num_replicated(self) -> int:
        """Parameters that every process holds: all but the entities' rows and biases."""
        return self.parameters[0] - self.num_entities + 2 * self.num_relations * self.dim

    @property
    def num_replicated_trained(self) -> int:
        """The same without the keys' bias, whose gradient is zero and never computed."""
        return self.num_replicated - self.config.model.num_heads * self.config.model.dim_key

    @property
    def num_table(self) -> int:
        """Parameters of the largest shard: rows and biases."""
        return self.num_rows * (self.dim + 1)

    @property
    def score_budget(self) -> int:
        """Bytes that the score buffer may take."""
        return score_budget(self.config.run.score_memory, torch.device("cuda" if self.cuda else "cpu"))

    @property
    def num_scorers(self) -> int:
        """How many scores a candidate has: that of this model, and the mean of its teachers if it has any."""
        return 2 if self.teachers else 1

    @property
    def keeps_scores(self) -> bool:
        """Whether softmax keeps all scores of the shard between its two passes, or forms them twice."""
        return self.num_scorers * self.num_rows * self.num_scored * FLOAT <= self.score_budget

    @property
    def dim_teachers(self) -> int:
        """D', the numbers in a row of all teachers."""
        return sum(teacher.dim for teacher in self.teachers)

    @property
    def discounts(self) -> bool:
        """Whether the teachers' scores of settled entities are lowered."""
        return bool(self.teachers) and self.config.train.settled_discount > 0

    def as_teachers(self) -> list[Workload]:
        """Give the workload of each teacher, as if it were trained."""
        train = replace(self.config.train, hearsay=0.0)
        configs = [replace(self.config, model=model, train=train) for model in self.teachers]
        return [replace(self, config=config, teachers=()) for config in configs]


STATE = (
    "entity rows and biases",
    "their gradients",
    "their optimizer state",
    "encoder, decoder, relations",
    "teachers",
    "settled entities",
)
"""The parts of the memory that live as long as the run."""


def memory_parts(work: Workload) -> dict[str, int]:
    """Count the bytes of one process in a training step, by part, in the order of a reader's interest."""
    table, replicated = FLOAT * work.num_table, FLOAT * work.num_replicated_trained
    return {
        "entity rows and biases": table,
        "their gradients": table,
        "their optimizer state": 2 * table,
        "encoder, decoder, relations": 4 * replicated + FLOAT * (work.num_replicated - work.num_replicated_trained),
        "teachers": teacher_bytes(work),
        "settled entities": settled_bytes(work),
        "activations of the encoder": activation_bytes(work) + kept_bytes(work),
        "query vectors": query_bytes(work),
        "score buffer": score_bytes(work),
        "discounts": discount_bytes(work),
        "batch plans": plan_bytes(work),
        "libraries": CUDA_CONTEXT if work.cuda else PROCESS + WORKSPACE,
    }


def teacher_bytes(work: Workload) -> int:
    """Count the teachers' parameters, and DistributedDataParallel's buckets for gradients that they never have."""
    return sum(FLOAT * (teacher.num_table + 2 * teacher.num_replicated) for teacher in work.as_teachers())


def settled_bytes(work: Workload) -> int:
    """Count the pairs of a row and a relation that are settled, as many in every shard, two half integers each."""
    return round(INT * work.num_queries / work.world_size) if work.discounts else 0


def discount_bytes(work: Workload) -> int:
    """Count the discounts that are taken off scores at one time, by relation and by query."""
    columns = min(2 * work.num_relations, work.num_scored) + 1
    rows = min(block_rows(work), max(1, DISCOUNT_BYTES // (FLOAT * work.num_scored)))
    return FLOAT * rows * (columns + work.num_scored) if work.discounts else 0


def activation_bytes(work: Workload) -> int:
    """Count what forward keeps for backward, at backward's largest moment."""
    return sum(activation_pieces(work))


def kept_bytes(work: Workload) -> int:
    """Estimate what the C library keeps of freed pieces; pieces beyond its limit go back to the system at once."""
    if work.cuda:
        return round(0.1 * activation_bytes(work))
    return round(FRAGMENTATION * sum(piece for piece in activation_pieces(work) if piece < LARGE_PIECE))


def activation_pieces(work: Workload) -> list[int]:
    """List the bytes of the tensors that live at the largest moment of backward."""
    model, read = work.config.model, work.num_read
    per_query = work.num_own * FLOAT
    mixed = per_query * read * model.num_heads * model.dim  # [B, T, H * D]
    hidden = per_query * read * model.dim_hidden
    key = per_query * model.num_heads * model.dim_key
    pairs = per_query * model.dim**2 if read == 2 else 0  # Tucker's outer product of the two tokens
    small = per_query * ((8 + 10 * read) * model.dim + 4 * read * model.num_heads)  # tokens, norms, masks
    moments = {
        "the decoder's backward": [hidden] * 2 + [pairs] * 3,
        "the feed-forward layer's backward": [hidden] * 3 + [pairs] * 2,
        "the attention's backward": [mixed],
    }
    # The product of the value and output projections, [H, D, D], its gradient, and the two factors' gradients.
    both, factor = (FLOAT * model.num_heads * model.dim * width for width in (model.dim, model.dim_value))
    return [mixed, key, read * key, *max(moments.values(), key=sum), small, both, both, factor, factor]


def query_bytes(work: Workload) -> int:
    """Count the query vectors [G, D] of the loss: sent, received, weighted, scaled, their gradient."""
    return 7 * FLOAT * work.num_scored * work.dim


def score_bytes(work: Workload) -> int:
    """Count the score buffer: all scores of the shard where softmax keeps them, else one block of rows."""
    row = work.num_scored * FLOAT
    if work.config.train.loss in SOFTMAXES and work.keeps_scores:
        return work.num_scorers * work.num_rows * row + rounded_bytes(work)
    return work.num_scorers * block_rows(work) * row + rounded_bytes(work)


def rounded_bytes(work: Workload) -> int:
    """Count a block's scores and rows once more, rounded to bfloat16; on a CPU its blocks are small."""
    rounds = work.cuda and work.config.run.precision == "bf16"
    return 2 * block_rows(work) * (work.num_scored + work.dim) if rounds else 0


def block_rows(work: Workload) -> int:
    """Count the rows whose scores are formed at one time."""
    most = work.score_budget if work.cuda else min(work.score_budget, CACHE_BYTES)
    return min(max(1, most // (work.num_scorers * work.num_scored * FLOAT)), work.num_rows)


def plan_bytes(work: Workload) -> int:
    """Count the integers of the planned steps: targets, sources, weights, relations; twice, as sent and as received."""
    targets = 2 * work.num_scored * work.targets_per_query / work.world_size
    return round(
        2 * STEPS_PER_PLAN * INT * (targets + 3 * work.num_own + (2 if work.discounts else 1) * work.num_scored)
    )


def evaluation_bytes(work: Workload) -> int:
    """Count what an evaluation adds to a training process: a buffer of scores, their comparisons, encoded queries.

    The positions of all pairs are in the memory of the host, on every rank.
    """
    sizes = Sizes.within(work.score_budget, work.num_rows, torch.device("cuda" if work.cuda else "cpu"))
    encoded = replace(work, config=work.config.override({"batch_size": MAX_QUERIES_PER_BLOCK}, "evaluation"))
    on_device = 2 * FLOAT * sizes.num_queries * sizes.num_rows + forward_bytes(encoded)
    return on_device if work.cuda else on_device + 2 * work.num_evaluated * POSITION_BYTES


def forward_bytes(work: Workload) -> int:
    """Count what the encoder needs at one time where nothing is kept for backward."""
    model, read = work.config.model, work.num_read
    attention = (read * model.dim + (read + 1) * model.dim_key) * model.num_heads
    widest = max(attention, 2 * read * model.dim_hidden, model.dim**2 if read == 2 else 0)
    both = 2 * model.num_heads * model.dim**2
    return FLOAT * (work.num_own * (widest + 12 * model.dim) + both + work.num_scored * model.dim)


def saving_bytes(work: Workload) -> int:
    """Count what saving adds, in the memory of the host, from the first checkpoint on: the copy that is written."""
    return saved_bytes(work) if work.cuda or work.config.run.saving == "background" else 0


def saved_bytes(work: Workload) -> int:
    """Count a process's share of a checkpoint: parameters and two moments, of its rows and of the replicated part."""
    return 3 * FLOAT * (work.num_table + work.num_replicated_trained)


def checkpoint_bytes(work: Workload) -> int:
    """Count one checkpoint on disk."""
    table = work.num_entities * (work.dim + 1)
    return FLOAT * (3 * (table + work.num_replicated_trained) + work.num_replicated - work.num_replicated_trained)


def num_checkpoints(work: Workload) -> int:
    """Count the checkpoints on disk: the newest, the best, and one that is being written."""
    return work.config.run.keep + 2


def index_bytes(num_queries: int, num_triples: int) -> int:
    """Count the mapped index of the training split; processes of a machine share it, and the system may drop it."""
    return 8 * num_queries + 8 * (num_queries + 1) + 4 * 2 * num_triples


def bytes_sent(work: Workload) -> dict[str, float]:
    """Count what one process sends to others in a step, by the kinds of collectives.Group.bytes_sent.

    Rows travel once for each distinct source; how many there are is the graph's, so every query is counted as one.
    """
    world, others = work.world_size, work.world_size - 1
    away = others / world  # the share of uniformly spread rows that live elsewhere
    vectors = others * work.num_own * work.dim * FLOAT
    rows = work.num_own * away * work.dim * FLOAT
    targets = 2 * work.num_own * work.targets_per_query * away
    sent = {
        "queries": vectors,
        "query gradients": vectors,
        "source rows": rows,
        "source gradients": rows,
        "encoder gradients": 2 * away * work.num_replicated_trained * FLOAT,
        "batch-norm moments": 2 * others * sum(2 * width + 1 for width in norm_widths(work)) * DOUBLE,
        "batch plan": INT * (targets + work.num_own * away + others * (work.num_own + 4)),
    }
    if work.config.train.loss in SOFTMAXES:  # a maximum and a sum per query; filtered has its targets' pull besides
        numbers = 2 * work.num_scorers + (work.config.train.loss == "filtered")
        sent["softmax"] = others * numbers * work.num_scored * FLOAT
    if work.config.train.hearsay:  # the neighbours' rows
        sent["source rows"] += work.num_heard * away * work.dim * FLOAT
        sent["batch plan"] += INT * (work.num_heard * away + others)
    if work.discounts:  # everyone's relations
        sent["batch plan"] += INT * others * (work.num_own + 1)
    sent["queries"] += others * work.num_own * work.dim_teachers * FLOAT
    sent["source rows"] += work.num_own * away * work.dim_teachers * FLOAT
    return sent


def num_messages(work: Workload) -> int:
    """Count the exchanges of a step that wait for one another."""
    small = 2 * len(norm_widths(work)) + {"softmax": 1, "filtered": 2}.get(work.config.train.loss, 0)
    rows_and_vectors = 4
    of_teachers = 3 if work.teachers else 0  # their rows, their vectors, their maximum and sum
    of_hearsay = 1 if work.config.train.hearsay else 0
    ring = 2 * (work.world_size - 1)
    return small + rows_and_vectors + of_teachers + of_hearsay + ring if work.world_size > 1 else 0


def norm_widths(work: Workload) -> list[int]:
    """List the widths of the batch norms: both tokens side by side, and Tucker's source."""
    return [2 * work.dim, work.dim] if work.num_read == 2 else [2 * work.dim]


def encoder_flops(work: Workload) -> float:
    """Count the operations of encoder and decoder on one process in a step, forward and backward."""
    model, read = work.config.model, work.num_read
    d, h, k, v = model.dim, model.num_heads, model.dim_key, model.dim_value
    attention = d * h * k * (read + 1) + read * h * (2 * d + d * d + d)
    decoder = d**3 if read == 2 else 0
    per_query = attention + 2 * read * d * model.dim_hidden + decoder
    per_step = h * v * d * (d + 1)  # value and output projection, multiplied once
    forward_of_teachers = sum(encoder_flops(teacher) / 3 for teacher in work.as_teachers())
    forward_of_hearsay = 2 * (work.num_heard * per_query + per_step) if work.num_heard else 0
    return 3 * 2 * (work.num_own * per_query + per_step) + forward_of_hearsay + forward_of_teachers


def score_flops(work: Workload) -> float:
    """Count the operations of scoring all queries against one shard, with the gradients of rows and queries."""
    forms_twice = work.config.train.loss in SOFTMAXES and not work.keeps_scores
    scores = 2 * work.num_rows * work.num_scored  # operations per number of a row
    of_teachers = (2 if forms_twice else 1) * scores * work.dim_teachers
    return (4 if forms_twice else 3) * scores * work.dim + of_teachers


def score_traffic(work: Workload) -> float:
    """Count the bytes of scores that pass through memory where no cache holds them: written, read, by each pass."""
    passes = 7 if work.config.train.loss in SOFTMAXES else 5
    if work.teachers:  # their mean scores: written, raised, read; ours: weighed, joined with them
        passes += 9
    if work.discounts:  # discounts: written, read; scores: read, written; wherever scores are formed
        passes += 4 if work.keeps_scores else 8
    return passes * FLOAT * work.num_rows * work.num_scored


def optimizer_traffic(work: Workload) -> float:
    """Count the bytes that Adam and the check of the gradients move: four arrays read, three written, one read."""
    return 8 * FLOAT * (work.num_table + work.num_replicated_trained)
