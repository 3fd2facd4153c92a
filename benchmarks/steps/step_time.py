r"""Times optimizer steps on the parameters of GPT-2, against what the device can do.

From the root of the repository:

    python -m benchmarks.steps.step_time
    python -m benchmarks.steps.step_time --model=small,medium --layouts=flat --optimizers=adamw,mars
    python -m benchmarks.steps.step_time --layouts=stacked --programs=loop,step
    python -m benchmarks.steps.step_time --train_step --batch_size=480 --microbatch=16
    python -m benchmarks.steps.step_time --plot=runs/step_time/results.json

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import matplotlib
from absl import logging
from jax.extend import backend as jax_backend

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks import command, gpt2_shapes, output
from benchmarks.steps import floors, step_candidates, step_loop, timing, torch_peers, train_step
from benchmarks.training.models import GPTConfig, Work, add_compute_flags, attention_implementation

_TRAINED = ("adamw", "mars", "mars_m", "muon")
Row = dict[str, Any]

BASELINES = {"over_adamw": "adamw", "over_torch": "torch_adamw_fused"}
_TORCH_LAYOUT = "flat"


def parser() -> command.Flags:
    """Returns the flags."""
    parser = command.Flags("steps.step_time", __doc__)
    timing.add_flags(parser)
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
        "--programs",
        type=command.subset(step_loop.PROGRAMS),
        default="loop",
        help=f"out of {','.join(step_loop.PROGRAMS)}: one loop of steps, or a step that Python "
        "calls, which with many leaves takes the host's time",
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
    add_compute_flags(group)
    return parser


def default_inner(parameters: int, backend: str) -> int:
    """Returns how many steps a measurement takes.

    On an accelerator enough that calling them from Python does not count, but few for large models.
    """
    return 10 if backend == "cpu" else min(200, max(20, 25 * 10**9 // parameters))


def _jax_row(
    candidate: step_candidates.Candidate,
    program: str,
    host: dict[str, Any],
    steps: int,
    repeats: int,
) -> dict[str, Any]:
    """Measures one of JAX's optimizers."""
    transformation = candidate.build(host["params"])
    params = jax.tree.map(jax.device_put, host["params"])
    state = jax.eval_shape(transformation.init, params)
    numbers = gpt2_shapes.dimension_numbers(host["params"], embeddings=False)
    counted = {
        "floor_bytes": floors.step_bytes(
            params, state, clipped=candidate.clipped, donated=program == "step"
        ),
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
        program=program,
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
    programs: Sequence[str],
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
      programs: out of `step_loop.PROGRAMS`; PyTorch's optimizers are measured beside "loop".
      chosen: JAX's optimizers.
      torch: names of PyTorch's.
      inner: steps in a measurement, None for :func:`default_inner`.
      repeats: measurements of each row.

    Yields:
      A row after the other, complete but for what :func:`complete` adds.
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
        host = gpt2_shapes.operands(shapes)
        for name in torch_names if layout == "flat" and "loop" in programs else ():
            measure = functools.partial(_torch_row, name, host, backend, steps, repeats)
            yield command.guarded({"name": name, **common}, measure)
        # The parameters are put there for each row anew: a row gives its buffers up.
        for name in ("grads", "prev_grads"):
            host[name] = jax.tree.map(jax.device_put, host[name])
        # As PyTorch's rows are, those of the loop come first.
        ordered = [program for program in step_loop.PROGRAMS if program in programs]
        for program, candidate in itertools.product(ordered, chosen):
            measure = functools.partial(_jax_row, candidate, program, host, steps, repeats)
            row = {"name": candidate.name, **common, "program": program}
            yield command.guarded(row, measure)
            gc.collect()


def _work(args: argparse.Namespace, models: Sequence[str]) -> Work:
    if len(models) > 1:
        raise ValueError(f"Expected one --model beside --train_step, got {','.join(models)}.")
    sizes = gpt2_shapes.MODELS[models[0]]
    attention = attention_implementation(args.attention, jax.default_backend())
    config = GPTConfig(
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
    return Work(config, args.batch_size, args.microbatch)


def _draw(paths: Sequence[str]) -> None:
    for path in map(pathlib.Path, paths):
        try:
            plot(json.loads(path.read_text()), path.with_suffix(".png"))
        except ValueError as error:
            raise ValueError(
                f"Expected results of step_time as --plot, got {str(path)!r}: {error}"
            ) from error
        print(f"Written: {path.with_suffix('.png')}.")


def _program(row: Row) -> str:
    return str(row.get("program", "loop"))  # older results and PyTorch's rows have none


def complete(rows: Sequence[Row], ceilings: Mapping[str, Any]) -> list[Row]:
    """Adds to rows what needs the ceilings or another row.

    Args:
      rows: the rows of one run; those with an "error" stay as they are.
      ceilings: what :func:`benchmarks.steps.timing.ceilings` returned.

    Returns:
      New rows: with "floor_ms" and "share_of_floor", with "matmul_ms" and "share_of_matmul" for
      those with Newton-Schulz, and with the ratios to `BASELINES`, where these were measured for
      the same model. Those to Optax's AdamW are to the one of the same layout and program;
      PyTorch's has only one of each.
    """
    measured = {
        (row["name"], row["model"], row["layout"], _program(row)): row["ms"]
        for row in rows
        if "error" not in row
    }
    completed = []
    for row in rows:
        if "error" in row:
            completed.append(dict(row))
            continue
        floor_ms = 1000 * row["floor_bytes"] / ceilings["copy_bytes_per_second"]
        new = {**row, "floor_ms": floor_ms, "share_of_floor": floor_ms / row["ms"]}
        if row["newton_schulz_flops"]:
            flops = row["newton_schulz_flops"]
            matmul_ms = 1000 * flops / ceilings["bfloat16_matmul_flop_per_second"]
            new |= {"matmul_ms": matmul_ms, "share_of_matmul": matmul_ms / row["ms"]}
        for ratio, name in BASELINES.items():
            is_torch = name.startswith("torch")
            where = (_TORCH_LAYOUT, "loop") if is_torch else (row["layout"], _program(row))
            if baseline := measured.get((name, row["model"], *where)):
                new[ratio] = row["ms"] / baseline
        completed.append(new)
    return completed


def complete_training(rows: Sequence[Row], ceilings: Mapping[str, Any]) -> list[Row]:
    """Adds to rows of training steps what needs the ceilings or another row.

    Args:
      rows: what :func:`benchmarks.steps.train_step.measure` returned.
      ceilings: what :func:`benchmarks.steps.timing.ceilings` returned.

    Returns:
      New rows, with "share_of_matmul" and, where "sgd" and "adamw" were measured, the percent that
      a step takes longer than theirs.
    """
    measured = {row["name"]: row["ms"] for row in rows if "error" not in row}
    completed = []
    for row in rows:
        new = dict(row)
        if "error" not in row:
            peak = ceilings["bfloat16_matmul_flop_per_second"]
            new["share_of_matmul"] = row["model_flop_per_second"] / peak
            for name in ("sgd", "adamw"):
                if name in measured:
                    new[f"percent_over_{name}"] = 100 * (row["ms"] / measured[name] - 1)
        completed.append(new)
    return completed


_HEADER = [
    "optimizer",
    "ms",
    "range",
    "floor B",
    "of floor",
    "of matmul",
    "x adamw",
    "x torch",
    "trace s",
    "compile s",
    "temp MB",
    "kernels",
    "copied B",
    "hoisted",
]


def _cells(row: Row) -> list[str]:
    per_parameter = 1 / row["parameters"]
    return [
        row["name"],
        output.cell(row, "ms", ".3f"),
        f"{row['ms_min']:.3f}..{row['ms_max']:.3f}",
        output.cell(row, "floor_bytes", ".1f", per_parameter),
        output.cell(row, "share_of_floor", ".2f"),
        output.cell(row, "share_of_matmul", ".2f"),
        output.cell(row, "over_adamw", ".2f"),
        output.cell(row, "over_torch", ".2f"),
        output.cell(row, "trace_seconds", ".1f"),
        output.cell(row, "compile_seconds", ".1f"),
        output.cell(row, "temporary_bytes", ".0f", 1e-6),
        output.cell(row, "kernels", "d", 1),
        output.cell(row, "copied_bytes", ".1f", per_parameter),
        output.cell(row, "hoisted_arrays", "d", 1),
    ]


def _training_cells(row: Row) -> list[str]:
    return [
        row["name"],
        output.cell(row, "ms", ".2f"),
        f"{row['ms_min']:.2f}..{row['ms_max']:.2f}",
        output.cell(row, "percent_over_sgd", "+.2f"),
        output.cell(row, "percent_over_adamw", "+.2f"),
        output.cell(row, "share_of_matmul", ".2f"),
    ]


def _group(row: Row) -> str:
    return f"{row['model']}, {row['layout']}, {_program(row)}"


def text(tree: Mapping[str, Any]) -> str:
    """Formats a result as tables, with what was not measured and why below them.

    Args:
      tree: what `step_time` writes as JSON.
    """
    ceilings = tree["ceilings"]
    parts = [
        f"Copy {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, bfloat16 products "
        f"{ceilings['bfloat16_matmul_flop_per_second'] / 1e12:.2f} TFLOP/s, both measured here."
    ]
    for heading, group in itertools.groupby(tree["rows"], _group):
        first, *_ = rows = list(group)
        title = f"{heading}: {first['parameters']:,} parameters in {first['leaves']} leaves"
        parts.append(output.section(title, _HEADER, _cells, rows))
    if rows := tree["training"]:
        header = ["training step", "ms", "range", "% over sgd", "% over adamw", "of matmul"]
        title = f"{rows[0]['parameters']:,} parameters, {rows[0]['tokens']:,} tokens a step"
        parts.append(output.section(title, header, _training_cells, rows))
    return "\n\n".join(parts)


def plot(tree: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws what share of its time each step needs at least, a panel for each table.

    Args:
      tree: what `step_time` writes as JSON.
      path: the PNG file to write.

    Raises:
      ValueError: If there is nothing to draw, or it is no result of `step_time`.
    """
    rows = tree.get("rows") if isinstance(tree, Mapping) else None
    if not isinstance(rows, list):
        raise ValueError("Expected a tree with a list `rows`, got none.")
    measured = [row for row in rows if "error" not in row]
    if not measured:
        raise ValueError("Expected rows with figures to draw, got none. Measure some first.")
    if not all("share_of_floor" in row for row in measured):
        raise ValueError("Expected rows with `share_of_floor`, got others: not of step_time.")
    drawn = [(key, list(group)) for key, group in itertools.groupby(measured, _group)]
    heights = [1.0 + 0.28 * len(rows) for _, rows in drawn]
    figure, axes = plt.subplots(
        nrows=len(drawn),
        figsize=(7.5, sum(heights)),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for ax, (heading, rows) in zip(axes[:, 0], drawn, strict=True):
        names = [row["name"] for row in rows]
        moved = [row["share_of_floor"] for row in rows]
        multiplied = [row.get("share_of_matmul", 0.0) for row in rows]
        ends = [sum(shares) for shares in zip(moved, multiplied, strict=True)]
        ax.barh(names, moved, label="bytes at the bandwidth of a copy")
        ax.barh(names, multiplied, left=moved, label="Newton-Schulz at the rate of products")
        for name, row, end in zip(names, rows, ends, strict=True):
            ax.annotate(f" {row['ms']:#.3g} ms", (end, name), va="center", fontsize=8)
        ax.invert_yaxis()
        ax.set_title(f"GPT-2 {heading}", fontsize=10)
        ax.grid(alpha=0.3, axis="x")
        ax.axvline(1.0, color="black", linewidth=0.8)
        # Room for the milliseconds behind the bars.
        ax.set_xlim(0, 1.15 * max(1.0, *ends))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    environment = tree["environment"]
    axes[-1, 0].set_xlabel(
        f"share of a step's time, {environment['device']}, JAX {environment['jax']}"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
        out = output.make_folder(args.out)
    except (OSError, ValueError) as error:
        flags.fail(error)

    tree: dict[str, Any] = {
        "environment": {
            **output.environment(args.commit),
            "backend": jax_backend.get_backend().platform_version,
            **torch_peers.versions(),
        },
        "settings": {
            "models": models,
            "layouts": args.layouts,
            "programs": args.programs,
            "optimizers": names,
            "implementations": args.implementations,
            "repeats": args.repeats,
            "train_step": None if work is None else dataclasses.asdict(work),
        },
        "ceilings": {},
        "rows": [],
        "training": [],
    }
    path = out / "results.json"
    kind = "training steps" if work else "optimizer steps"
    command.announce(
        "step_time",
        f"{kind} of {', '.join(names)}",
        f"{output.devices()}, GPT-2 {', '.join(models)}, random numbers",
        path,
    )
    tree["ceilings"] = timing.ceilings()

    def write() -> None:
        output.write_json(output.jsonable(tree), path)

    write()
    if work is not None:
        measured = train_step.measure(chosen, work, steps=args.steps or 4, repeats=args.repeats)
        tree["training"] = complete_training(measured, tree["ceilings"])
        write()
    else:
        measured = []
        torch = [name for name in names if name not in listed]
        for row in rows(
            models,
            args.layouts,
            args.programs,
            chosen,
            torch,
            inner=args.steps,
            repeats=args.repeats,
        ):
            took = f"{row['ms']:.4g} ms" if "ms" in row else "failed"
            logging.info("%s, %s: %s", _group(row), row["name"], took)
            measured.append(row)
            tree["rows"] = complete(measured, tree["ceilings"])
            write()
    return command.conclude(tree, text(tree), path)


if __name__ == "__main__":
    command.run("step_time", main, rows=True)
