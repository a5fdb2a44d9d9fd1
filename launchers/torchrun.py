"""torch's torchrun, leaving every option after the script to the script. `make install` makes it .venv/bin/torchrun.

The argparse of older Pythons, 3.11 among them, reads abbreviations even after the script, and refuses our `--nproc`
there as ambiguous between torchrun's own --nproc-per-node and --nproc_per_node. `torchrun -- launchers/train.py --nproc
4` is the spelling that needs no such help.

It also ends without a Python traceback of its own: with 128 + signal when it was stopped, and with 2 where the script
has said in one line what was wrong with its settings.
"""

import argparse
import signal
import sys

EXIT_USAGE = 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main() -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    make_parser = run.get_args_parser

    def parser_without_abbreviations() -> argparse.ArgumentParser:
        parser = make_parser()
        parser.allow_abbrev = False
        # Schedulers announce a preemption by SIGUSR1, for which torchrun would simply die; and it would stop for
        # the SIGHUP of a terminal that closes, also where nohup has it ignored.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1", *([] if nohup else ["SIGHUP"])]
        parser.set_defaults(signals_to_handle=",".join(handled))
        return parser

    run.get_args_parser = parser_without_abbreviations
    try:
        run.main()
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as failed:
        if any(failure.exitcode == EXIT_USAGE for failure in failed.failures.values()):
            return EXIT_USAGE
        if stopped := [f.exitcode for f in failed.failures.values() if f.exitcode - 128 in STOP_SIGNALS]:
            return max(stopped)  # one of the processes was asked to stop, and all have saved and said so
        print(failed, file=sys.stderr)  # torch's table of what happened to which rank
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch is imported, which takes seconds; then it has its own
    sys.exit(main())
