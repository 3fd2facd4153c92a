r"""Measures what share of the difference of two successive gradients is noise, by batch size.

    python -m benchmarks.training.gradient_noise --optimizers=adamw --learning_rates=4e-3 \
        --steps=320 --batch_tokens=8192,131072 --microbatch_tokens=32768 --data_file=train.bin

The flags are those of `large_batch`; an optimizer is trained at its first learning rate and the
first seed. `results.json` in the folder `--out` is written after every measurement. Before an
evaluation's step, at the parameters x and those after one more update, y, with batches a, b, c that
are drawn anew:

    gradient    |g(x, a)|^2
    noise       |g(x, a) - g(x, b)|^2 / 2, the variance of one gradient
    difference  |g(y, c) - g(x, a)|^2, what the approximate correction takes
    exact       |g(y, a) - g(x, a)|^2, what the exact correction takes
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import command, output
from benchmarks.training import grid, large_batch

# Batches that no training has drawn: steps beyond any.
_FRESH = 2**30


@functools.partial(jax.jit, static_argnums=0)
def measures(program: large_batch.Program, state: Any, arguments: Sequence[Any]) -> Any:
    """Returns the four figures.

    Args:
      program: of the training.
      state: its state.
      arguments: as `Program.arguments` returns them, for one run.
    """
    seed, rate, step, microbatches, tokens = arguments

    def gradient(params: Any, batch: int) -> Any:
        fresh = _FRESH + 3 * step + batch
        return program.value_and_gradient(params, seed, fresh, microbatches, tokens)[1]

    def squared(x: Any, y: Any) -> Any:
        return optax.tree.norm(jax.tree.map(jnp.subtract, x, y), squared=True)

    before = state["params"]
    after = program.update(state, seed, rate, step, microbatches, tokens)[0]["params"]
    first = gradient(before, 0)
    return {
        "gradient": optax.tree.norm(first, squared=True),
        "noise": squared(first, gradient(before, 1)) / 2,
        "difference": squared(first, gradient(after, 2)),
        "exact": squared(first, gradient(after, 0)),
    }


def run(axis: large_batch.Axis, write: Any) -> list[dict[str, Any]]:
    """Trains at each batch size and measures at every evaluation's step.

    Args:
      axis: the comparison.
      write: called with the rows after each one.

    Returns:
      A row for each optimizer, batch size and step.
    """
    rows: list[dict[str, Any]] = []
    for (optimizer, rates), (microbatch, count) in itertools.product(axis.optimizers, axis.sizes):
        cells = [grid.Cell(optimizer, rates[0], axis.protocol.seeds[0])]
        task = axis.training(microbatch, count, optimizer)
        state = task.init(cells)
        for step in range(0, task.steps, task.steps_per_call):
            if step in task.evaluated_steps:
                arguments = task.program.arguments(cells, step, count)
                rows.append(
                    {
                        "tokens": microbatch * count * axis.config.context,
                        "optimizer": optimizer.name,
                        "learning_rate": rates[0],
                        "step": step,
                        **{
                            name: float(x)
                            for name, x in measures(task.program, state, arguments).items()
                        },
                    }
                )
                write(rows)
            state, _ = task.advance(state, step, cells)
    return rows


def parser() -> command.Flags:
    """Returns the flags."""
    parser = large_batch.parser("training.gradient_noise", __doc__)
    parser.set_defaults(optimizers="adamw")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, measures, prints and writes the figures."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        axis = large_batch.Axis(args)
        out = output.make_folder(args.out)
    except (OSError, ValueError) as error:
        flags.fail(error)
    described = output.environment(args.commit)

    def write(rows: Sequence[dict[str, Any]]) -> None:
        tree = {
            "name": "gradient_noise",
            "environment": described,
            "data": axis.corpus.description,
            "flags": {key: value for key, value in vars(args).items() if key != "out"},
            "rows": rows,
        }
        output.write_json(output.jsonable(tree), out / "results.json")
        row = rows[-1]
        share = 2 * row["noise"] / row["difference"]
        print(f"{row['tokens']} tokens, step {row['step']}: noise is {share:.3f}", flush=True)

    run(axis, write)
    return 0


if __name__ == "__main__":
    command.run("gradient_noise", main)
