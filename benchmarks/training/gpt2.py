r"""Trains GPT-2, of any size, with several optimizers: tuned alike, resumable, on all devices.

From the root of the repository:

    python -m benchmarks.training.gpt2
    python -m benchmarks.training.gpt2 --table=main --grid=3 --final_seeds=1,2,3 --model=small \
        --data_file=train.bin --validation_file=val.bin --batch_size=480 --microbatch=32 --limit=540

The same command again goes on where the one before stopped. Activations and products are bfloat16,
parameters and optimizer float32.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mars_optax
from benchmarks import command, gpt2_shapes
from benchmarks.training import data, grid, models, optimizers, resumable, study
from benchmarks.training.optimizers import Optimizer

# Where a grid begins, not what is best: rates of this order did well for 45 million parameters.
DOMAIN = dataclasses.replace(
    optimizers.LANGUAGE,
    learning_rates={
        "adamw": 2e-3,
        "nadamw": 2e-3,
        "mars": 4e-3,
        "lion": 2.5e-4,
        "mars_lion": 2.5e-4,
        "muon": 4e-3,
        "mars_m": 4e-3,
        "corrected_muon": 4e-3,
        "mars_shampoo": 4e-3,
        "storm_adamw": 2e-3,
    },
)


# Of a width or a number of blocks: more would not come to an end of making its parameters.
_LARGEST_SIZE = 2**20


def add_sizes(group: Any) -> None:
    """Adds the flags of a model's sizes, and of how it computes, to a group."""
    group.add_argument(
        "--model", choices=list(gpt2_shapes.MODELS), default="tiny", help="its sizes, unless given"
    )
    for name, meaning in (
        ("width", "size of the residual stream"),
        ("heads", "attention heads; by default one for 64 of the width, at least 2"),
        ("context", "tokens that the model sees"),
        ("vocabulary_size", "number of symbols; by default found in the data"),
    ):
        group.add_argument(f"--{name}", type=command.whole(1, _LARGEST_SIZE), help=meaning)
    group.add_argument("--layers", type=command.whole(1, 1000), help="number of blocks")
    study.add_dtype(group)
    models.add_compute_flags(group)


def add_training(group: Any) -> None:
    """Adds the flags of a run's length, its schedule and its text to a group."""
    group.add_argument("--steps", type=command.positive, default=200, help="updates")
    group.add_argument(
        "--warmup_steps", type=command.whole(0), help="updates of the warm-up; default a tenth"
    )
    group.add_argument(
        "--final_fraction",
        type=command.number(0, 1),
        default=0.1,
        help="share of the peak that the cosine ends at",
    )
    group.add_argument(
        "--eval_every", type=command.positive, default=50, help="updates between two evaluations"
    )
    group.add_argument(
        "--eval_windows", type=command.positive, default=256, help="held-out windows"
    )
    group.add_argument(
        "--data_file",
        type=command.listed,
        help="text, as bytes, or 16-bit token ids as .bin and .bin.xz; by default Python's library",
    )
    group.add_argument("--validation_file", help="held-out text; by default a part of the other")


def parser(name: str = "training.gpt2", doc: str | None = __doc__) -> command.Flags:
    """Returns the flags.

    Args:
      name: of the command.
      doc: its docstring.
    """
    parser = study.parser(name, doc)
    group = parser.add_argument_group("model")
    add_sizes(group)
    group.add_argument(
        "--biases", action="store_true", help="biases, which the runs of the paper do without"
    )
    group.add_argument("--untied", type=bool, default=False, help="an output layer of its own")
    group = parser.add_argument_group("training")
    add_training(group)
    group.add_argument(
        "--batch_size", type=command.positive, default=16, help="windows of an update"
    )
    group.add_argument(
        "--microbatch",
        type=command.positive,
        help="windows of a forward and backward pass; by default all",
    )
    group.add_argument(
        "--devices", type=command.positive, help="devices that share a batch; by default all"
    )
    group.add_argument(
        "--diagnose",
        type=bool,
        default=False,
        help="record and plot what the correction does, at every evaluation",
    )
    return parser


def model_config(args: argparse.Namespace, vocabulary_size: int, backend: str) -> models.GPTConfig:
    """Returns the model of the flags.

    Args:
      args: the flags.
      vocabulary_size: number of symbols, rounded up to a multiple of 64 for the hardware's sake.
      backend: JAX's.

    Raises:
      ValueError: If the width is no multiple of the heads.
    """
    sizes = gpt2_shapes.MODELS[args.model]
    width = args.width or sizes.width
    heads = args.heads or (sizes.heads if args.width is None else max(2, width // 64))
    if width % heads:
        raise ValueError(
            f"Expected a width that is a multiple of the heads, got {width} and {heads}. Change "
            "--width or --heads."
        )
    attention: Any = models.attention_implementation(args.attention, backend)
    return models.GPTConfig(
        vocabulary_size=-(-vocabulary_size // 64) * 64,
        context=args.context or sizes.context,
        width=width,
        layers=args.layers or sizes.layers,
        heads=heads,
        biases=args.biases,
        tied=not args.untied,
        dtype=args.dtype,
        attention=attention,
        remat=args.remat,
    )


class Language:
    """The training of one GPT-2 with one optimizer, a `resumable.Task`.

    Args:
      corpus: the text.
      held_out: windows to evaluate on.
      work: the model, and what an update processes.
      schedule: length and learning rate.
      optimizer: the optimizer.
      devices: what each microbatch is divided over; parameters and state are on all of them.
      diagnose: whether to record what `mars_optax.diagnose` says of the gradients of a microbatch
        of held-out windows.
    """

    def __init__(
        self,
        corpus: data.Corpus,
        held_out: data.Windows,
        work: models.Work,
        schedule: resumable.Schedule,
        optimizer: Optimizer,
        devices: Sequence[jax.Device],
        *,
        diagnose: bool = False,
    ) -> None:
        self._corpus = corpus
        self._work = work
        self._schedule = schedule
        self._optimizer = optimizer
        mesh = jax.make_mesh(
            (len(devices),),
            ("data",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=tuple(devices),
        )
        self._everywhere = NamedSharding(mesh, P())  # type: ignore[no-untyped-call, unused-ignore]
        self._mesh = mesh
        self._graph, self._abstract = models.abstract_model(work.config)
        self._held_out = jax.device_put(held_out, self._everywhere)
        self._advance_one = jax.jit(self._updates, donate_argnums=(0,))
        self._advance_all = jax.jit(jax.vmap(self._updates), donate_argnums=(0,))
        self._measure = jax.jit(self._measures) if diagnose else None
        self._measure_all = jax.jit(jax.vmap(self._measures))
        self._starts: dict[int, Any] = {}
        self._ready: dict[tuple[Any, ...], Any] = {}

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self._schedule.steps

    @property
    def steps_per_call(self) -> int:
        """Updates that one call makes."""
        return self._schedule.steps_per_call()

    @functools.cached_property
    def evaluated_steps(self) -> list[int]:
        """After how many updates the model is evaluated."""
        return self._schedule.evaluated_steps()

    def init(self, cells: Sequence[grid.Cell]) -> dict[str, Any]:
        """Makes parameters and state; a seed's parameters are the same for every optimizer."""
        transformation = self._optimizer.transformation(optax.constant_schedule(0.0))
        every = []
        for cell in cells:
            params = nnx.state(models.GPT(self._work.config, rngs=nnx.Rngs(cell.seed)), nnx.Param)
            every.append({"params": params, "opt_state": transformation.init(params)})
        return dict(jax.device_put(study.stacked(every), self._everywhere))

    def advance(
        self, state: dict[str, Any], step: int, cells: Sequence[grid.Cell]
    ) -> tuple[dict[str, Any], jax.Array]:
        """Makes the updates of a call; a seed's batches are the same for every optimizer."""
        seeds = tuple(cell.seed for cell in cells)
        rates = np.asarray([cell.learning_rate for cell in cells], np.float32)
        windows = self._batches(seeds, step)
        if len(cells) == 1:
            state, losses = self._advance_one(state, windows, jnp.asarray(rates[0]))
        else:
            state, losses = self._advance_all(state, windows, jnp.asarray(rates))
        # While the device is busy with these.
        following = step + self.steps_per_call
        if following < self.steps:
            self._ready = {(seeds, following): self._batches(seeds, following)}
        return state, losses

    def evaluate(self, state: dict[str, Any]) -> Mapping[str, jax.Array]:
        """Averages the loss over the held-out windows."""
        params = state["params"]
        alone = jax.tree.leaves(params)[0].shape == jax.tree.leaves(self._abstract)[0].shape
        evaluate = models.evaluate if alone else _evaluate_all
        figures = {"validation_loss": evaluate(self._graph, params, self._held_out)}
        if self._measure is not None:
            found = (self._measure if alone else self._measure_all)(state)
            figures |= {f"{grid.MEASURE}{name}": value for name, value in found.items()}
        return figures

    def _measures(self, state: dict[str, Any]) -> dict[str, jax.Array]:
        windows = self._held_out[None, : self._work.microbatch]
        _, grads = models.value_and_gradient(self._graph, state["params"], windows)
        grads = self._optimizer.clip(grads)
        settings = self._optimizer.arguments()
        known = {n: settings[n] for n in ("gamma", "b1", "max_norm") if n in settings}
        return mars_optax.diagnose(grads, state["opt_state"], **known)

    def _batches(self, seeds: tuple[int, ...], step: int) -> jax.Array:
        """Returns the windows of a call, on the devices."""
        if (seeds, step) in self._ready:
            ready: jax.Array = self._ready.pop((seeds, step))
            return ready
        windows = np.stack([self._windows(seed, step) for seed in seeds])
        if len(seeds) == 1:
            windows = windows[0]
        # The last axes are microbatches, windows, tokens.
        spec = P(*[None] * (windows.ndim - 2), "data")  # type: ignore[no-untyped-call, unused-ignore]
        placed: jax.Array = jax.device_put(windows, NamedSharding(self._mesh, spec))
        return placed

    def _windows(self, seed: int, step: int) -> data.Windows:
        work = self._work
        if seed not in self._starts:
            self._starts[seed] = data.training_starts(
                seed,
                steps=self.steps,
                batch_size=work.batch,
                context=work.config.context,
                length=len(self._corpus.train),
            ).reshape(self.steps, -1, work.microbatch)
        starts = self._starts[seed][step : step + self.steps_per_call]
        return data.windows_at(self._corpus.train, starts, work.config.context)

    def _updates(
        self, state: dict[str, Any], windows: jax.Array, peak: jax.Array
    ) -> tuple[dict[str, Any], jax.Array]:
        schedule = self._schedule.learning_rate(peak)

        def update(carry: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            loss, grads = models.value_and_gradient(self._graph, carry["params"], batch)
            params, opt_state = self._optimizer.step(
                schedule,
                lambda params: models.value_and_gradient(self._graph, params, batch)[1],
                grads,
                carry["opt_state"],
                carry["params"],
            )
            return {"params": params, "opt_state": opt_state}, loss

        return jax.lax.scan(update, state, windows)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_all(graph: Any, params: Any, windows: jax.Array) -> jax.Array:
    losses: jax.Array = jax.vmap(lambda p: models.evaluate(graph, p, windows))(params)
    return losses


def corpus(args: argparse.Namespace) -> data.Corpus:
    """Reads the text of the flags.

    Raises:
      OSError: If a file is not there.
      ValueError: If flags do not fit each other or the data.
    """
    if args.data_file is not None:
        return data.load_files(args.data_file, args.validation_file, args.vocabulary_size)
    if args.validation_file is not None or args.vocabulary_size is not None:
        raise ValueError(
            "Expected --data_file beside --validation_file or --vocabulary_size, got none. "
            "Give the training text too."
        )
    return data.load_standard_library()


def schedule(args: argparse.Namespace) -> resumable.Schedule:
    """Reads the length and the shape of the learning rate.

    Raises:
      ValueError: If the warm-up or what the cosine ends at cannot be.
    """
    warmup = args.steps // 10 if args.warmup_steps is None else args.warmup_steps
    if warmup >= args.steps:
        raise ValueError(
            f"Expected a warm-up shorter than the run, got {warmup} of {args.steps} steps. Change "
            "--warmup_steps."
        )
    return resumable.Schedule(args.steps, warmup, args.final_fraction, args.eval_every)


def build(
    args: argparse.Namespace, name: str = "gpt2", domain: optimizers.Domain = DOMAIN
) -> study.Study:
    """Reads the data and the flags.

    Args:
      args: the flags.
      name: of the command.
      domain: the learning rates that grids begin with.

    Returns:
      The comparison.

    Raises:
      OSError: If a file is not there.
      ValueError: If flags do not fit each other or the data.
    """
    chosen = study.parse_optimizers(args, domain)
    protocol = study.protocol(args)
    text = corpus(args)
    lengths = schedule(args)
    config = model_config(args, text.vocabulary_size, jax.default_backend())
    work = models.Work(config, args.batch_size, args.microbatch or args.batch_size)
    devices = jax.local_devices()[: args.devices]
    if len(devices) < (args.devices or 1) or work.microbatch % len(devices):
        raise ValueError(
            f"Expected as many devices as --devices says, and a microbatch that is a multiple of "
            f"them, got {len(devices)} and {work.microbatch}. Change --devices or --microbatch."
        )
    data.require_enough(text, context=config.context, batch_size=work.batch)
    held_out = data.validation_windows(
        text.validation, context=config.context, count=args.eval_windows
    )
    _, params = models.abstract_model(config)
    parameters = gpt2_shapes.parameters(params)
    return study.Study(
        name=name,
        optimizers=chosen,
        protocol=protocol,
        task={
            "model": dataclasses.asdict(config),
            "parameters": parameters,
            "schedule": dataclasses.asdict(lengths),
            "batch_size": work.batch,
            "microbatch": work.microbatch,
            "devices": len(devices),
            "tokens_per_step": work.tokens,
            "model_flops_per_step": work.model_flops(parameters),
            "eval_windows": len(held_out),
            # Only where it is: what is recorded without keeps its key.
            **({"diagnose": True} if args.diagnose else {}),
            "sha256": text.description["sha256"],
            "validation_sha256": text.description["validation_sha256"],
        },
        data=text.description,
        make=lambda optimizer: Language(
            text, held_out, work, lengths, optimizer, devices, diagnose=args.diagnose
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, makes the runs that are missing, writes and prints what there is."""
    return study.main(parser(), build, argv)


if __name__ == "__main__":
    command.run("gpt2", main)
