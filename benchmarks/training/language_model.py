r"""Trains a small GPT on real text with several optimizers side by side, in minutes on a processor.

All start from the same weights and see the same batches. From the root of the repository:

    python -m benchmarks.training.language_model
    python -m benchmarks.training.language_model --optimizers=adamw,muon,mars_m --seeds=0,1,2 \
        --learning_rates=2e-3,4e-3,8e-3,1.6e-2
    python -m benchmarks.training.language_model --data_file=train.bin --validation_file=val.bin

It is `gpt2` at another size, with other defaults: float32, an output layer of its own, and learning
rates that are tuned for it.
"""

import functools
from collections.abc import Sequence

from benchmarks import command
from benchmarks.training import gpt2, optimizers, study

DOMAIN = optimizers.LANGUAGE


def parser() -> command.Flags:
    """Returns the flags."""
    parser = gpt2.parser("training.language_model", __doc__)
    parser.set_defaults(model="mini", dtype="float32", untied=True, steps=1000)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, makes the runs that are missing, writes and prints what there is."""
    build = functools.partial(gpt2.build, name="language_model", domain=DOMAIN)
    return study.main(parser(), build, argv)


if __name__ == "__main__":
    command.run("language_model", main)
