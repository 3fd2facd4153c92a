"""Which runs a comparison needs, which of them are done, and what they say.

Learning rates are tuned at some seeds, and the best one is run at others. A finished run is a line
of a file, found again by its settings, so a comparison can be made in pieces and added to.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.training import report
from benchmarks.training.optimizers import LEARNING_RATES, Optimizer

Record = dict[str, Any]
# What the names of curves begin with that say what an optimizer does, not how good the model is.
MEASURE = "measure/"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: an optimizer at a peak learning rate; the seed decides weights and data."""

    optimizer: Optimizer
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.optimizer.name}, {self.learning_rate:g}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How learning rates are chosen, and what is compared.

    Attributes:
      seeds: at which the learning rates are tuned.
      final_seeds: at which each optimizer's best learning rate is run.
      extend: how many learning rates beyond those given may be tried while the best is at an edge;
        those of earlier commands count.
      chosen_by: the curve whose last value, the lower the better, decides on the learning rate.
      compared: the curve that is reported.
      unit: of `compared`.
    """

    seeds: Sequence[int]
    final_seeds: Sequence[int]
    extend: int = 0
    chosen_by: str = "validation_loss"
    compared: str = "validation_loss"
    unit: str = "nats per token"


def digest(tree: Any) -> str:
    """Returns a short hash of anything that JSON can hold; the order of keys does not count."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def key(cell: Cell, task: Mapping[str, Any]) -> str:
    """Names a run by its settings.

    Args:
      cell: the run. Of its optimizer the settings count, not how the user wrote them.
      task: everything else that decides on the result: model, data, length.

    Returns:
      A hash.
    """
    optimizer = cell.optimizer
    settings = [optimizer.base, dict(optimizer.settings), cell.learning_rate, cell.seed]
    return digest([settings, dict(task)])


class Records:
    """The finished runs of a file of JSON lines.

    Args:
      path: the file; it need not be there.
      task: what all runs of interest have in common. Those of other tasks are left alone.
    """

    def __init__(self, path: pathlib.Path, task: Mapping[str, Any]) -> None:
        self._path = path
        self._task = task
        self._found: dict[str, Record] = {}
        for record in read_lines(path):
            if record.keys() >= {"key", "task"}:
                self._found[record["key"]] = record

    def find(self, cell: Cell) -> Record | None:
        """Returns the record of a run, or None if it is not done."""
        return self._found.get(key(cell, self._task))

    def add(self, runs: Sequence[tuple[Cell, Record]]) -> None:
        """Appends finished runs to the file, all at once."""
        lines = []
        for cell, figures in runs:
            record = {
                "key": key(cell, self._task),
                "task": digest(dict(self._task)),
                "optimizer": cell.optimizer.name,
                "settings": dict(cell.optimizer.settings),
                "every_setting": cell.optimizer.every_setting(),
                "learning_rate": cell.learning_rate,
                "seed": cell.seed,
                **figures,
            }
            self._found[record["key"]] = record
            lines.append(json.dumps(record) + "\n")
        append(self._path, "".join(lines))

    def of_task(self) -> list[Record]:
        """Returns the records of the task."""
        task = digest(dict(self._task))
        return [record for record in self._found.values() if record["task"] == task]

    def of(self, optimizer: Optimizer) -> list[Record]:
        """Returns the records of the task with an optimizer, see `named`."""
        return named(self.of_task(), [optimizer])


def append(path: pathlib.Path, text: str) -> None:
    """Appends lines to a file, below a last one that a killed process may have left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(text.encode())


def read_lines(path: pathlib.Path) -> Iterator[Record]:
    """Yields the records of a file of JSON lines; what is no record is passed over.

    A line may be unfinished, where a process was killed, or not ours.
    """
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def last(record: Record, curve: str) -> float:
    """Returns the last value of a curve; infinite if the run diverged."""
    value = record["curves"][curve][-1]
    return value if value is not None and math.isfinite(value) else math.inf


def around(center: float, count: int) -> list[float]:
    """Returns a grid of learning rates, factors of 2 apart; an even count has one more below."""
    powers = range(-(count // 2), count - count // 2)
    return [_rounded(center * 2.0**power) for power in powers]


def beyond_edge(losses: Mapping[float, float]) -> float | None:
    """Returns the learning rate to try next.

    Args:
      losses: by learning rate. An infinite one is a run that diverged.

    Returns:
      The next one of the grid beyond the best, as far from it as its neighbour is; None if the
      best is inside the grid, there is no grid, or it would be none of `LEARNING_RATES`.
    """
    rates = sorted(losses)
    if len(rates) < 2:
        return None
    best, _ = report.best_rate(losses)
    if best not in (rates[0], rates[-1]):
        return None
    further = _rounded(best * best / (rates[1] if best == rates[0] else rates[-2]))
    return further if LEARNING_RATES[0] <= further <= LEARNING_RATES[1] else None


def _rounded(rate: float) -> float:
    # 2e-3 is 2e-3 again after a factor of 2 up and down.
    return float(f"{rate:.6g}")


def _by_cell(records: Sequence[Record]) -> dict[tuple[float, int], Record]:
    return {(record["learning_rate"], record["seed"]): record for record in records}


def tuned(records: Sequence[Record], protocol: Protocol) -> dict[float, float]:
    """Averages what decides on the learning rate over the tuning seeds.

    Args:
      records: runs of one optimizer.
      protocol: which seeds, and what decides.

    Returns:
      The mean for each learning rate that has run at all tuning seeds, in rising order.
    """
    by_cell = _by_cell(records)
    losses = {}
    for rate in sorted({rate for rate, _ in by_cell}):
        found = [by_cell.get((rate, seed)) for seed in protocol.seeds]
        known = [last(record, protocol.chosen_by) for record in found if record is not None]
        if len(known) == len(found):
            losses[rate] = statistics.fmean(known)
    return losses


def rounds(
    optimizer: Optimizer,
    rates: Sequence[float],
    protocol: Protocol,
    find: Callable[[Optimizer], Sequence[Record]],
) -> Iterator[list[Cell]]:
    """Yields the runs that an optimizer needs, as the results of those before tell.

    Args:
      optimizer: the optimizer.
      rates: the grid to begin with. Other learning rates that have run at all tuning seeds count
        too, as in `summarize`.
      protocol: how the learning rate is chosen.
      find: returns the records of an optimizer. When the next round is asked for, those of the
        rounds before have to be there.

    Yields:
      First the grid, then learning rates beyond its edge, one a round, then the final seeds.
    """
    yield [Cell(optimizer, rate, seed) for rate in rates for seed in protocol.seeds]
    for _ in range(protocol.extend):
        losses = tuned(find(optimizer), protocol)
        further = beyond_edge(losses)
        # Those that an earlier command tried count, so that the same one again goes no further.
        beyond = [rate for rate in losses if not min(rates) <= rate <= max(rates)]
        if further is None or len(beyond) >= protocol.extend:
            break
        yield [Cell(optimizer, further, seed) for seed in protocol.seeds]
    best, _ = report.best_rate(tuned(find(optimizer), protocol))
    yield [Cell(optimizer, best, seed) for seed in protocol.final_seeds]


def groups(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Cuts runs into groups of at most `size` that are made together."""
    return [list(cells[start : start + size]) for start in range(0, len(cells), size)]


def named(records: Sequence[Record], optimizers: Sequence[Optimizer]) -> list[Record]:
    """Picks the records of some optimizers, under the names that these have.

    Args:
      records: runs of one task.
      optimizers: the optimizers, found by their settings: `mars:gamma=0.025` may have been run as
        `mars`.

    Returns:
      Copies of their records.
    """
    found = []
    for optimizer in optimizers:
        for record in records:
            base = record["optimizer"].partition(":")[0]
            if base == optimizer.base and record["settings"] == dict(optimizer.settings):
                found.append({**record, "optimizer": optimizer.name})
    return found


def run_of(record: Record, curve: str) -> report.Run:
    """Returns a record as a run whose validation loss is one of its curves."""
    return report.Run(
        optimizer=record["optimizer"],
        learning_rate=record["learning_rate"],
        seed=record["seed"],
        steps=record["steps"],
        validation_loss=[math.nan if x is None else x for x in record["curves"][curve]],
        train_loss=[math.nan if x is None else x for x in record["train_loss"]],
        seconds_per_step=math.nan
        if record["seconds_per_step"] is None
        else record["seconds_per_step"],
        state_bytes=record["state_bytes"],
        measures={
            name.removeprefix(MEASURE): [math.nan if x is None else x for x in values[:-1]]
            for name, values in record["curves"].items()
            if name.startswith(MEASURE)
        },
    )


def summarize(
    records: Sequence[Record], protocol: Protocol, names: Sequence[str] | None = None
) -> tuple[list[report.Summary], dict[str, str]]:
    """Picks each optimizer's learning rate at the tuning seeds and collects its final seeds.

    Args:
      records: runs of one task.
      protocol: how the learning rate is chosen, and what is compared.
      names: the optimizers, in order; by default all, as they come.

    Returns:
      One summary for each optimizer that all final seeds are there of; and why there is none of
      the others, by name.
    """
    summaries, left_out = [], {}
    for name in names or list(dict.fromkeys(record["optimizer"] for record in records)):
        own = [record for record in records if record["optimizer"] == name]
        losses = tuned(own, protocol)
        if not losses:
            seeds = ", ".join(map(str, protocol.seeds))
            left_out[name] = (
                f"no learning rate has run at all of seeds {seeds}" if own else "no run"
            )
            continue
        best, at_edge = report.best_rate(losses)
        by_cell = _by_cell(own)
        missing = [seed for seed in protocol.final_seeds if (best, seed) not in by_cell]
        if missing:
            left_out[name] = (
                f"{best:g}, its best, has not run at seeds {', '.join(map(str, missing))}"
            )
            continue
        summaries.append(
            report.Summary(
                optimizer=name,
                learning_rate=best,
                at_edge=at_edge,
                runs=[
                    run_of(by_cell[best, seed], protocol.compared) for seed in protocol.final_seeds
                ],
                grid=losses,
                metric=protocol.compared.replace("_", " "),
                chosen_by=protocol.chosen_by.replace("_", " "),
                unit=protocol.unit,
            )
        )
    return summaries, left_out
