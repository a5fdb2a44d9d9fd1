"""The paper's own figures, copied by hand; nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass

HITS = ("hits@1", "hits@3", "hits@10")


@dataclass(frozen=True)
class Row:
    """A row of the paper's results: filtered, both directions, on test."""

    recipe: str
    dataset: str
    decoder: str
    dim: int
    mrr: float
    hits: tuple[float, float, float]  # at 1, 3 and 10


ROWS = (
    Row("fb15k237-twomult-100", "FB15k-237", "TwoMult", 100, 0.360, (0.268, 0.396, 0.545)),
    Row("fb15k237-twomult-64", "FB15k-237", "TwoMult", 64, 0.355, (0.264, 0.389, 0.535)),
    Row("fb15k237-twomult-32", "FB15k-237", "TwoMult", 32, 0.335, (0.247, 0.367, 0.507)),
    Row("fb15k237-tucker-100", "FB15k-237", "Tucker", 100, 0.357, (0.265, 0.395, 0.541)),
    Row("fb15k237-tucker-64", "FB15k-237", "Tucker", 64, 0.358, (0.266, 0.394, 0.541)),
    Row("fb15k237-tucker-32", "FB15k-237", "Tucker", 32, 0.340, (0.252, 0.372, 0.513)),
    Row("wn18rr-twomult-100", "WN18RR", "TwoMult", 100, 0.491, (0.454, 0.508, 0.558)),
    Row("wn18rr-tucker-64", "WN18RR", "Tucker", 64, 0.476, (0.442, 0.490, 0.540)),
    Row("wn18rr-tucker-32", "WN18RR", "Tucker", 32, 0.454, (0.414, 0.474, 0.527)),
)

ENTITIES_RELATIONS = {"FB15k-237": (14_541, 237), "WN18RR": (40_943, 11)}

# model, d, NFP in millions (FB15k-237, WN18RR), MRR (FB15k-237, WN18RR); None where the paper gives no figure
COMPETITORS = (
    ("HittER", 320, (11.2, 10.9), (0.373, 0.503)),
    ("CoKE", 256, (6.2, 6.5), (0.364, 0.484)),
    ("TuckER", 200, None, (0.358, 0.470)),
    ("QuatE", 400, None, (0.348, 0.488)),
    ("ATTH", 500, None, (0.348, 0.486)),
    ("ATTH", 32, None, (0.324, 0.466)),
    ("MuRP", 32, None, (0.323, 0.465)),
)

# heads: (NFP in millions, MRR); FB15k-237, TwoMult, d = 100
HEADS = {
    4: (0.50, 0.350),
    8: (0.56, 0.354),
    16: (0.70, 0.355),
    32: (0.96, 0.358),
    64: (1.50, 0.360),
    128: (2.58, 0.360),
}

# d: {epoch: MRR}; the figure of TwoMult's convergence on FB15k-237
CURVES = {
    32: {5: 0.038, 10: 0.038, 20: 0.073, 30: 0.166, 40: 0.224, 50: 0.273, 60: 0.295, 80: 0.311, 100: 0.317, 180: 0.325},
    64: {5: 0.032, 10: 0.037, 20: 0.161, 30: 0.227, 40: 0.280, 50: 0.311, 60: 0.324, 80: 0.336, 100: 0.340, 180: 0.346},
    100: {
        5: 0.034,
        10: 0.058,
        20: 0.189,
        30: 0.251,
        40: 0.302,
        50: 0.322,
        60: 0.331,
        80: 0.341,
        100: 0.346,
        180: 0.352,
    },
}
