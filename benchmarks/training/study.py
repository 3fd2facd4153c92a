"""What the training benchmarks have in common: flags, the loop over all runs, and the results.

In the folder `--out` are `records.jsonl`, a line for every finished run; `log.jsonl`, a line for
every evaluation; `checkpoints`, of runs that are not finished; and `results.json` and `curves.png`,
written in the end from the records.
"""

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tqdm  # type: ignore[import-untyped]

from benchmarks import command, output
from benchmarks.training import curves, grid, optimizers, report, resumable
from benchmarks.training.optimizers import Optimizer

# Factors of 2: nine orders of magnitude.
_LARGEST_GRID = 31


@dataclasses.dataclass(frozen=True)
class Study:
    """A comparison.

    Attributes:
      name: of the command.
      optimizers: what is compared, each with the learning rates that its tuning begins with.
      protocol: how learning rates are chosen.
      task: everything else that decides on a result; JSON has to hold it.
      data: what the data are, for the record.
      make: returns the training with an optimizer.
    """

    name: str
    optimizers: Sequence[tuple[Optimizer, Sequence[float]]]
    protocol: grid.Protocol
    task: Mapping[str, Any]
    data: Mapping[str, Any]
    make: Callable[[Optimizer], resumable.Task]


def parser(name: str, doc: str | None) -> command.Flags:
    """Returns the flags that all training benchmarks have.

    Args:
      name: of the command.
      doc: its docstring.
    """
    parser = command.Flags(name, doc)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--optimizers",
        type=command.listed,
        default="adamw,nadamw,mars,mars_m",
        help="what to compare, settings behind colons: mars:gamma=0.05:b1=0.9; baseline is adamw, "
        "or the first",
    )
    group.add_argument(
        "--table",
        help="or a named table of optimizers, see below",
    )
    group.add_argument(
        "--learning_rates",
        type=command.listed,
        help="peak learning rates that every optimizer is tuned at",
    )
    group.add_argument(
        "--grid",
        type=command.whole(1, _LARGEST_GRID),
        help="or so many, factors of 2 apart, around each one's own default; by default 1",
    )
    parser.exclude("optimizers", "table")
    parser.exclude("learning_rates", "grid")
    group.add_argument(
        "--extend",
        type=command.whole(0, _LARGEST_GRID),
        default=4,
        help="learning rates that may be tried beyond a grid while the best is at its edge",
    )
    group.add_argument(
        "--seeds", type=command.listed, default="0", help="seeds that learning rates are tuned at"
    )
    group.add_argument(
        "--final_seeds",
        type=command.listed,
        help="seeds that the best learning rate is run at; by default --seeds",
    )
    parser.notes += [
        f"optimizers: {', '.join(optimizers.OPTIMIZERS)}",
        f"tables: {', '.join(optimizers.TABLES)}, and OPTIMIZER/TABLE, such as mars/gamma, with",
        f"  {', '.join(optimizers.ABLATIONS)}",
    ]
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "--vmap",
        type=command.positive,
        default=1,
        help="runs of one optimizer that are made together",
    )
    group.add_argument(
        "--limit", type=command.seconds, help="seconds after which to save a checkpoint and stop"
    )
    group.add_argument(
        "--save_every",
        type=command.seconds,
        default=600.0,
        help="seconds between two checkpoints; 0 is none but that of a stop",
    )
    command.add_output(parser)
    return parser


def add_dtype(group: Any) -> None:
    """Adds the flag of the models' dtype to a group of flags."""
    group.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of activations and products",
    )


def parse_optimizers(
    args: argparse.Namespace, domain: optimizers.Domain
) -> list[tuple[Optimizer, Sequence[float]]]:
    """Reads the optimizers, and the learning rates that each begins with.

    Of those with the same settings the first is kept, and the others are printed.
    """
    texts = args.optimizers if args.table is None else optimizers.table(args.table)
    given = (
        [] if args.learning_rates is None else optimizers.parse_learning_rates(args.learning_rates)
    )
    chosen, notes = optimizers.distinct(optimizers.parse_optimizers(texts, domain))
    for note in notes:
        print(note)
    return [
        (optimizer, given or grid.around(optimizer.learning_rate, args.grid or 1))
        for optimizer in chosen
    ]


def protocol(args: argparse.Namespace, **curves: str) -> grid.Protocol:
    """Reads how learning rates are chosen.

    Args:
      args: the flags.
      **curves: `chosen_by`, `compared` and `unit`, see `grid.Protocol`.
    """
    seeds = optimizers.parse_seeds(args.seeds, "seeds")
    final = (
        seeds
        if args.final_seeds is None
        else optimizers.parse_seeds(args.final_seeds, "final_seeds")
    )
    return grid.Protocol(seeds, final, args.extend, **curves)


def stacked(trees: Sequence[Any]) -> Any:
    """Stacks the trees of several runs; one is left as it is."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class _Watch:
    """Shows a group of runs on a progress bar, and logs it."""

    def __init__(
        self, bar: Any, log: pathlib.Path, cells: Sequence[grid.Cell], *, compiles: bool
    ) -> None:
        self._bar = bar
        self._log = log
        self._cells = cells
        self._begun = False
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        bar.set_description(f"{cells[0]}{more}")
        if compiles:
            bar.set_postfix_str("compiling ...")
        self.step = 0

    def __call__(self, steps: int, progress: resumable.Progress) -> None:
        self.step = progress.step
        if not self._begun:
            # The first call is of what earlier processes did, and logged.
            self._begun = True
            self._bar.initial += steps * len(self._cells)
            self._bar.update(steps * len(self._cells))
            if steps:
                self._bar.write(f"{self._cells[0]}: goes on from step {steps}", file=sys.stderr)
            return
        means = progress.losses[-1] if progress.losses else progress.train_loss[-1]
        self._bar.set_postfix_str(f"training loss {min(means):.3f}", refresh=False)
        self._bar.update(steps * len(self._cells))
        if progress.losses:
            return
        lines = []
        for index, cell in enumerate(self._cells):
            figures = {name: rows[-1][index] for name, rows in progress.curves.items()}
            event = {
                "time": _now(),
                "optimizer": cell.optimizer.name,
                "learning_rate": cell.learning_rate,
                "seed": cell.seed,
                "step": progress.step,
                "train_loss": progress.train_loss[-1][index],
                **figures,
            }
            lines.append(json.dumps(output.jsonable(event)) + "\n")
        grid.append(self._log, "".join(lines))


def _ahead(
    study: Study, records: grid.Records, optimizer: Optimizer, rates: Sequence[float]
) -> int:
    """Returns how many runs an optimizer still needs, but for those beyond an edge of its grid."""
    first = next(grid.rounds(optimizer, rates, study.protocol, records.of))
    ran = {*study.protocol.seeds, *(record["seed"] for record in records.of(optimizer))}
    missing = sum(records.find(cell) is None for cell in first)
    return missing + len({*study.protocol.final_seeds} - ran)


def complete(
    study: Study, args: argparse.Namespace, records: grid.Records, deadline: resumable.Deadline
) -> str | None:
    """Makes all runs that are missing.

    Args:
      study: the comparison.
      args: the flags.
      records: the finished runs, to which new ones are added.
      deadline: when to stop.

    Returns:
      Where it stopped; None if all are done.
    """
    out = pathlib.Path(args.out)
    described = output.environment(args.commit)
    save_every = args.save_every or math.inf
    with tqdm.tqdm(total=0, unit="step", dynamic_ncols=True) as bar:
        for index, (optimizer, rates) in enumerate(study.optimizers):
            task = study.make(optimizer)
            compiled: set[int] = set()  # by the number of runs together
            for wanted in grid.rounds(optimizer, rates, study.protocol, records.of):
                missing = [cell for cell in wanted if records.find(cell) is None]
                now, *later = (_ahead(study, records, *one) for one in study.optimizers[index:])
                bar.total = bar.n + task.steps * (max(len(missing), now) + sum(later))
                for cells in grid.groups(missing, args.vmap):
                    name = grid.digest([grid.key(cell, study.task) for cell in cells])
                    new = len(cells) not in compiled
                    compiled.add(len(cells))
                    watch = _Watch(bar, out / "log.jsonl", cells, compiles=new)
                    runs = resumable.train(
                        task,
                        cells,
                        out / "checkpoints" / name,
                        deadline=deadline,
                        save_every=save_every,
                        report=watch,
                    )
                    if runs is None:
                        return f"{cells[0]} is saved at step {watch.step} of {task.steps}"
                    # Of a group that diverged, the rest is not made.
                    bar.total -= (task.steps - watch.step) * len(cells)
                    extra = {"finished": _now(), "environment": described}
                    records.add(
                        [(cell, {**run, **extra}) for cell, run in zip(cells, runs, strict=True)]
                    )
                    for cell, run in zip(cells, runs, strict=True):
                        value = grid.last(run, study.protocol.chosen_by)
                        bar.write(f"{cell}: {value:.4f}", file=sys.stderr)
    return None


def results(study: Study, records: Sequence[grid.Record]) -> dict[str, Any]:
    """Collects everything about a comparison, for a file of JSON."""
    environments: list[Any] = []
    lean = []
    for record in records:
        if record["environment"] not in environments:
            environments.append(record["environment"])
        lean.append({**record, "environment": environments.index(record["environment"])})
    tree: dict[str, Any] = output.jsonable(
        {
            "name": study.name,
            "data": study.data,
            "task": study.task,
            "protocol": dataclasses.asdict(study.protocol),
            "environments": environments,
            "records": lean,
        }
    )
    return tree


def run(study: Study, args: argparse.Namespace, began: float) -> list[report.Summary]:
    """Makes the runs that are missing, writes and prints what there is.

    Args:
      study: the comparison.
      args: the flags.
      began: a reading of `time.perf_counter` that the limit counts from.

    Returns:
      A summary for each optimizer whose runs are all there. After a signal the process ends, with
      128 and the signal's number.
    """
    try:
        out = output.make_folder(args.out)
        for name in ("records.jsonl", "log.jsonl", "results.json"):
            if (out / name).is_dir():
                raise ValueError(
                    f"Expected a folder of results as --out, got {str(out)!r}, in which {name} is "
                    "a folder. Name another."
                )
        records = grid.Records(out / "records.jsonl", study.task)
    except (OSError, ValueError) as error:
        sys.exit(f"{study.name}: {error}")
    names = [optimizer.name for optimizer, _ in study.optimizers]
    size = f", {study.task['parameters']:,} parameters" if "parameters" in study.task else ""
    command.announce(
        study.name,
        f"{', '.join(names)}{size}, seeds {', '.join(map(str, study.protocol.seeds))}",
        f"{output.devices()}, data: "
        + ", ".join(f"{k} {v}" for k, v in study.data.items() if "sha256" not in k),
        out,
    )
    with command.Interrupt() as interrupt:
        deadline = resumable.Deadline(args.limit, began, interrupt)
        stopped = complete(study, args, records, deadline)
    found = records.of_task()
    output.write_json(results(study, found), out / "results.json")
    if interrupt.number:
        done = stopped or "all runs are done"
        print(f"{study.name}: interrupted, {done}. Go on with: {command.again()}")
        sys.exit(128 + interrupt.number)
    chosen = [optimizer for optimizer, _ in study.optimizers]
    summaries, left_out = grid.summarize(grid.named(found, chosen), study.protocol, names)
    written = "results.json"
    if summaries:
        curves.plot(summaries, out / "curves.png")
        written += ", curves.png"
        if curves.plot_measures(summaries, out / "diagnostics.png"):
            written += ", diagnostics.png"
        print(f"\n{report.text(summaries)}\n")
    for name, why in left_out.items():
        print(f"`{name}` is left out: {why}.")
    seconds = time.perf_counter() - began
    print(f"Runs done: {len(found)}, in {out}: {written}; {seconds:.0f} s this time.")
    if stopped:
        print(f"The limit came first: {stopped}. Give the same command again to go on.")
    return summaries


def main(
    parser: command.Flags,
    build: Callable[[argparse.Namespace], Study],
    argv: Sequence[str] | None,
) -> int:
    """Reads the flags, makes the runs that are missing, writes and prints what there is.

    Args:
      parser: the flags.
      build: makes the comparison; what it raises is about flags and files.
      argv: the command line, `sys.argv` by default.

    Returns:
      The exit status, 0 also where the limit came first.
    """
    began = time.perf_counter()
    args = parser.parse_args(argv)
    try:
        comparison = build(args)
    except (OSError, ValueError) as error:
        parser.fail(error)
    run(comparison, args, began)
    return 0
