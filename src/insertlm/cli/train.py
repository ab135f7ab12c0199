"""The command `train`."""

from __future__ import annotations

import shlex
import signal
import sys
from argparse import Namespace
from pathlib import Path

__all__ = ["train"]


def train(args: Namespace) -> None:
    from insertlm.cli.terminal import standard_output
    from insertlm.core.processes import RESUME, joined
    from insertlm.model import choose_device
    from insertlm.recipe import load_recipe
    from insertlm.training.loop import train as train_model

    with joined(choose_device(args.device)) as processes:
        recipe = load_recipe(args.recipe, args.overrides)
        run = args.run or Path("runs") / f"{args.recipe.resolve().parent.name}-{args.recipe.stem}"
        again = f"run the same command again to go on in {run}"
        try:
            steps = train_model(recipe, run, processes, standard_output())
        except KeyboardInterrupt:  # a second Ctrl-C, or one before the first step
            if processes.world > 1:  # `joined` ends them together
                raise
            print(f"insertlm: interrupted at once; {again}, from its last checkpoint if it has one", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        if not steps:  # a signal asked it to save and stop
            by_hand = processes.stop_signal == signal.SIGINT
            if processes.first:
                why = "interrupted, all steps are saved" if by_hand else "asked to stop"
                print(f"insertlm: {why}; {again}", file=sys.stderr)
            # RESUME tells batch scripts to start the run again; after Ctrl-C nobody wants that.
            raise SystemExit(128 + signal.SIGINT if by_hand else RESUME)
        if processes.first:
            what = "evaluate" if recipe.task.has_answers else "generate"
            print(f"trained {steps:,} steps; {what} with: insertlm {what} {shlex.quote(str(run))}")
