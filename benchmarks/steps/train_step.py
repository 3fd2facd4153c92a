"""Times whole training steps of a GPT-2, to see what share of them the optimizer is."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import command, gpt2_shapes
from benchmarks.steps import timing
from benchmarks.steps.step_candidates import Candidate
from benchmarks.steps.step_loop import require_finite
from benchmarks.training import models

# The least that an optimizer can do: what the others add to it is their price.
BASELINE = Candidate("sgd", lambda params: optax.sgd(1e-4))


def build_step(
    graph: Any, candidate: Candidate, params: Any, work: models.Work
) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """Builds a training step: gradients over microbatches, a global clip, the optimizer.

    Args:
      graph: the model without its parameters.
      candidate: the optimizer.
      params: the parameters, concrete or abstract.
      work: what a step processes.

    Returns:
      The candidate's transformation, and the step, which maps parameters, its state and windows
      (microbatches, microbatch, context + 1) to parameters and state.
    """
    transformation = candidate.build(params)
    step = candidate.step(transformation)
    clip = optax.clip_by_global_norm(1.0)

    def train(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
        _, grads = models.value_and_gradient(graph, params, windows)
        # Not in a chain, which `fused_step` would not see through.
        clipped, _ = clip.update(grads, optax.EmptyState())
        return step(clipped, state, params)

    return transformation, train


def measure(
    candidates: Sequence[Candidate], work: models.Work, *, steps: int, repeats: int
) -> list[dict[str, Any]]:
    """Times training steps with every optimizer, in turns, so that a drift meets all.

    The tokens are random: they cost what others cost. A step is one call of a compiled function,
    with parameters and state donated; `steps` calls are queued before one waits.

    Args:
      candidates: the optimizers, without `BASELINE`, which is added.
      work: what a step processes.
      steps: number of steps that are queued.
      repeats: number of turns.

    Returns:
      A row for each optimizer, the baseline first; one that fails has an "error" instead of
      figures.
    """
    graph, abstract = models.abstract_model(work.config)
    host = gpt2_shapes.normal(abstract, 0.02, seed=0)
    parameters = gpt2_shapes.parameters(abstract)
    rng = np.random.default_rng(0)
    shape = (work.batch // work.microbatch, work.microbatch, work.config.context + 1)
    windows = jnp.asarray(rng.integers(work.config.vocabulary_size, size=shape), jnp.int32)

    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], Any]] = {}
    carries: dict[str, list[Any]] = {}
    times: dict[str, list[float]] = {}

    def prepare(candidate: Candidate) -> dict[str, Any]:
        transformation, train = build_step(graph, candidate, abstract, work)
        params = jax.tree.map(jnp.array, host)
        carry = [params, transformation.init(params)]
        compiled = jax.jit(train, donate_argnums=(0, 1)).lower(*carry, windows).compile()

        def run() -> list[Any]:
            for _ in range(steps):
                carry[:] = compiled(*carry, windows)
            return carry

        timing.wait(run())
        runs[candidate.name], carries[candidate.name] = run, carry
        return {}

    def figures(name: str) -> dict[str, Any]:
        require_finite(carries[name][0])
        summary = timing.summary(times[name])
        return {
            **summary,
            "tokens_per_second": 1000 * work.tokens / summary["ms"],
            "model_flop_per_second": 1000 * work.model_flops(parameters) / summary["ms"],
        }

    for candidate in (BASELINE, *candidates):
        row = {"name": candidate.name, "parameters": parameters, "tokens": work.tokens}
        rows.append(command.guarded(row, functools.partial(prepare, candidate)))
    for _ in range(repeats):
        for name, run in runs.items():
            times.setdefault(name, []).append(timing.milliseconds(run) / steps)
    return [
        row if "error" in row else command.guarded(row, functools.partial(figures, row["name"]))
        for row in rows
    ]
