r"""Trains a ResNet-18 or a small vision transformer with several optimizers, resumable.

From the root of the repository:

    python -m benchmarks.training.vision
    python -m benchmarks.training.vision --table=main --grid=3 --final_seeds=1,2,3 --width=64 \
        --epochs=30 --train_file=cifar-10-batches-bin --limit=540

The same command again goes on where the one before stopped. An epoch is one compiled call, the
images are on the device, cut and mirrored there.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

from benchmarks import command
from benchmarks.training import grid, images, models, optimizers, resumable, study
from benchmarks.training.optimizers import Optimizer

_CONVOLUTION = optax.contrib.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)
_DENSE = optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)
# Of both kinds of models, what has pixels or classes on one of its sides.
_OUTER = frozenset({"stem", "patches", "positions", "head"})


def _matrices(*, convolutions: bool, outer: bool) -> optimizers.Matrices:
    """Returns a rule: which kernels are matrices. Those of convolutions are flattened."""

    def of_leaf(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        if not outer and getattr(path[0], "key", None) in _OUTER:
            return None
        return {2: _DENSE, 4: _CONVOLUTION if convolutions else None}.get(leaf.ndim)

    return lambda params: jax.tree_util.tree_map_with_path(of_leaf, params)


# Learning rates are where a grid begins. Decay, AdamW's and MARS's betas, and that there is no
# global clip are as in the training script for images of the MARS authors, MARS/train_CV.py; there
# kernels of convolutions get the AdamW rule, which is `dense` here.
DOMAIN = optimizers.Domain(
    matrices={
        "all": _matrices(convolutions=True, outer=True),
        "hidden": _matrices(convolutions=True, outer=False),
        "dense": _matrices(convolutions=False, outer=True),
    },
    learning_rates={
        "adamw": 1e-3,
        "nadamw": 1e-3,
        "mars": 3e-3,
        "lion": 2.5e-4,
        "mars_lion": 2.5e-4,
        "muon": 4e-3,
        "mars_m": 4e-3,
        "corrected_muon": 4e-3,
        "mars_shampoo": 4e-3,
        "storm_adamw": 1e-3,
    },
    settings={"global_clip": None, "weight_decay": 5e-4, "weight_decay_1d": 5e-4},
    settings_of={
        "adamw": {"b2": 0.999},
        "nadamw": {"b2": 0.999},
        "mars": {"b1": 0.95, "b2": 0.99},
    },
)
# Images of an evaluation that are on their way at a time.
_EVALUATION_BATCH = 500


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
      epochs: passes over the training images.
      batch_size: images of an update; what is left of an epoch is dropped.
      schedule: `multistep`, a tenth of the learning rate after half of the run, and a hundredth
        after three quarters; or `cosine`, to 0 after a warm-up of a twentieth.
      padding: pixels of black that are put around an image before it is cut to its size again.
      flip: whether half of the images are mirrored.
      eval_every: epochs between two evaluations.
    """

    epochs: int
    batch_size: int
    schedule: str
    padding: int
    flip: bool
    eval_every: int

    def learning_rate(self, peak: jax.Array, steps_per_epoch: int) -> optax.Schedule:
        """Returns the schedule with this peak, which may be traced."""
        steps = self.epochs * steps_per_epoch
        if self.schedule == "cosine":
            return resumable.Schedule(steps, steps // 20, 0.0, steps).learning_rate(peak)
        milestones = [steps * quarters // 4 for quarters in (2, 3)]

        def rate(count: jax.Array) -> jax.Array:
            passed = sum(jnp.asarray(count >= step, jnp.float32) for step in milestones)
            factor: jax.Array = jnp.float32(0.1) ** passed
            return peak * factor

        return rate


def augment(key: jax.Array, batch: jax.Array, *, padding: int, flip: bool) -> jax.Array:
    """Cuts each image out of itself with a black border, at random, and mirrors half of them.

    Args:
      key: decides.
      batch: images (number, height, width, channels).
      padding: width of the border.
      flip: whether to mirror.

    Returns:
      Images of the same shape and dtype.
    """
    cut_key, flip_key = jax.random.split(key)
    count, height, width, _ = batch.shape
    offsets = jax.random.randint(cut_key, (count, 2), 0, 2 * padding + 1)
    border = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    padded = jnp.pad(batch, border)

    def cut(image: jax.Array, offset: jax.Array) -> jax.Array:
        shape = (height, width, image.shape[-1])
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), shape)

    cropped = jax.vmap(cut)(padded, offsets)
    if not flip:
        return cropped
    mirrored = jax.random.bernoulli(flip_key, shape=(count, 1, 1, 1))
    return jnp.where(mirrored, cropped[:, :, ::-1], cropped)


class Vision:
    """The training of one model of images with one optimizer, a `resumable.Task`.

    Args:
      dataset: the images.
      config: the model.
      recipe: how it is trained.
      optimizer: the optimizer.
    """

    def __init__(
        self,
        dataset: images.Dataset,
        config: models.ImageModelConfig,
        recipe: Recipe,
        optimizer: Optimizer,
    ) -> None:
        self._config = config
        self._recipe = recipe
        self._optimizer = optimizer
        self._data = {
            name: (jnp.asarray(part[0]), jnp.asarray(part[1]))
            for name, part in (
                ("train", dataset.train),
                ("validation", dataset.validation),
                ("test", dataset.test),
            )
        }
        pixels = dataset.train[0].reshape(-1, config.shape[2]).astype(np.float32)
        self._mean, self._deviation = pixels.mean(axis=0), pixels.std(axis=0) + 1e-3
        self._training = nnx.split(self._abstract(training=True))[0]
        self._inference = nnx.split(self._abstract(training=False))[0]
        self._advance_one = jax.jit(self._epoch, donate_argnums=(0,))
        over_runs = jax.vmap(self._epoch, in_axes=(0, None, 0, 0, None))
        self._advance_all = jax.jit(over_runs, donate_argnums=(0,))
        self._evaluate_one = jax.jit(self._figures)
        self._evaluate_all = jax.jit(jax.vmap(self._figures, in_axes=(0, None)))

    def _abstract(self, *, training: bool) -> Any:
        def make() -> Any:
            model = models.image_model(self._config, nnx.Rngs(0))
            # Batch norms average over the batch, or take what they averaged before.
            model.set_attributes(use_running_average=not training, raise_if_not_found=False)
            return model

        return nnx.eval_shape(make)

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self._recipe.epochs * self.steps_per_call

    @functools.cached_property
    def steps_per_call(self) -> int:
        """Updates of an epoch."""
        return len(self._data["train"][1]) // self._recipe.batch_size

    @functools.cached_property
    def evaluated_steps(self) -> list[int]:
        """After how many updates the model is evaluated."""
        epochs = {*range(0, self._recipe.epochs, self._recipe.eval_every), self._recipe.epochs}
        return [epoch * self.steps_per_call for epoch in sorted(epochs)]

    def init(self, cells: Sequence[grid.Cell]) -> dict[str, Any]:
        """Makes parameters and state; a seed's parameters are the same for every optimizer."""
        transformation = self._optimizer.transformation(optax.constant_schedule(0.0))
        every = []
        for cell in cells:
            model = models.image_model(self._config, nnx.Rngs(cell.seed))
            params, stats = nnx.state(model, nnx.Param, nnx.BatchStat)
            opt_state = transformation.init(params)
            every.append({"params": params, "stats": stats, "opt_state": opt_state})
        return dict(study.stacked(every))

    def advance(
        self, state: dict[str, Any], step: int, cells: Sequence[grid.Cell]
    ) -> tuple[dict[str, Any], jax.Array]:
        """Makes an epoch; a seed's batches are the same for every optimizer."""
        epoch = jnp.int32(step // self.steps_per_call)
        seeds = np.asarray([cell.seed for cell in cells], np.uint32)
        rates = np.asarray([cell.learning_rate for cell in cells], np.float32)
        advance = self._advance_all
        if len(cells) == 1:
            seeds, rates, advance = seeds[0], rates[0], self._advance_one
        state, losses = advance(
            state, epoch, jnp.asarray(seeds), jnp.asarray(rates), self._data["train"]
        )
        return state, losses

    def evaluate(self, state: dict[str, Any]) -> Mapping[str, jax.Array]:
        """Returns loss, and error in percent, on the validation and the test images.

        Where the loss is not finite, the error is not a number: of logits that are none, some class
        is the first.
        """
        variables = {"params": state["params"], "stats": state["stats"]}
        alone = jax.tree.leaves(variables["params"])[0].ndim == self._rank_of_first
        evaluate = self._evaluate_one if alone else self._evaluate_all
        figures: dict[str, jax.Array] = {}
        for name in ("validation", "test"):
            loss, error = evaluate(variables, self._data[name])
            figures |= {f"{name}_loss": loss, f"{name}_error": error}
        return figures

    @functools.cached_property
    def _rank_of_first(self) -> int:
        params = nnx.state(self._abstract(training=True), nnx.Param)
        rank: int = jax.tree.leaves(params)[0].ndim
        return rank

    def _normalized(self, batch: jax.Array) -> jax.Array:
        x = (batch.astype(jnp.float32) - self._mean) / self._deviation
        normalized: jax.Array = x.astype(self._config.dtype)
        return normalized

    def _loss(
        self, params: Any, stats: Any, batch: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, Any]:
        # Batch norms change their averages in place: in copies, those of this function.
        model = nnx.merge(self._training, params, stats, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), labels)
        return jnp.mean(losses), nnx.state(model, nnx.BatchStat)

    def _epoch(
        self,
        state: dict[str, Any],
        epoch: jax.Array,
        seed: jax.Array,
        peak: jax.Array,
        data: tuple[jax.Array, jax.Array],
    ) -> tuple[dict[str, Any], jax.Array]:
        recipe, steps = self._recipe, self.steps_per_call
        schedule = recipe.learning_rate(peak, steps)
        key = jax.random.fold_in(jax.random.key(seed), epoch)
        order_key, augment_key = jax.random.split(key)
        order = jax.random.permutation(order_key, len(data[1]))[: steps * recipe.batch_size]

        def update(
            state: dict[str, Any], inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[dict[str, Any], jax.Array]:
            indices, key = inputs
            batch = augment(key, data[0][indices], padding=recipe.padding, flip=recipe.flip)
            batch, labels = self._normalized(batch), data[1][indices]
            gradient = jax.grad(self._loss, has_aux=True)
            (loss, stats), grads = jax.value_and_grad(self._loss, has_aux=True)(
                state["params"], state["stats"], batch, labels
            )
            params, opt_state = self._optimizer.step(
                schedule,
                lambda params: gradient(params, state["stats"], batch, labels)[0],
                grads,
                state["opt_state"],
                state["params"],
            )
            return {"params": params, "stats": stats, "opt_state": opt_state}, loss

        batches = order.reshape(steps, recipe.batch_size)
        return jax.lax.scan(update, state, (batches, jax.random.split(augment_key, steps)))

    def _figures(
        self, variables: dict[str, Any], data: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(self._inference, variables["params"], variables["stats"])

        def of_one(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            image, label = inputs
            logits = model(self._normalized(image[None]))[0]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            return loss, jnp.argmax(logits) != label

        losses, wrong = jax.lax.map(of_one, data, batch_size=_EVALUATION_BATCH)
        loss = jnp.mean(losses)
        return loss, jnp.where(jnp.isfinite(loss), 100 * jnp.mean(wrong), jnp.nan)


def parser() -> command.Flags:
    """Returns the flags."""
    parser = study.parser("training.vision", __doc__)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        choices=["resnet", "vit"],
        default="resnet",
        help="a residual network (ResNet-18 as it stands) or a small vision transformer",
    )
    group.add_argument(
        "--width",
        type=command.positive,
        help="channels of the first stage, or of the residual stream; by default 16 or 64",
    )
    group.add_argument(
        "--depth",
        type=command.whole(1, 1000),
        help="blocks of a stage, or in all; by default 2 or 6",
    )
    study.add_dtype(group)
    group = parser.add_argument_group("training")
    group.add_argument(
        "--epochs", type=command.positive, default=30, help="passes over the training images"
    )
    group.add_argument(
        "--batch_size", type=command.positive, default=128, help="images of an update"
    )
    group.add_argument(
        "--schedule",
        choices=["multistep", "cosine"],
        default="multistep",
        help="steps down to a tenth and a hundredth, or a warm-up and a cosine to 0",
    )
    group.add_argument(
        "--padding",
        type=command.whole(0),
        help="width of the border that images are cut out of; by default an eighth of the height",
    )
    group.add_argument(
        "--flip",
        type=bool,
        help="whether to mirror images; by default those with colours",
    )
    group.add_argument(
        "--eval_every", type=command.positive, default=1, help="epochs between two evaluations"
    )
    group.add_argument(
        "--train_file",
        type=command.listed,
        help=".npz or .xz files, or a folder of CIFAR's binary files; by default digits",
    )
    group.add_argument(
        "--test_file", type=command.listed, help="images to test on, unless in that folder"
    )
    group.add_argument(
        "--held_out",
        type=command.number(0),
        default=0.1,
        help="share of the training images that choose the learning rate; with 0 the test images",
    )
    return parser


def build(args: argparse.Namespace) -> study.Study:
    """Reads the images and the flags.

    Args:
      args: the flags.

    Returns:
      The comparison.

    Raises:
      OSError: If a file is not there.
      ValueError: If flags do not fit each other or the images.
    """
    chosen = study.parse_optimizers(args, DOMAIN)
    protocol = study.protocol(
        args, chosen_by="validation_error", compared="test_error", unit="percent"
    )
    dataset = images.load(
        args.train_file or [],
        args.test_file or [],
        held_out=args.held_out,
    )
    height, width, channels = dataset.train[0].shape[1:]
    resnet = args.model == "resnet"
    config = models.ImageModelConfig(
        kind=args.model,
        width=args.width or (16 if resnet else 64),
        depth=args.depth or (2 if resnet else 6),
        classes=dataset.classes,
        shape=(height, width, channels),
        dtype=args.dtype,
    )
    padding = max(1, height // 8) if args.padding is None else args.padding
    if args.batch_size > len(dataset.train[1]):
        raise ValueError(
            "Expected no more images in a batch than there are for training, got "
            f"{args.batch_size} of {len(dataset.train[1])}. Change --batch_size."
        )
    if not resnet and (height % config.patch or width % config.patch):
        raise ValueError(
            f"Expected images that patches of {config.patch} pixels divide, got {height} x "
            f"{width}. Take --model=resnet."
        )
    recipe = Recipe(
        args.epochs,
        args.batch_size,
        args.schedule,
        padding,
        channels == 3 if args.flip is None else args.flip,
        args.eval_every,
    )
    params = nnx.state(nnx.eval_shape(lambda: models.image_model(config, nnx.Rngs(0))), nnx.Param)
    return study.Study(
        name="vision",
        optimizers=chosen,
        protocol=protocol,
        task={
            "model": {**dataclasses.asdict(config), "shape": list(config.shape)},
            "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
            "recipe": dataclasses.asdict(recipe),
            "held_out": args.held_out,
            "sha256": dataset.description["sha256"],
        },
        data=dataset.description,
        make=lambda optimizer: Vision(dataset, config, recipe, optimizer),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, makes the runs that are missing, writes and prints what there is."""
    return study.main(parser(), build, argv)


if __name__ == "__main__":
    command.run("vision", main)
