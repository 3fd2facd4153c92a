"""Turns training runs into a table and a verdict."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import output


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run did.

    Attributes:
      optimizer: the optimizer's name.
      learning_rate: peak learning rate.
      seed: decided the initial weights and the order of the data.
      steps: when the model was evaluated.
      validation_loss: one value for each of `steps`.
      train_loss: mean over the updates since the evaluation before; one value less.
      seconds_per_step: median, without compiling and evaluating.
      state_bytes: size of the optimizer's state.
      measures: where asked for, what `mars_optax.diagnose` says of held-out gradients at each of
        `steps` but the last.
    """

    optimizer: str
    learning_rate: float
    seed: int
    steps: list[int]
    validation_loss: list[float]
    train_loss: list[float]
    seconds_per_step: float
    state_bytes: int
    measures: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def final_loss(self) -> float:
        """Validation loss after the last update; infinite if the run diverged."""
        loss = self.validation_loss[-1]
        return loss if math.isfinite(loss) else math.inf


@dataclasses.dataclass(frozen=True)
class Summary:
    """One optimizer at its best learning rate.

    Attributes:
      optimizer: the optimizer's name.
      learning_rate: the one with the lowest validation loss at the end, averaged over seeds.
      at_edge: whether it is the lowest or highest of a grid, so that the best may lie outside.
      runs: the runs at that learning rate, in the seeds' order.
      grid: mean of what decided, at the end, for every learning rate.
      metric: what the runs' validation loss is.
      chosen_by: what decided on the learning rate.
      unit: of the metric.
    """

    optimizer: str
    learning_rate: float
    at_edge: bool
    runs: list[Run]
    grid: dict[float, float]
    metric: str = "validation loss"
    chosen_by: str = "validation loss"
    unit: str = "nats per token"

    @property
    def losses(self) -> list[float]:
        """Validation loss at the end, for each seed."""
        return [run.final_loss for run in self.runs]

    @property
    def loss(self) -> float:
        """Mean of `losses`."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        """Largest minus smallest of `losses`."""
        return max(self.losses) - min(self.losses)


def best_rate(losses: Mapping[float, float]) -> tuple[float, bool]:
    """Returns the learning rate of the lowest loss, and whether it is at an edge of several.

    Of equally good ones, as where all diverged, it is the lowest.
    """
    best = min(losses, key=lambda rate: (losses[rate], rate))
    return best, len(losses) > 1 and best in (min(losses), max(losses))


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """Groups runs by optimizer, in order of appearance, and picks each one's learning rate.

    Args:
      runs: every optimizer has to have run at the same seeds, for each learning rate.

    Returns:
      One summary for each optimizer.
    """
    summaries = []
    for name in dict.fromkeys(run.optimizer for run in runs):
        by_rate: dict[float, list[Run]] = {}
        for run in sorted(runs, key=lambda run: (run.learning_rate, run.seed)):
            if run.optimizer == name:
                by_rate.setdefault(run.learning_rate, []).append(run)
        grid = {
            rate: statistics.fmean(run.final_loss for run in group)
            for rate, group in by_rate.items()
        }
        best, at_edge = best_rate(grid)
        summaries.append(Summary(name, best, at_edge, by_rate[best], grid))
    return summaries


def baseline_name(names: Sequence[str]) -> str:
    """Returns the name of what the others are compared with: `adamw`, or else the first."""
    return "adamw" if "adamw" in names else names[0]


def baseline_of(summaries: Sequence[Summary]) -> Summary:
    """Returns the summary of `baseline_name`."""
    name = baseline_name([summary.optimizer for summary in summaries])
    return next(summary for summary in summaries if summary.optimizer == name)


def steps_to_reach(run: Run, loss: float) -> int | None:
    """Returns after how many updates a run was first evaluated at `loss` or below, if ever.

    A loss that is not finite, of a run that diverged, is never reached.
    """
    if not math.isfinite(loss):
        return None
    for step, value in zip(run.steps, run.validation_loss, strict=True):
        if value <= loss:
            return step
    return None


def reached(candidate: Summary, baseline: Summary) -> list[int]:
    """Returns `steps_to_reach` the baseline's final loss at the same seed, of seeds that do."""
    steps = (
        steps_to_reach(run, reference.final_loss)
        for run, reference in zip(candidate.runs, baseline.runs, strict=True)
    )
    return [step for step in steps if step is not None]


def mean_steps_to_reach(candidate: Summary, baseline: Summary) -> float | None:
    """Averages `reached`; None unless every seed gets there."""
    steps = reached(candidate, baseline)
    return statistics.fmean(steps) if len(steps) == len(candidate.runs) else None


def milliseconds(seconds: float) -> str:
    """Words the time of a step; '-' where it is not known, as of a run that is one call."""
    return "-" if math.isnan(seconds) else f"{1000 * seconds:.1f}"


def when_reached(
    candidate: Summary, baseline: Summary, form: str, seconds_per_step: float = 1.0
) -> str:
    """Words `reached` for a table.

    Args:
      candidate: the optimizer in question.
      baseline: the optimizer whose final loss is to be reached, run at the same seeds.
      form: a format specification of the mean.
      seconds_per_step: a factor of the mean, where it is seconds that are to be told.

    Returns:
      The mean where every seed gets there, else how many do, or 'never'; '-' where the baseline
      diverged at some seed, so that there is nothing to reach, or the time of a step is not known.
    """
    if math.isinf(baseline.loss) or math.isnan(seconds_per_step):
        return "-"
    mean = mean_steps_to_reach(candidate, baseline)
    if mean is not None:
        return format(mean * seconds_per_step, form)
    count = len(reached(candidate, baseline))
    return f"{count} of {len(candidate.runs)} seeds" if count else "never"


def differences(candidate: Summary, baseline: Summary) -> list[float]:
    """Returns the candidate's final loss minus the baseline's, for each seed."""
    pairs = zip(candidate.losses, baseline.losses, strict=True)
    return [ours - theirs for ours, theirs in pairs]


def _signed_range(values: Sequence[float]) -> str:
    return f"{min(values):+.4f} to {max(values):+.4f}"


def outcome(candidate: Summary, baseline: Summary) -> str:
    """Decides who won, and whether the difference means anything.

    The yardstick is the seed spread: the larger of the two optimizers' ranges (largest minus
    smallest final loss over the seeds). Only a difference beyond it counts as a win.

    Args:
      candidate: the optimizer in question.
      baseline: the optimizer that it is compared with, run at the same seeds.

    Returns:
      What the candidate did: 'wins', 'loses', 'no winner', or 'one seed', which decides nothing;
      'diverged' or 'both diverged'. Against a baseline that diverged it wins.
    """
    if math.isinf(candidate.loss):
        return "both diverged" if math.isinf(baseline.loss) else "diverged"
    if math.isinf(baseline.loss):
        return "wins"
    if len(candidate.runs) == 1:
        return "one seed"
    difference = statistics.fmean(differences(candidate, baseline))
    if abs(difference) <= max(candidate.spread, baseline.spread):
        return "no winner"
    return "wins" if difference < 0 else "loses"


def verdict(candidate: Summary, baseline: Summary) -> str:
    """Says `outcome` in a sentence or two, with the figures.

    Args:
      candidate: the optimizer in question.
      baseline: the optimizer that it is compared with, run at the same seeds.

    Returns:
      The sentences.
    """
    ours, theirs = candidate.optimizer, baseline.optimizer
    decided = outcome(candidate, baseline)
    if decided == "both diverged":
        return f"{ours} against {theirs}: no winner, both diverged."
    if decided == "diverged":
        return f"{ours} against {theirs}: {theirs} wins, {ours} diverged."
    if math.isinf(baseline.loss):
        return f"{ours} against {theirs}: {ours} wins, {theirs} diverged."
    each = differences(candidate, baseline)
    difference = statistics.fmean(each)
    winner = ours if difference < 0 else theirs
    if decided == "one seed":
        if difference == 0:
            return f"{ours} against {theirs}: a tie at one seed."
        return (
            f"{ours} against {theirs}: {winner} is ahead by {abs(difference):.4f} at one seed. One "
            "seed has no spread and decides nothing: run three or more."
        )
    spread = max(candidate.spread, baseline.spread)
    seeds = f"{difference:+.4f} ({_signed_range(each)} over {len(each)} seeds)"
    if decided == "no winner":
        return (
            f"{ours} against {theirs}: no winner, the difference {seeds} is inside the seed spread "
            f"of {spread:.4f}."
        )
    return (
        f"{ours} against {theirs}: {winner} wins, the difference {seeds} is outside the seed "
        f"spread of {spread:.4f}."
    )


def _loss_text(loss: float) -> str:
    return "diverged" if math.isinf(loss) else f"{loss:.4f}"


def table(summaries: Sequence[Summary]) -> str:
    """Formats each optimizer at its best learning rate, compared with the baseline."""
    baseline = baseline_of(summaries)
    rows = [
        [
            "optimizer",
            "learning rate",
            baseline.metric,
            "over seeds",
            f"minus {baseline.optimizer}",
            f"steps to {baseline.optimizer}'s {baseline.metric.split()[-1]}",
            "ms/step",
            "state bytes",
        ]
    ]
    for summary in summaries:
        finite = not (math.isinf(summary.loss) or math.isinf(baseline.loss))
        seconds = statistics.median(run.seconds_per_step for run in summary.runs)
        rows.append(
            [
                summary.optimizer,
                f"{summary.learning_rate:g}" + (" (edge)" if summary.at_edge else ""),
                _loss_text(summary.loss),
                f"{min(summary.losses):.4f}..{max(summary.losses):.4f}"
                if len(summary.runs) > 1
                else "one seed",
                f"{summary.loss - baseline.loss:+.4f}" if finite else "-",
                when_reached(summary, baseline, ".0f"),
                milliseconds(seconds),
                f"{summary.runs[0].state_bytes:,}",
            ]
        )
    return output.aligned(rows)


def grid_table(summaries: Sequence[Summary]) -> str:
    """Formats what decided, its mean over seeds, of every optimizer at every learning rate."""
    rates = sorted({rate for summary in summaries for rate in summary.grid})
    rows = [["learning rate", *(f"{rate:g}" for rate in rates)]]
    for summary in summaries:
        cells = (_loss_text(summary.grid[rate]) if rate in summary.grid else "" for rate in rates)
        rows.append([summary.optimizer, *cells])
    return output.aligned(rows)


def text(summaries: Sequence[Summary]) -> str:
    """Formats the whole report: table, grid where there was one, verdicts."""
    baseline = baseline_of(summaries)
    parts = [table(summaries)]
    if any(len(summary.grid) > 1 for summary in summaries):
        parts.append(
            f"{baseline.chosen_by.capitalize()} at the end, mean over seeds, of every learning "
            "rate; the table above has each optimizer's best.\n" + grid_table(summaries)
        )
    edges = [summary.optimizer for summary in summaries if summary.at_edge]
    if edges:
        parts.append(
            f"The best learning rate of {', '.join(edges)} is at the edge of the grid: a wider "
            "grid may find a better one."
        )
    others = [summary for summary in summaries if summary is not baseline]
    if others:
        best = min(summaries, key=lambda summary: summary.loss)
        lines = [f"Lowest {baseline.metric}: {best.optimizer} ({_loss_text(best.loss)})."]
        parts.append("\n".join(lines + [verdict(other, baseline) for other in others]))
    return "\n\n".join(parts)
