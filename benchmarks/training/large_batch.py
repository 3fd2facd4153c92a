r"""Trains a GPT at several batch sizes with several optimizers, tuned alike, on one device.

From the root of the repository:

    python -m benchmarks.training.large_batch
    python -m benchmarks.training.large_batch --layers=4 --width=256 --context=512 --steps=500 \
        --batch_tokens=8192,32768,131072,524288 --microbatch_tokens=32768 --data_file=train.bin \
        --validation_file=val.bin --optimizers=adamw,nadamw,mars --grid=3 --final_seeds=1,2,3

From the second batch size on, a grid of learning rates lies around the best one of the batch size
before. The same command again goes on where the one before stopped. Each batch size has a folder of
its own below `--out`.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import command, gpt2_shapes
from benchmarks.training import data, fast_gpt, gpt2, grid, resumable, study
from benchmarks.training.optimizers import Optimizer

# Layers are stacked: a matrix is the last two axes of a kernel, or an embedding.
DOMAIN = dataclasses.replace(
    gpt2.DOMAIN,
    matrices={
        "all": functools.partial(gpt2_shapes.dimension_numbers, embeddings=True),
        "hidden": functools.partial(gpt2_shapes.dimension_numbers, embeddings=False),
    },
)
_EVALUATED_TOGETHER = 32


class Program:
    """The compiled training of one model with one optimizer, at any number of microbatches.

    Args:
      config: the model.
      optimizer: the optimizer.
      schedule: length and learning rate.
      microbatch: windows of a forward and backward pass.
      tokens: training tokens, on the device.
      held_out: windows to evaluate on.
      steps_per_call: updates of a compiled call.
    """

    def __init__(
        self,
        config: fast_gpt.Config,
        optimizer: Optimizer,
        schedule: resumable.Schedule,
        microbatch: int,
        tokens: jax.Array,
        held_out: jax.Array,
        steps_per_call: int,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.microbatch = microbatch
        self.steps_per_call = steps_per_call
        self._optimizer = optimizer
        self._tokens = tokens
        # Groups of equal size, so that the mean of their means is the mean.
        together = math.gcd(len(held_out), _EVALUATED_TOGETHER)
        self._held_out = held_out.reshape(-1, together, held_out.shape[-1])
        many = jax.vmap(self._updates, in_axes=(0, 0, 0, None, None, None))
        self._advance = {
            True: jax.jit(self._updates, donate_argnums=0),
            False: jax.jit(many, donate_argnums=0),
        }
        self._evaluate = {
            True: jax.jit(self._loss),
            False: jax.jit(jax.vmap(self._loss, in_axes=(0, None))),
        }

    @functools.cached_property
    def init(self) -> Any:
        """Maps a seed to parameters and state."""
        transformation = self._optimizer.transformation(optax.constant_schedule(0.0))

        def init(seed: jax.Array) -> dict[str, Any]:
            params = fast_gpt.init(self.config, jax.random.key(seed))
            return {"params": params, "opt_state": transformation.init(params)}

        return jax.jit(init)

    def arguments(
        self, cells: Sequence[grid.Cell], step: int, microbatches: int
    ) -> tuple[Any, ...]:
        """Returns what `advance` takes behind the state: seeds, rates, step, count, tokens."""
        seeds = np.asarray([cell.seed for cell in cells], np.uint32)
        rates = np.asarray([cell.learning_rate for cell in cells], np.float32)
        if len(cells) == 1:
            seeds, rates = seeds[0], rates[0]
        return seeds, rates, np.int32(step), np.int32(microbatches), self._tokens

    def advance(self, alone: bool) -> Any:
        """Returns the jitted function that makes `steps_per_call` updates of one run or several."""
        return self._advance[alone]

    def evaluate(self, params: Any, alone: bool) -> jax.Array:
        """Averages the loss over the held-out windows."""
        losses: jax.Array = self._evaluate[alone](params, self._held_out)
        return losses

    def _loss(self, params: Any, windows: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.map(functools.partial(fast_gpt.loss, self.config, params), windows))

    def windows(self, seed: jax.Array, step: jax.Array, index: Any, tokens: Any) -> jax.Array:
        """Draws a microbatch: seed, step and a window's number in the batch decide on it."""
        key = jax.random.fold_in(jax.random.key(seed), step)

        def draw(number: jax.Array) -> jax.Array:
            start = jax.random.randint(
                jax.random.fold_in(key, number), (), 0, len(tokens) - self.config.context
            )
            return jax.lax.dynamic_slice_in_dim(tokens, start, self.config.context + 1)

        numbers = index * self.microbatch + jnp.arange(self.microbatch)
        return jax.vmap(draw)(numbers).astype(jnp.int32)

    def value_and_gradient(
        self, params: Any, seed: jax.Array, step: jax.Array, microbatches: jax.Array, tokens: Any
    ) -> tuple[jax.Array, Any]:
        """Averages loss and gradients over the microbatches of a step."""

        def add(index: jax.Array, total: Any) -> Any:
            windows = self.windows(seed, step, index, tokens)
            one = jax.value_and_grad(functools.partial(fast_gpt.loss, self.config))(params, windows)
            return jax.tree.map(jnp.add, total, one)

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total = jax.lax.fori_loop(0, microbatches, add, zeros)
        value, gradient = jax.tree.map(lambda x: x / microbatches, total)
        return value, gradient

    def update(
        self,
        state: dict[str, Any],
        seed: jax.Array,
        peak: jax.Array,
        step: jax.Array,
        microbatches: jax.Array,
        tokens: jax.Array,
    ) -> tuple[dict[str, Any], jax.Array]:
        """Makes one update; returns the state and the batch's loss."""
        batch = (seed, step, microbatches, tokens)
        loss, gradient = self.value_and_gradient(state["params"], *batch)
        params, opt_state = self._optimizer.step(
            self.schedule.learning_rate(peak),
            lambda params: self.value_and_gradient(params, *batch)[1],
            gradient,
            state["opt_state"],
            state["params"],
        )
        return {"params": params, "opt_state": opt_state}, loss

    def _updates(
        self,
        state: dict[str, Any],
        seed: jax.Array,
        peak: jax.Array,
        first: jax.Array,
        microbatches: jax.Array,
        tokens: jax.Array,
    ) -> tuple[dict[str, Any], jax.Array]:
        def update(state: dict[str, Any], step: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            return self.update(state, seed, peak, step, microbatches, tokens)

        return jax.lax.scan(update, state, first + jnp.arange(self.steps_per_call))


@dataclasses.dataclass(frozen=True)
class Training:
    """A program at one batch size, a `resumable.Task`.

    Attributes:
      program: the program.
      microbatches: their number in a batch.
    """

    program: Program
    microbatches: int

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self.program.schedule.steps

    @property
    def steps_per_call(self) -> int:
        """Updates that one call makes."""
        return self.program.steps_per_call

    @property
    def evaluated_steps(self) -> list[int]:
        """After how many updates the model is evaluated."""
        return self.program.schedule.evaluated_steps()

    def init(self, cells: Sequence[grid.Cell]) -> dict[str, Any]:
        """Makes parameters and state; a seed's parameters are the same for every optimizer."""
        states: dict[str, Any] = study.stacked([self.program.init(cell.seed) for cell in cells])
        return states

    def advance(
        self, state: dict[str, Any], step: int, cells: Sequence[grid.Cell]
    ) -> tuple[dict[str, Any], jax.Array]:
        """Makes the updates of a call; a seed's batches are the same for every optimizer."""
        arguments = self.program.arguments(cells, step, self.microbatches)
        state, losses = self.program.advance(len(cells) == 1)(state, *arguments)
        return state, losses

    def evaluate(self, state: dict[str, Any]) -> Mapping[str, jax.Array]:
        """Averages the loss over the held-out windows."""
        params = state["params"]
        return {"validation_loss": self.program.evaluate(params, params["embed"].ndim == 2)}


def add_model(parser: command.Flags) -> None:
    """Adds the flags of the model, of how it computes, and of the batch."""
    group = parser.add_argument_group("model")
    gpt2.add_sizes(group)
    group.add_argument("--rolled", action="store_true", help="a loop over layers: compiles faster")
    group.add_argument(
        "--logits_chunk", type=command.positive, default=8192, help="tokens whose logits exist"
    )
    group.add_argument(
        "--logits_dtype",
        choices=["bfloat16", "float32"],
        default="float32",
        help="of the logits before their softmax",
    )
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--batch_tokens", type=command.positives, default="1024,4096", help="of an update; several"
    )
    group.add_argument(
        "--microbatch_tokens",
        type=command.positive,
        help="of a forward and backward pass; by default those of the smallest batch",
    )


def model_config(args: argparse.Namespace, vocabulary_size: int) -> fast_gpt.Config:
    """Returns the model of the flags; the vocabulary is rounded up to a multiple of 64.

    Raises:
      ValueError: If the width is no multiple of the heads, or the attention needs a GPU.
    """
    config = gpt2.model_config(
        argparse.Namespace(**vars(args), biases=False, untied=False),
        vocabulary_size,
        jax.default_backend(),
    )
    attention: Any = config.attention
    dtype: Any = config.dtype
    return fast_gpt.Config(
        vocabulary_size=config.vocabulary_size,
        context=config.context,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        dtype=dtype,
        attention=attention,
        unroll=not args.rolled,
        remat=args.remat,
        logits_chunk=args.logits_chunk,
        logits_dtype=args.logits_dtype,
    )


def parser(name: str = "training.large_batch", doc: str | None = __doc__) -> command.Flags:
    """Returns the flags.

    Args:
      name: of the command.
      doc: its docstring.
    """
    parser = study.parser(name, doc)
    add_model(parser)
    group = parser.add_argument_group("training")
    gpt2.add_training(group)
    group.add_argument(
        "--steps_per_call", type=command.positive, default=50, help="updates of a compiled call"
    )
    return parser


def batch_sizes(args: argparse.Namespace, context: int) -> list[tuple[int, int]]:
    """Reads the batch sizes.

    Args:
      args: the flags.
      context: tokens of a window.

    Returns:
      Rising pairs: windows of a microbatch, and microbatches of a batch.

    Raises:
      ValueError: If one is no multiple of the context or of the microbatch, or comes twice.
    """
    sizes = sorted(set(args.batch_tokens))
    microbatch = args.microbatch_tokens or sizes[0]
    if (
        len(sizes) < len(args.batch_tokens)
        or any(size % context or size % min(size, microbatch) for size in sizes)
        or microbatch % context
    ):
        raise ValueError(
            f"Expected --batch_tokens that differ, and are multiples of a window's {context} and, "
            f"above --microbatch_tokens, of that, got {str(args.batch_tokens)[:99]} and "
            f"{microbatch}. Change --batch_tokens or --microbatch_tokens."
        )
    return [(min(size, microbatch) // context, size // min(size, microbatch)) for size in sizes]


class Axis:
    """Comparisons that differ in nothing but the batch size.

    Args:
      args: the flags.

    Raises:
      OSError: If a file is not there.
      ValueError: If flags do not fit each other or the data.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.optimizers = study.parse_optimizers(args, DOMAIN)
        self.protocol = study.protocol(args)
        corpus = gpt2.corpus(args)
        config = model_config(args, corpus.vocabulary_size)
        self.sizes = batch_sizes(args, config.context)
        schedule = gpt2.schedule(args)
        microbatch, count = self.sizes[-1]
        data.require_enough(corpus, context=config.context, batch_size=microbatch * count)
        held_out = data.validation_windows(
            corpus.validation, context=config.context, count=args.eval_windows
        )
        self.config = config
        self.corpus = corpus
        self._schedule = schedule
        self._held_out = jnp.asarray(held_out)
        self._tokens = jnp.asarray(corpus.train)
        self._steps_per_call = schedule.steps_per_call(args.steps_per_call)
        self._programs: dict[tuple[str, int], Program] = {}

    def training(self, microbatch: int, count: int, optimizer: Optimizer) -> Training:
        """Returns the training at a batch size; those of equal microbatches share a program."""
        key = (optimizer.name, microbatch)
        if key not in self._programs:
            self._programs[key] = Program(
                self.config,
                optimizer,
                self._schedule,
                microbatch,
                self._tokens,
                self._held_out,
                self._steps_per_call,
            )
        return Training(self._programs[key], count)

    def comparison(
        self, microbatch: int, count: int, optimizers: Sequence[tuple[Optimizer, Sequence[float]]]
    ) -> study.Study:
        """Returns the comparison at one batch size.

        Args:
          microbatch: windows of a forward and backward pass.
          count: their number in a batch.
          optimizers: with the learning rates that their tuning begins with.
        """
        config = self.config
        tokens = microbatch * count * config.context
        params = jax.eval_shape(lambda: fast_gpt.init(config, jax.random.key(0)))
        return study.Study(
            name="large_batch",
            optimizers=optimizers,
            protocol=self.protocol,
            task={
                "model": dataclasses.asdict(config),
                "parameters": gpt2_shapes.parameters(params),
                "schedule": dataclasses.asdict(self._schedule),
                "tokens_per_step": tokens,
                "microbatch": microbatch,
                "model_flops_per_step": tokens * config.flops_per_token(),
                "eval_windows": len(self._held_out),
                "sha256": self.corpus.description["sha256"],
                "validation_sha256": self.corpus.description["validation_sha256"],
            },
            data=self.corpus.description,
            make=functools.partial(self.training, microbatch, count),
        )

    def run(self, args: argparse.Namespace, began: float) -> None:
        """Makes the runs that are missing, one batch size after the other.

        Args:
          args: the flags.
          began: a reading of `time.perf_counter` that the limit counts from.
        """
        optimizers = self.optimizers
        for microbatch, count in self.sizes:
            comparison = self.comparison(microbatch, count, optimizers)
            out = str(pathlib.Path(args.out) / f"batch_{comparison.task['tokens_per_step']}")
            here = argparse.Namespace(**{**vars(args), "out": out})
            summaries = study.run(comparison, here, began)
            if len(summaries) < len(optimizers):
                break
            optimizers = [
                (optimizer, grid.around(summary.learning_rate, len(rates)))
                for (optimizer, rates), summary in zip(self.optimizers, summaries, strict=True)
            ]


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, makes the runs that are missing, writes and prints what there is."""
    began = time.perf_counter()
    flags = parser()
    args = flags.parse_args(argv)
    try:
        axis = Axis(args)
    except (OSError, ValueError) as error:
        flags.fail(error)
    axis.run(args, began)
    return 0


if __name__ == "__main__":
    command.run("large_batch", main)
