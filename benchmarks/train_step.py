"""Times whole training steps of a GPT-2, to see what share of them the optimizer is."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx

from benchmarks import command, gpt, gpt2_shapes, timing
from benchmarks.step_candidates import Candidate
from benchmarks.step_loop import require_finite

# The least that an optimizer can do: what the others add to it is their price.
BASELINE = Candidate("sgd", lambda params: optax.sgd(1e-4))


@dataclasses.dataclass(frozen=True)
class Work:
    """What a training step processes.

    Attributes:
      config: the model.
      batch: windows of a step.
      microbatch: windows of a forward and backward pass; gradients of several are averaged.
    """

    config: gpt.GPTConfig
    batch: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.microbatch < 1 or self.batch % self.microbatch:
            raise ValueError(
                f"Expected a batch that is a multiple of the microbatch, got {self.batch} and "
                f"{self.microbatch}. Change the batch or --microbatch."
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.config.context

    def model_flops(self, parameters: int) -> int:
        """Returns a step's operations, 6 a parameter and token and those of the full attention.

        The estimate of Chowdhery et al., PaLM, 2022, appendix B: what remat computes again does not
        count, and of the causal half both halves do.
        """
        config = self.config
        attention = 12 * config.layers * config.width * config.context
        return self.tokens * (6 * parameters + attention)


def attention_implementation(choice: str, backend: str) -> str:
    """Decides how attention is computed.

    Args:
      choice: "xla", "cudnn", or "auto": cuDNN on a GPU if it can, else XLA.
      backend: JAX's default backend.

    Raises:
      ValueError: If cuDNN is asked for without a GPU.
    """
    if choice == "cudnn" and backend != "gpu":
        raise ValueError(
            f"Expected --attention=auto or --attention=xla where there is no GPU, got {choice} on "
            f"{backend}. cuDNN's attention needs a GPU."
        )
    if choice != "auto":
        return choice
    if backend != "gpu":
        return "xla"
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

    def attend(x: jax.Array) -> jax.Array:
        return jnp.sum(
            jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn"),
            dtype=jnp.float32,
        )

    try:
        timing.wait(jax.jit(jax.grad(attend))(x))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logging.info("cuDNN's attention cannot be used, XLA's is: %s", error)
        return "xla"
    return "cudnn"


def abstract_model(config: gpt.GPTConfig) -> tuple[Any, Any]:
    """Returns a model as its graph and its abstract parameters."""
    graph, params = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    return graph, params


def build_step(
    graph: Any, candidate: Candidate, params: Any, work: Work
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

    def gradient(params: Any, windows: jax.Array) -> Any:
        return jax.grad(lambda p: gpt.loss(nnx.merge(graph, p), windows))(params)

    def train(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
        if len(windows) == 1:
            grads = gradient(params, windows[0])
        else:

            def add(total: Any, one: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient(params, one)), None

            total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), windows)
            grads = jax.tree.map(lambda g: g / len(windows), total)
        # Not in a chain, which `fused_step` would not see through.
        clipped, _ = clip.update(grads, optax.EmptyState())
        return step(clipped, state, params)

    return transformation, train


def measure(
    candidates: Sequence[Candidate], work: Work, *, steps: int, repeats: int
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
    graph, abstract = abstract_model(work.config)
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
