"""How long a run is, what its learning rate does, and what it leaves behind."""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import gpt

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
