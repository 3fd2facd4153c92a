r"""Times optimizer steps on the parameters of GPT-2, against what the device can do.

From the root of the repository:

    python -m benchmarks.step_time
    python -m benchmarks.step_time --model=small,medium --layouts=flat --optimizers=adamw,mars
    python -m benchmarks.step_time --train_step --batch_size=480 --microbatch=16
    python -m benchmarks.step_time --plot=runs/step_time/results.json

There are a table on the screen and, in the folder `--out`, `results.json`, which is written after
every row.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging
from jax.extend import backend as jax_backend

from benchmarks import (
    ceilings,
    command,
    environment,
    floors,
    gpt,
    gpt2_shapes,
    report,
    step_candidates,
    step_loop,
    step_report,
    torch_peers,
    train_step,
)

_TRAINED = ("adamw", "mars", "mars_m", "muon")


def parser() -> command.Flags:
    """Returns the flags."""
    parser = command.Flags("step_time", __doc__)
    command.add_timing(parser)
    group = parser.add_argument_group("optimizer steps")
    group.add_argument(
        "--layouts",
        type=command.subset(gpt2_shapes.LAYOUTS),
        default=",".join(gpt2_shapes.LAYOUTS),
        help="a leaf for each layer, or one for all",
    )
    group.add_argument(
        "--implementations",
        type=command.subset(step_candidates.IMPLEMENTATIONS),
        default="default",
        help=f"of ours, out of {','.join(step_candidates.IMPLEMENTATIONS)}",
    )
    group.add_argument(
        "--plot",
        type=command.listed,
        help="measure nothing: draw these JSON files, each beside it",
    )
    group = parser.add_argument_group("training steps")
    group.add_argument(
        "--train_step", type=bool, default=False, help="time whole training steps of a GPT-2"
    )
    group.add_argument("--batch_size", type=command.positive, default=16, help="windows of a step")
    group.add_argument(
        "--microbatch",
        type=command.positive,
        default=16,
        help="windows of a forward and backward pass",
    )
    group.add_argument(
        "--attention",
        choices=["auto", "cudnn", "xla"],
        default="auto",
        help="who computes it; auto is cuDNN on a GPU if it can",
    )
    group.add_argument("--remat", type=bool, default=False, help="compute activations twice")
    return parser


def default_inner(parameters: int, backend: str) -> int:
    """Returns how many steps a measurement takes.

    On an accelerator enough that calling them from Python does not count, but few for large models.
    """
    return 10 if backend == "cpu" else min(200, max(20, 25 * 10**9 // parameters))


def _jax_row(
    candidate: step_candidates.Candidate, host: dict[str, Any], steps: int, repeats: int
) -> dict[str, Any]:
    """Measures one of JAX's optimizers."""
    transformation = candidate.build(host["params"])
    params = jax.tree.map(jax.device_put, host["params"])
    state = jax.eval_shape(transformation.init, params)
    numbers = gpt2_shapes.dimension_numbers(host["params"], embeddings=False)
    counted = {
        "floor_bytes": floors.step_bytes(params, state, clipped=candidate.clipped),
        "newton_schulz_flops": (
            floors.newton_schulz_flops(params, numbers) if candidate.orthogonalizes else 0
        ),
    }
    measured = step_loop.measure(
        candidate.step(transformation),
        params,
        transformation.init,
        host["grads"],
        host["prev_grads"],
        steps=steps,
        repeats=repeats,
    )
    return counted | measured


def _torch_row(
    name: str, host: dict[str, Any], backend: str, steps: int, repeats: int
) -> dict[str, Any]:
    """Measures one of PyTorch's optimizers."""
    measured = torch_peers.measure(
        name, host["params"], host["grads"], backend=backend, steps=steps, repeats=repeats
    )
    counted = {
        "floor_bytes": torch_peers.step_bytes(name, host["params"]),
        "newton_schulz_flops": 0,
    }
    return counted | measured


def _torch_names(names: Sequence[str], backend: str) -> list[str]:
    """Returns PyTorch's optimizers that can be measured, and logs why others cannot."""
    there = []
    for name in names:
        if reason := torch_peers.absent(name, backend):
            logging.info("%s is left out: %s.", name, reason)
        else:
            there.append(name)
    return there


def rows(
    models: Sequence[str],
    layouts: Sequence[str],
    chosen: Sequence[step_candidates.Candidate],
    torch: Sequence[str],
    *,
    inner: int | None,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Measures optimizer steps, PyTorch's first: then their memory is free again.

    Args:
      models: out of `gpt2_shapes.MODELS`.
      layouts: out of `gpt2_shapes.LAYOUTS`; PyTorch's optimizers are measured in "flat".
      chosen: JAX's optimizers.
      torch: names of PyTorch's.
      inner: steps in a measurement, None for :func:`default_inner`.
      repeats: measurements of each row.

    Yields:
      A row after the other, complete but for what `step_report.complete` adds.
    """
    backend = jax.default_backend()
    torch_names = _torch_names(torch, backend)
    for model, layout in itertools.product(models, layouts):
        shapes = gpt2_shapes.shapes(model, layout)
        parameters = gpt2_shapes.parameters(shapes)
        steps = inner or default_inner(parameters, backend)
        common = {
            "model": model,
            "layout": layout,
            "parameters": parameters,
            "leaves": len(jax.tree.leaves(shapes)),
            "steps": steps,
        }
        scales = {"params": 0.02, "grads": 0.01, "prev_grads": 0.01}
        host = {
            name: gpt2_shapes.normal(shapes, scale, seed)
            for seed, (name, scale) in enumerate(scales.items())
        }
        for name in torch_names if layout == "flat" else ():
            measure = functools.partial(_torch_row, name, host, backend, steps, repeats)
            yield command.guarded({"name": name, **common}, measure)
        # The parameters are put there for each row anew: a row gives its buffers up.
        for name in ("grads", "prev_grads"):
            host[name] = jax.tree.map(jax.device_put, host[name])
        for candidate in chosen:
            measure = functools.partial(_jax_row, candidate, host, steps, repeats)
            yield command.guarded({"name": candidate.name, **common}, measure)
            gc.collect()


def _work(args: argparse.Namespace, models: Sequence[str]) -> train_step.Work:
    if len(models) > 1:
        raise ValueError(f"Expected one --model beside --train_step, got {','.join(models)}.")
    sizes = gpt2_shapes.MODELS[models[0]]
    attention = train_step.attention_implementation(args.attention, jax.default_backend())
    config = gpt.GPTConfig(
        # Padded to a multiple of 128, as training scripts of GPT-2 do.
        vocabulary_size=-(-sizes.vocabulary_size // 128) * 128,
        context=sizes.context,
        width=sizes.width,
        layers=sizes.layers,
        heads=sizes.heads,
        biases=True,
        tied=True,
        dtype="bfloat16",
        attention=attention,  # type: ignore[arg-type]
        remat=args.remat,
    )
    return train_step.Work(config, args.batch_size, args.microbatch)


def _draw(paths: Sequence[str]) -> None:
    for path in map(pathlib.Path, paths):
        try:
            step_report.plot(json.loads(path.read_text()), path.with_suffix(".png"))
        except ValueError as error:
            raise ValueError(
                f"Expected results of step_time as --plot, got {str(path)!r}: {error}"
            ) from error
        print(f"Written: {path.with_suffix('.png')}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, measures, writes and prints the result."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        if args.plot:
            _draw(args.plot)
            return 0
        if torch_peers.installed():
            # Before the first use of the device: by default JAX takes most of its memory.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        models = args.model or ["tiny" if jax.default_backend() == "cpu" else "small"]
        work = _work(args, models) if args.train_step else None
        listed = {one.name: one for one in step_candidates.candidates(args.implementations)}
        names = command.matching(
            args.optimizers or ["*"], [*listed, *([] if work else torch_peers.NAMES)]
        )
        if work is not None and args.optimizers is None:
            names = [name for name in names if name.partition("/")[0] in _TRAINED]
        chosen = [listed[name] for name in names if name in listed]
        out = report.make_folder(args.out)
    except (OSError, ValueError) as error:
        flags.fail(error)

    tree: dict[str, Any] = {
        "environment": {
            **environment.describe(args.commit),
            "backend": jax_backend.get_backend().platform_version,
            **torch_peers.versions(),
        },
        "settings": {
            "models": models,
            "layouts": args.layouts,
            "optimizers": names,
            "implementations": args.implementations,
            "repeats": args.repeats,
            "train_step": None if work is None else dataclasses.asdict(work),
        },
        "ceilings": {},
        "rows": [],
        "training": [],
    }
    about = tree["environment"]
    path = out / "results.json"
    kind = "training steps" if work else "optimizer steps"
    command.announce(
        "step_time",
        f"{kind} of {', '.join(names)}",
        f"{about['devices']} {about['device']}, GPT-2 {', '.join(models)}, random numbers",
        path,
    )
    tree["ceilings"] = ceilings.measure()

    def write() -> None:
        report.write_json(report.jsonable(tree), path)

    write()
    if work is not None:
        measured = train_step.measure(chosen, work, steps=args.steps or 4, repeats=args.repeats)
        tree["training"] = step_report.complete_training(measured, tree["ceilings"])
        write()
    else:
        measured = []
        torch = [name for name in names if name not in listed]
        for row in rows(
            models, args.layouts, chosen, torch, inner=args.steps, repeats=args.repeats
        ):
            logging.info(
                "%s, %s, %s: %s", row["model"], row["layout"], row["name"], row.get("ms", "failed")
            )
            measured.append(row)
            tree["rows"] = step_report.complete(measured, tree["ceilings"])
            write()
    return command.conclude(tree, step_report.text(tree), path)


if __name__ == "__main__":
    command.run("step_time", main, rows=True)
