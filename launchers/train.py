"""Train a graph, on as many processes as wanted: `sattle train`, for torchrun.

torchrun launchers/train.py --nproc 4                          4 processes, started by this script
torchrun --nproc-per-node 4 launchers/train.py                 4 processes, started by torchrun
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
    --rdzv-endpoint host:29500 launchers/train.py --graph g    2 machines, run on each

All options: python launchers/train.py --help
"""

from sattle_dist.cli import train

if __name__ == "__main__":
    train(prog_name="train.py")
