"""Trains in pieces: a run that is stopped goes on from its checkpoint as if nothing had been.

A task knows how to make some steps of one or several runs at a time; what is here calls it, keeps
the curves, and saves both to disk.
"""

import dataclasses
import math
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt
import optax
import orbax.checkpoint as ocp  # type: ignore[import-untyped, unused-ignore]

from benchmarks import command
from benchmarks.training import grid

# Steps of one call: often enough for a lively progress bar, seldom enough to hide Python.
_STEPS_PER_CALL = 10

State = Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long a run is and how its learning rate changes.

    Attributes:
      steps: number of updates.
      warmup_steps: updates of the linear rise to the peak.
      final_fraction: share of the peak that the cosine ends at.
      eval_every: updates between two evaluations; the last update is evaluated always.
    """

    steps: int
    warmup_steps: int
    final_fraction: float
    eval_every: int

    def learning_rate(self, peak: jax.Array) -> optax.Schedule:
        """Returns the schedule with this peak, which may be traced."""
        shape = optax.warmup_cosine_decay_schedule(
            # Without it the first update would be empty.
            init_value=1 / max(1, self.warmup_steps),
            peak_value=1.0,
            warmup_steps=self.warmup_steps,
            decay_steps=self.steps,
            end_value=self.final_fraction,
        )
        return lambda count: peak * shape(count)

    def evaluated_steps(self) -> list[int]:
        """Returns after how many updates the model is evaluated, the untrained one included."""
        return sorted({*range(0, self.steps, self.eval_every), self.steps})

    def steps_per_call(self, limit: int = _STEPS_PER_CALL) -> int:
        """Returns how many updates one compiled call makes: every evaluation falls between two.

        Args:
          limit: the largest number.
        """
        limit = min(limit, self.steps)
        gaps = np.diff(self.evaluated_steps())
        return max(n for n in range(1, limit + 1) if not np.any(gaps % n))


class Task(Protocol):
    """The training of one model with one optimizer.

    Where several runs are made together, every array has an axis more in front, one entry a run.

    Attributes:
      steps: number of updates.
      steps_per_call: updates that one call of `advance` makes.
      evaluated_steps: after how many updates `evaluate` is called: 0, `steps`, and multiples of
        `steps_per_call` between them.
    """

    @property
    def steps(self) -> int:  # noqa: D102
        ...

    @property
    def steps_per_call(self) -> int:  # noqa: D102
        ...

    @property
    def evaluated_steps(self) -> Sequence[int]:  # noqa: D102
        ...

    def init(self, cells: Sequence[grid.Cell]) -> State:
        """Makes parameters and state: a tree of arrays, `opt_state` in it."""

    def advance(
        self, state: State, step: int, cells: Sequence[grid.Cell]
    ) -> tuple[State, jax.Array]:
        """Makes `steps_per_call` updates, `step` before them; returns the losses of each, too."""

    def evaluate(self, state: State) -> Mapping[str, jax.Array]:
        """Returns figures of the held-out data: curves by name, see `grid.MEASURE`."""


@dataclasses.dataclass
class Progress:
    """How far the runs of a group are. Innermost lists have an entry for each run.

    Attributes:
      step: updates made.
      losses: those of the updates since the last evaluation.
      train_loss: their mean, between two evaluations.
      curves: what `evaluate` returned, by name.
      seconds: of a step, one for each call.
      pieces: processes that worked on it.
    """

    step: int = 0
    losses: list[list[float]] = dataclasses.field(default_factory=list)
    train_loss: list[list[float]] = dataclasses.field(default_factory=list)
    curves: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    seconds: list[float] = dataclasses.field(default_factory=list)
    pieces: int = 0


@dataclasses.dataclass(frozen=True)
class Deadline:
    """When to stop.

    Attributes:
      limit: seconds from `began`; None is never.
      began: a reading of `time.perf_counter`.
      interrupt: whether a signal came, which ends it, too.
    """

    limit: float | None
    began: float
    interrupt: command.Interrupt | None = None

    def passed(self, seconds: float = 0.0) -> bool:
        """Whether the limit will have passed in so many seconds, or a signal came."""
        if self.interrupt is not None and self.interrupt.number:
            return True
        return self.limit is not None and time.perf_counter() + seconds > self.began + self.limit


def _named(state: State) -> dict[str, jax.Array]:
    # By position: names of leaves hold characters that not every file system takes.
    return {f"{index:05}": leaf for index, leaf in enumerate(jax.tree.leaves(state))}


def save(folder: pathlib.Path, state: State, progress: Progress) -> None:
    """Replaces the checkpoint of a folder; whatever happens meanwhile, one of the two is whole.

    Args:
      folder: the folder, made where it is missing.
      state: a tree of arrays.
      progress: what else belongs to it.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(folder.resolve(), options=options) as manager:
        if manager.latest_step() == progress.step:
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(state)),
            progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
        )
        manager.save(progress.step, args=items, force=True)
        manager.wait_until_finished()


def restore(folder: pathlib.Path, like: State) -> tuple[State, Progress] | None:
    """Reads the checkpoint of a folder.

    Args:
      folder: the folder.
      like: a state of the same structure, where its arrays lie is where the new ones will.

    Returns:
      The state and the progress, or None where there is no checkpoint.
    """
    if not folder.is_dir():
        return None
    with ocp.CheckpointManager(folder.resolve()) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        template = {
            name: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call, unused-ignore]
                leaf.shape, leaf.dtype, sharding=leaf.sharding
            )
            for name, leaf in _named(like).items()
        }
        items = manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(template), progress=ocp.args.JsonRestore()
            ),
        )
    leaves = [items.state[name] for name in template]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), Progress(**items.progress)


def _rows(values: Any) -> list[list[float]]:
    """Arranges (runs, steps) or (steps,) as lists of steps of runs."""
    array = np.asarray(values, np.float64)
    rows: list[list[float]] = np.atleast_2d(array).T.tolist()
    return rows


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _evaluate(task: Task, state: State, progress: Progress) -> None:
    for name, values in task.evaluate(state).items():
        row = np.atleast_1d(np.asarray(values, np.float64)).tolist()
        progress.curves.setdefault(name, []).append(row)


def _finite(progress: Progress) -> npt.NDArray[np.bool_]:
    """Whether all held-out figures are finite up to an evaluation, for (evaluations, runs)."""
    curves = [rows for name, rows in progress.curves.items() if not name.startswith(grid.MEASURE)]
    finite = np.all([np.isfinite(rows) for rows in curves], axis=0)
    accumulated: npt.NDArray[np.bool_] = np.logical_and.accumulate(finite)
    return accumulated


def train(
    task: Task,
    cells: Sequence[grid.Cell],
    folder: pathlib.Path,
    *,
    deadline: Deadline,
    save_every: float = math.inf,
    report: Callable[[int, Progress], object] = lambda steps, progress: None,
) -> list[grid.Record] | None:
    """Makes a group of runs, from its checkpoint if there is one.

    A run diverged where a held-out figure is not finite: what would follow of its curves is None,
    whatever it is trained together with. A group all of whose runs diverged ends early.

    Args:
      task: what is trained.
      cells: the runs, of one optimizer.
      folder: where their checkpoint is, and removed in the end.
      deadline: when to save a checkpoint and stop.
      save_every: seconds between two checkpoints.
      report: called with the number of new steps and the progress: first with those that earlier
        processes made, then after every call.

    Returns:
      The figures of every run, or None if the deadline came first.
    """
    state = task.init(cells)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state["opt_state"])) // len(cells)
    restored = restore(folder, state)
    if restored is None:
        progress = Progress()
        _evaluate(task, state, progress)
    else:
        state, progress = restored
    report(progress.step, progress)
    progress.pieces += 1
    saved = time.perf_counter()
    longest = 0.0
    first = True
    while progress.step < task.steps:
        # A call that would not end in time is not begun.
        if deadline.passed(longest):
            save(folder, state, progress)
            return None
        began = time.perf_counter()
        state, losses = task.advance(state, progress.step, cells)
        progress.losses += _rows(losses)  # waits for the device
        seconds = time.perf_counter() - began
        progress.step += task.steps_per_call
        if not first:  # which compiles
            progress.seconds.append(seconds / task.steps_per_call)
            longest = max(longest, seconds)
        first = False
        if progress.step in task.evaluated_steps:
            _evaluate(task, state, progress)
            progress.train_loss.append(_means(progress.losses))
            progress.losses = []
            report(task.steps_per_call, progress)
            if not _finite(progress)[-1].any():
                break
        else:
            report(task.steps_per_call, progress)
        if time.perf_counter() - saved > save_every:
            save(folder, state, progress)
            saved = time.perf_counter()
    if folder.is_dir():
        shutil.rmtree(folder)
    return [_record(task, progress, index, len(cells), state_bytes) for index in range(len(cells))]


def _record(
    task: Task, progress: Progress, index: int, together: int, state_bytes: int
) -> grid.Record:
    """Collects the figures of one run."""
    evaluations = len(task.evaluated_steps)
    # The first evaluation that is not finite is the last one.
    known = 1 + int(_finite(progress)[:, index].sum())

    def curve(rows: Sequence[Sequence[float]], known: int, length: int) -> list[float | None]:
        values = [row[index] for row in rows[:known]]
        finite = [value if math.isfinite(value) else None for value in values]
        return finite + [None] * (length - len(finite))

    # A single call has nothing to compare with: then there is no time without compiling.
    seconds = statistics.median(progress.seconds) / together if progress.seconds else math.nan
    return {
        "steps": list(task.evaluated_steps),
        "curves": {name: curve(rows, known, evaluations) for name, rows in progress.curves.items()},
        "train_loss": curve(progress.train_loss, known - 1, evaluations - 1),
        "seconds_per_step": seconds if math.isfinite(seconds) else None,
        "state_bytes": state_bytes,
        "together": together,
        "pieces": progress.pieces,
    }
