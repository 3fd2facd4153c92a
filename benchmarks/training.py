"""Trains one model with one optimizer and records what it did."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

import mars_optax
from benchmarks import data, gpt
from benchmarks.optimizers import Optimizer

Params: TypeAlias = "nnx.State[Any, Any]"

# Steps of one call: often enough for a lively progress bar, seldom enough to hide Python.
_STEPS_PER_CALL = 10
_EVALUATION_BATCH = 64


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
      measures: where asked for, what `mars_optax.diagnose` says of the next batch's gradients at
        each of `steps` but the last.
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
        return loss if np.isfinite(loss) else float("inf")


def tree_bytes(tree: object) -> int:
    """Returns the bytes of all arrays of a tree, concrete or abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.partial(jax.jit, static_argnums=0)
def evaluate(graph: nnx.GraphDef[gpt.GPT], params: Params, windows: jax.Array) -> jax.Array:
    """Averages the loss over windows (any number, context + 1), a batch at a time."""
    model = nnx.merge(graph, params)
    losses = jax.lax.map(
        lambda window: gpt.loss(model, window[None]), windows, batch_size=_EVALUATION_BATCH
    )
    return jnp.mean(losses)


class Trainer:
    """One optimizer's training of one model.

    Learning rate, seed and data are arguments of the compiled function, so a sweep compiles once.
    """

    def __init__(self, config: gpt.GPTConfig, optimizer: Optimizer, schedule: Schedule) -> None:
        self._config = config
        self._optimizer = optimizer
        self._schedule = schedule
        self._graph = nnx.split(nnx.eval_shape(lambda: self._model(0)))[0]
        self._compiled: jax.stages.Compiled | None = None

    def _model(self, seed: int) -> gpt.GPT:
        return gpt.GPT(self._config, rngs=nnx.Rngs(seed))

    def _transformation(self, peak: jax.Array) -> optax.GradientTransformation:
        return self._optimizer.transformation(self._schedule.learning_rate(peak))

    def _loss(self, params: Params, windows: jax.Array) -> jax.Array:
        return gpt.loss(nnx.merge(self._graph, params), windows)

    def _updates(
        self, params: Params, state: optax.OptState, windows: jax.Array, peak: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        schedule = self._schedule.learning_rate(peak)

        def update(
            carry: tuple[Params, optax.OptState], batch: jax.Array
        ) -> tuple[tuple[Params, optax.OptState], jax.Array]:
            params, state = carry
            loss, grads = jax.value_and_grad(self._loss)(params, batch)

            def gradient(params: Params) -> Params:
                grads: Params = jax.grad(self._loss)(params, batch)
                return grads

            return self._optimizer.step(schedule, gradient, grads, state, params), loss

        (params, state), losses = jax.lax.scan(update, (params, state), windows)
        return params, state, losses

    def _measures(
        self, params: Params, state: optax.OptState, windows: jax.Array
    ) -> dict[str, jax.Array]:
        grads = self._optimizer.clip(jax.grad(self._loss)(params, windows))
        settings = self._optimizer.settings
        names = ("gamma", "b1", "max_norm")
        known = {name: settings[name] for name in names if name in settings}
        return mars_optax.diagnose(grads, state, **known)

    def train(
        self,
        corpus: data.Corpus,
        held_out: data.Windows,
        *,
        learning_rate: float,
        seed: int,
        batch_size: int,
        diagnose: bool = False,
        progress: Callable[[int, float], object] = lambda steps, loss: None,
    ) -> Run:
        """Trains from scratch.

        Args:
          corpus: training text.
          held_out: windows to evaluate on.
          learning_rate: peak learning rate.
          seed: decides the initial weights and the order of the data.
          batch_size: windows in a batch.
          diagnose: whether to record what the correction does, at every evaluation.
          progress: called after every few updates with their number and their mean loss.

        Returns:
          The run's record.
        """
        schedule = self._schedule
        params = nnx.state(self._model(seed))
        peak = jnp.float32(learning_rate)
        state = self._transformation(peak).init(params)
        starts = data.training_starts(
            seed,
            steps=schedule.steps,
            batch_size=batch_size,
            context=self._config.context,
            length=len(corpus.train),
        ).reshape(-1, schedule.steps_per_call(), batch_size)
        state_bytes = tree_bytes(state)
        if self._compiled is None:
            jitted = jax.jit(self._updates, donate_argnums=(0, 1))
            example = self._windows(corpus, starts[0])
            self._compiled = jitted.lower(params, state, example, peak).compile()

        evaluated = schedule.evaluated_steps()
        validation_loss = [float(evaluate(self._graph, params, held_out))]
        train_loss: list[float] = []
        losses: list[float] = []
        seconds: list[float] = []
        measures: dict[str, list[float]] = {}
        measure = jax.jit(self._measures)
        step = 0
        for call_starts in starts:
            windows = self._windows(corpus, call_starts)
            if diagnose and step in evaluated:
                for name, value in measure(params, state, windows[0]).items():
                    measures.setdefault(name, []).append(float(value))
            began = time.perf_counter()
            params, state, call_losses = self._compiled(params, state, windows, peak)
            losses += call_losses.tolist()  # waits for the device
            seconds.append((time.perf_counter() - began) / len(windows))
            step += len(windows)
            progress(len(windows), statistics.fmean(losses[-len(windows) :]))
            if step in evaluated:
                validation_loss.append(float(evaluate(self._graph, params, held_out)))
                train_loss.append(statistics.fmean(losses))
                losses = []
        return Run(
            optimizer=self._optimizer.name,
            learning_rate=learning_rate,
            seed=seed,
            steps=evaluated,
            validation_loss=validation_loss,
            train_loss=train_loss,
            seconds_per_step=statistics.median(seconds),
            state_bytes=state_bytes,
            measures=measures,
        )

    def _windows(self, corpus: data.Corpus, starts: npt.NDArray[np.int64]) -> jax.Array:
        return jnp.asarray(data.windows_at(corpus.train, starts, self._config.context))
