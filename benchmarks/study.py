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

from benchmarks import curves, environment, grid, optimizers, report, resumable
from benchmarks.optimizers import Optimizer

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


def parser(description: str, *, out: str) -> argparse.ArgumentParser:
    """Returns a parser of the flags that all training benchmarks have.

    Args:
      description: of the command.
      out: the folder that results go to by default.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("comparison")
    rows = group.add_mutually_exclusive_group()
    rows.add_argument(
        "--optimizers",
        default="adamw,mars,mars_m",
        help=f"what to compare, out of {', '.join(optimizers.OPTIMIZERS)}; settings may follow: "
        "'mars:gamma=0.05:b1=0.9'; 'adamw', or else the first, is the baseline",
    )
    rows.add_argument(
        "--table",
        help=f"a named table of optimizers instead: {', '.join(optimizers.TABLES)}, or an "
        f"optimizer and one of {', '.join(optimizers.ABLATIONS)}, such as 'mars/gamma'",
    )
    rates = group.add_mutually_exclusive_group()
    rates.add_argument(
        "--learning_rates", help="peak learning rates that every optimizer is tuned at"
    )
    rates.add_argument(
        "--grid",
        type=_grid,
        help="without --learning_rates: how many, factors of 2 apart, around each one's own "
        f"default, from 1 to {_LARGEST_GRID}; 1 if not given",
    )
    group.add_argument(
        "--extend",
        type=_extension,
        default=4,
        help="learning rates that may be tried beyond a grid while the best is at its edge; those "
        "of earlier commands count",
    )
    group.add_argument("--seeds", default="0", help="seeds that learning rates are tuned at")
    group.add_argument(
        "--final_seeds", help="seeds that the best learning rate is run at; by default --seeds"
    )
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "--vmap", type=positive, default=1, help="runs of one optimizer that are made together"
    )
    group.add_argument(
        "--limit", type=_seconds, help="seconds after which to save a checkpoint and stop"
    )
    group.add_argument(
        "--save_every",
        type=_seconds,
        default=600,
        help="seconds between two checkpoints; 0 is none",
    )
    group.add_argument("--out", default=out, help="folder of the results, and to go on from")
    group.add_argument("--commit", help="what to record as the commit; by default git says")
    return parser


def add_dtype(group: Any) -> None:
    """Adds the flag of the models' dtype to a group of flags."""
    group.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of activations and products; parameters and optimizer are float32",
    )


def _whole(text: str, least: int, largest: int) -> int:
    # Python reads no number of thousands of digits.
    if not text.isdecimal() or not least <= int(text[:99]) <= largest:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to {largest}, got {text[:99]!r}"
        )
    return int(text)


def _extension(text: str) -> int:
    return _whole(text, 0, _LARGEST_GRID)


def _grid(text: str) -> int:
    return _whole(text, 1, _LARGEST_GRID)


def positive(text: str) -> int:
    """Reads a whole number from 1, for `argparse`."""
    return _whole(text, 1, 2**63 - 1)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds from 0, got {text!r}")
    return seconds


def parse_optimizers(
    args: argparse.Namespace, domain: optimizers.Domain
) -> list[tuple[Optimizer, Sequence[float]]]:
    """Reads the optimizers, and the learning rates that each begins with.

    Of those with the same settings the first is kept, and the others are printed.
    """
    texts = args.optimizers.split(",") if args.table is None else optimizers.table(args.table)
    given = (
        []
        if args.learning_rates is None
        else optimizers.parse_learning_rates(args.learning_rates.split(","))
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
    seeds = optimizers.parse_seeds(args.seeds.split(","), "seeds")
    final = (
        seeds
        if args.final_seeds is None
        else optimizers.parse_seeds(args.final_seeds.split(","), "final_seeds")
    )
    return grid.Protocol(seeds, final, args.extend, **curves)


def stacked(trees: Sequence[Any]) -> Any:
    """Stacks the trees of several runs; one is left as it is."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class _Watch:
    """Tells of a group of runs, on a progress bar and in the log."""

    def __init__(self, bar: Any, log: pathlib.Path, cells: Sequence[grid.Cell]) -> None:
        self._bar = bar
        self._log = log
        self._cells = cells
        self._begun = False
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        bar.set_description(f"{cells[0]}{more}")

    def __call__(self, steps: int, progress: resumable.Progress) -> None:
        self._bar.update(steps * len(self._cells))
        if not self._begun:
            # The first call tells what earlier processes did, and logged.
            self._begun = True
            return
        means = progress.losses[-1] if progress.losses else progress.train_loss[-1]
        self._bar.set_postfix_str(f"training loss {min(means):.3f}", refresh=False)
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
            lines.append(json.dumps(report.jsonable(event)) + "\n")
        grid.append(self._log, "".join(lines))


def complete(study: Study, args: argparse.Namespace, records: grid.Records, began: float) -> bool:
    """Makes all runs that are missing.

    Args:
      study: the comparison.
      args: the flags.
      records: the finished runs, to which new ones are added.
      began: a reading of `time.perf_counter` that the limit counts from.

    Returns:
      Whether all are done; else the limit came first.
    """
    out = pathlib.Path(args.out)
    described = environment.describe(args.commit)
    deadline = resumable.Deadline(args.limit, began)
    save_every = args.save_every or math.inf
    with tqdm.tqdm(total=0, unit="step", dynamic_ncols=True) as bar:
        for optimizer, rates in study.optimizers:
            task = study.make(optimizer)
            for wanted in grid.rounds(optimizer, rates, study.protocol, records.of):
                missing = [cell for cell in wanted if records.find(cell) is None]
                bar.total += task.steps * len(missing)
                for cells in grid.groups(missing, args.vmap):
                    name = grid.digest([grid.key(cell, study.task) for cell in cells])
                    runs = resumable.train(
                        task,
                        cells,
                        out / "checkpoints" / name,
                        deadline=deadline,
                        save_every=save_every,
                        report=_Watch(bar, out / "log.jsonl", cells),
                    )
                    if runs is None:
                        return False
                    extra = {"finished": _now(), "environment": described}
                    records.add(
                        [(cell, {**run, **extra}) for cell, run in zip(cells, runs, strict=True)]
                    )
                    for cell, run in zip(cells, runs, strict=True):
                        value = grid.last(run, study.protocol.chosen_by)
                        bar.write(f"{cell}: {value:.4f}", file=sys.stderr)
    return True


def results(study: Study, records: Sequence[grid.Record]) -> dict[str, Any]:
    """Collects everything about a comparison, for a file of JSON."""
    environments: list[Any] = []
    lean = []
    for record in records:
        if record["environment"] not in environments:
            environments.append(record["environment"])
        lean.append({**record, "environment": environments.index(record["environment"])})
    tree: dict[str, Any] = report.jsonable(
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


def run(study: Study, args: argparse.Namespace, began: float) -> int:
    """Makes the runs that are missing, writes and prints what there is.

    Args:
      study: the comparison.
      args: the flags.
      began: a reading of `time.perf_counter` that the limit counts from.

    Returns:
      The exit status, 0 also where the limit came first.
    """
    try:
        out = report.make_folder(args.out)
    except ValueError as error:
        sys.exit(f"{study.name}: {error}")
    print("data: " + ", ".join(f"{key} {value}" for key, value in study.data.items()))
    records = grid.Records(out / "records.jsonl", study.task)
    done = complete(study, args, records, began)
    found = records.of_task()
    report.write_json(results(study, found), out / "results.json")
    chosen = [optimizer for optimizer, _ in study.optimizers]
    summaries, left_out = grid.summarize(
        grid.named(found, chosen), study.protocol, [optimizer.name for optimizer in chosen]
    )
    if summaries:
        curves.plot(summaries, out / "curves.png")
        print(f"\n{report.text(summaries)}\n")
    for name, why in left_out.items():
        print(f"`{name}` is left out: {why}.")
    seconds = time.perf_counter() - began
    print(f"{len(found)} runs are done in {out}, with results; {seconds:.0f} s this time.")
    if not done:
        print("The limit came before the end: give the same command again to go on.")
    return 0
