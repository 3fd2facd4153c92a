r"""Measures what share of the matrix products' rate the training of `large_batch` reaches.

    python -m benchmarks.utilization --model=small --batch_size=524288 --microbatch=32768 \
        --vary=attention=xla,rolled=true,microbatch=16384,logits_chunk=16384:logits_dtype=bfloat16

Every row is the flags' setting with some of them changed. The model's operations are counted by
`fast_gpt.Config.flops_per_token`, the ceiling is measured in the same call.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import (
    ceilings,
    command,
    environment,
    gpt2_shapes,
    grid,
    large_batch,
    optimizers,
    report,
    study,
    timing,
    training,
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    large_batch.add_model(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--optimizer", default="adamw", help="as large_batch's --optimizers has it")
    group.add_argument("--batch_size", default="1024", help="tokens of an update")
    group.add_argument("--microbatch", type=study.positive, help="tokens of a pass")
    group.add_argument("--runs", type=study.positive, default=1, help="runs made together")
    group.add_argument("--calls", type=study.positive, default=3, help="timed calls")
    group.add_argument("--steps", type=study.positive, default=2, help="updates of a call")
    group.add_argument(
        "--vary", default="", help="rows besides the first: settings such as 'rolled=true:runs=3'"
    )
    group.add_argument("--out", default="runs/utilization.json", help="file of the results")
    group.add_argument("--commit", help="what to record as the commit; by default git says")
    return parser


def rows(args: argparse.Namespace) -> list[tuple[str, argparse.Namespace]]:
    """Returns the settings to measure, by name.

    Raises:
      ValueError: If a row changes what is no flag.
    """
    found = [("as given", args)]
    for text in filter(None, args.vary.split(",")):
        changed = dict(setting.partition("=")[::2] for setting in text.split(":"))
        unknown = sorted(set(changed) - set(vars(args)))
        if unknown:
            raise ValueError(f"Expected flags in --vary, got {unknown[0]!r} in {text!r}.")
        values: dict[str, Any] = {}
        for name, value in changed.items():
            if isinstance(getattr(args, name), bool):
                values[name] = value == "true"
            else:
                values[name] = int(value) if value.isdecimal() and name != "batch_size" else value
        found.append((text, argparse.Namespace(**{**vars(args), **values})))
    return found


def measure(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Times calls of `steps` updates, the fastest of which counts.

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
    optimizer = optimizers.parse_optimizer(args.optimizer, large_batch.DOMAIN)
    program = large_batch.Program(
        config,
        optimizer,
        training.Schedule(1000, 100, 0.1, 1000),
        microbatch,
        tokens,
        jnp.zeros((1, config.context + 1), jnp.int32),
        args.steps,
    )
    cells = [grid.Cell(optimizer, 1e-3, seed) for seed in range(args.runs)]
    state = large_batch.Training(program, count).init(cells)
    arguments = program.arguments(cells, 0, count)
    began = time.perf_counter()
    compiled = program.advance(args.runs == 1).lower(state, *arguments).compile()
    compiling = time.perf_counter() - began
    carry = [state]

    def run() -> Any:
        carry[0], losses = compiled(carry[0], *arguments)
        return losses

    timing.wait(run())
    seconds = min(timing.milliseconds(run) for _ in range(args.calls)) / args.steps / 1000
    done = args.runs * microbatch * count * config.context
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
    args = parser().parse_args(argv)
    out = pathlib.Path(args.out)
    try:
        chosen = rows(args)
        report.make_folder(str(out.parent))
    except ValueError as error:
        sys.exit(f"utilization: {error}")
    measured = ceilings.measure()
    ceiling = measured["bfloat16_matmul_flop_per_second"]
    print(f"bfloat16 products: {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    results: dict[str, Any] = {
        "name": "utilization",
        "environment": environment.describe(args.commit),
        "flags": {key: value for key, value in vars(args).items() if key != "out"},
        "ceilings": measured,
        "rows": [],
    }
    for name, settings in chosen:
        row = command.guarded({"name": name}, functools.partial(measure, settings, ceiling))
        results["rows"].append(row)
        report.write_json(report.jsonable(results), out)
        print(json.dumps(report.jsonable(row)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
