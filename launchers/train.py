"""Train a graph, on as many processes as wanted: `sattle train`, for torchrun.

torchrun launchers/train.py --nproc 4                          4 processes, started by this script
torchrun --nproc-per-node 4 launchers/train.py                 4 processes, started by torchrun
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
    --rdzv-endpoint host:29500 launchers/train.py --graph g    2 machines, run on each

All options: python launchers/train.py --help
"""

import os
import signal

if __name__ == "__main__":
    # Before the imports, which take seconds: a Ctrl-C ends them, and a torchrun that is gone by then is noticed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["SATTLE_LAUNCHER_PID"] = str(os.getppid())

    from sattle_dist.commands.train import train

    train(prog_name="train.py")
