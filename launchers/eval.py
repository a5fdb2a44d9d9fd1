"""Evaluate a trained run, on as many processes as wanted: `sattle eval`, for torchrun.

torchrun launchers/eval.py RUN --nproc 4                        4 processes, started by this script
torchrun --nproc-per-node 4 launchers/eval.py RUN               4 processes, started by torchrun
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
    --rdzv-endpoint host:29500 launchers/eval.py RUN            2 machines, run on each

All options: python launchers/eval.py --help
"""

import os
import signal

if __name__ == "__main__":
    # Before the imports, which take seconds: a Ctrl-C ends them, and a torchrun that is gone by then is noticed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["SATTLE_LAUNCHER_PID"] = str(os.getppid())

    from sattle_dist.commands.eval import evaluate

    evaluate(prog_name="eval.py")
