r"""Measures what share of the matrix products' rate the training of `large_batch` reaches.

    python -m benchmarks.steps.utilization --model=small --batch_tokens=524288 \
        --microbatch_tokens=32768 --vary=attention=xla,rolled=true,logits_dtype=bfloat16:vmap=2

Every row is the flags' setting with some of them changed. The model's operations are counted by
`fast_gpt.Config.flops_per_token`, the ceiling is measured in the same call. `results.json` in the
folder `--out` is written after every row.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import command, gpt2_shapes, output
from benchmarks.steps import timing
from benchmarks.training import grid, large_batch, optimizers, resumable


def parser() -> command.Flags:
    """Returns the flags."""
    parser = command.Flags("steps.utilization", __doc__)
    large_batch.add_model(parser)
    timing.add_flags(parser, model=False)
    parser.set_defaults(batch_tokens="1024", steps=2)
    group = parser.add_argument_group("rows")
    group.add_argument(
        "--optimizers",
        type=command.listed,
        default="adamw",
        help="one row each, with settings behind colons: mars:gamma=0.05",
    )
    group.add_argument("--vmap", type=command.positive, default=1, help="runs made together")
    group.add_argument(
        "--vary",
        type=command.listed,
        help="rows besides the first: flags that change, such as rolled=true:vmap=3",
    )
    return parser


def rows(flags: command.Flags, args: argparse.Namespace) -> list[tuple[str, argparse.Namespace]]:
    """Returns the settings to measure, by name.

    Raises:
      ValueError: If a row changes what is no flag, or to what it cannot be.
    """
    found = []
    for optimizer, tokens, text in itertools.product(
        args.optimizers, args.batch_tokens, ["as given", *(args.vary or ())]
    ):
        settings = {**vars(args), "optimizers": [optimizer], "batch_tokens": [tokens]}
        if text != "as given":
            for change in text.split(":"):
                name, _, value = change.partition("=")
                settings[name] = flags.read(name, value)
        found.append((f"{optimizer}, {tokens} tokens, {text}", argparse.Namespace(**settings)))
    return found


def measure(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Times calls of `--steps` updates, the fastest of which counts.

    Args:
      args: the flags.
      ceiling: operations per second to compare with.

    Returns:
      Milliseconds of an update, tokens and operations per second, the share of the ceiling, the
      seconds of compiling, and the GiB that the program allocates besides its arguments.
    """
    config = large_batch.model_config(
        args, args.vocabulary_size or gpt2_shapes.MODELS[args.model].vocabulary_size
    )
    ((microbatch, count),) = large_batch.batch_sizes(args, config.context)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(config.vocabulary_size, size=2**20), jnp.uint16)
    optimizer = optimizers.parse_optimizer(args.optimizers[0], large_batch.DOMAIN)
    steps = args.steps
    program = large_batch.Program(
        config,
        optimizer,
        resumable.Schedule(1000, 100, 0.1, 1000),
        microbatch,
        tokens,
        jnp.zeros((1, config.context + 1), jnp.int32),
        steps,
    )
    cells = [grid.Cell(optimizer, 1e-3, seed) for seed in range(args.vmap)]
    state = large_batch.Training(program, count).init(cells)
    arguments = program.arguments(cells, 0, count)
    began = time.perf_counter()
    compiled = program.advance(args.vmap == 1).lower(state, *arguments).compile()
    compiling = time.perf_counter() - began
    carry = [state]

    def run() -> Any:
        carry[0], losses = compiled(carry[0], *arguments)
        return losses

    timing.wait(run())
    seconds = min(timing.milliseconds(run) for _ in range(args.repeats)) / steps / 1000
    done = args.vmap * microbatch * count * config.context
    flops = done * config.flops_per_token()
    return {
        "ms": 1000 * seconds,
        "tokens_per_second": done / seconds,
        "model_flop_per_second": flops / seconds,
        "utilization": flops / seconds / ceiling,
        "compile_seconds": compiling,
        "temporary_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
        "tokens": done,
        "microbatch": microbatch * config.context,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, measures, prints and writes what it found after every row."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        chosen = rows(flags, args)
        path = output.make_folder(args.out) / "results.json"
    except ValueError as error:
        flags.fail(error)
    measured = timing.ceilings()
    ceiling = measured["bfloat16_matmul_flop_per_second"]
    print(f"bfloat16 products: {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    results: dict[str, Any] = {
        "name": "utilization",
        "environment": output.environment(args.commit),
        "flags": {key: value for key, value in vars(args).items() if key != "out"},
        "ceilings": measured,
        "rows": [],
    }
    for name, settings in chosen:
        row = command.guarded({"name": name}, functools.partial(measure, settings, ceiling))
        results["rows"].append(row)
        output.write_json(output.jsonable(results), path)
        print(json.dumps(output.jsonable(row)), flush=True)
    return 0


if __name__ == "__main__":
    command.run("utilization", main, rows=True)
