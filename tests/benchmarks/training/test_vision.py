"""Images: reading and changing them, models that learn digits, runs in pieces."""

import functools
import io
import lzma
import pathlib
import re
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from benchmarks.training import data, grid, images, models, optimizers, resumable, study, vision
from tests.benchmarks.training import test_grid
from tests.support import versions

# As many images are set aside as there are for testing: one shape, one program.
_VIT = (
    "--model=vit",
    "--width=16",
    "--depth=1",
    "--epochs=24",
    "--eval_every=12",
    "--held_out=0.2505",
)
_RESNET = ("--model=resnet", "--width=4", "--depth=1", "--epochs=4", "--eval_every=2")
_NEVER = resumable.Deadline(None, 0.0)


@functools.cache
def task(name: str, flags: tuple[str, ...]) -> tuple[resumable.Task, grid.Cell]:
    given = ["--dtype=float32", f"--optimizers={name}", *flags]
    comparison = vision.build(vision.parser().parse_args(given))
    ((optimizer, _),) = comparison.optimizers
    return comparison.make(optimizer), grid.Cell(optimizer, 3e-2, 0)


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def train(self, name: str, flags: tuple[str, ...], *, rate: float = 3e-2, seeds=(0,)):
        work, cell = task(name, flags)
        cells = [grid.Cell(cell.optimizer, rate, seed) for seed in seeds]
        return resumable.train(work, cells, self.folder / "run", deadline=_NEVER)

    def check_pieces(self, name: str, flags: tuple[str, ...]) -> grid.Record:
        """Runs at once and in two pieces, and compares bit for bit."""
        (whole,) = self.train(name, flags)
        work, cell = task(name, flags)
        stopped = resumable.train(work, [cell], self.folder / "pieces", deadline=test_grid.After(3))
        self.assertIsNone(stopped)
        (pieces,) = resumable.train(work, [cell], self.folder / "pieces", deadline=_NEVER)
        self.assertEqual(pieces["curves"], whole["curves"])
        self.assertEqual(pieces["train_loss"], whole["train_loss"])
        return whole


class TrainingTest(FolderTest):
    def test_a_transformer_learns_digits_in_pieces_as_at_once(self):
        run = self.check_pieces("mars", _VIT)
        self.assertLess(run["train_loss"][-1], 0.8 * run["train_loss"][0])
        self.assertLess(run["curves"]["test_error"][-1], 50)
        self.assertEqual(run["steps"], [0, 96, 192])

    @pytest.mark.slow
    def test_a_residual_network_learns_digits_in_pieces_as_at_once(self):
        run = self.check_pieces("mars_m", _RESNET)
        # Four epochs, compared by halves: about 1.06 after 1.73.
        self.assertLess(run["train_loss"][-1], 0.8 * run["train_loss"][0])
        # Averages that batch norm keeps are in the checkpoint, too: inference is with them.
        self.assertLess(run["curves"]["test_error"][-1], 50)

    @pytest.mark.slow
    def test_optimizers_see_the_same_batches_and_seeds_go_together(self):
        adamw, mars = (self.train(name, _VIT, rate=1e-30)[0] for name in ("adamw", "mars"))
        self.assertEqual(
            adamw["curves"]["validation_loss"][0], mars["curves"]["validation_loss"][0]
        )
        np.testing.assert_allclose(adamw["train_loss"], mars["train_loss"], rtol=1e-6)
        together = self.train("mars", _VIT, seeds=(0, 1))
        for seed, run in enumerate(together):
            (alone,) = self.train("mars", _VIT, seeds=(seed,))
            np.testing.assert_allclose(run["train_loss"], alone["train_loss"], rtol=1e-3)


class Linear(nnx.Module):
    """Stands for the models: it compiles in no time."""

    def __init__(self, config: models.ImageModelConfig, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(4, config.classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x.reshape(len(x), -1))


class EpochTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(models, "image_model", Linear))
        rng = np.random.default_rng(0)
        parts = rng.integers(256, size=(3, 16, 2, 2, 1)).astype(np.uint8)
        labels = np.arange(16, dtype=np.int32) % 2
        dataset = images.Dataset(*((part, labels) for part in parts), classes=2, description={})
        config = models.ImageModelConfig("linear", 4, 1, 2, (2, 2, 1), "float32")
        optimizer = optimizers.parse_optimizer("adamw", vision.DOMAIN)
        recipe = vision.Recipe(4, 4, "multistep", 0, False, 1)
        self.task = vision.Vision(dataset, config, recipe, optimizer)
        self.cells = [grid.Cell(optimizer, 1e-30, seed) for seed in (0, 1)]

    def losses(self, step: int, seed: int) -> list[float]:
        """Losses of an epoch that leaves the weights as they are: they show the batches."""
        state = self.task.init(self.cells[:1])
        return self.task.advance(state, step, [self.cells[seed]])[1].tolist()

    def test_epoch_and_seed_decide_on_the_order_of_the_images(self):
        first = self.losses(0, seed=0)
        self.assertEqual(self.losses(0, seed=0), first)
        self.assertNotEqual(self.losses(self.task.steps_per_call, seed=0), first)
        self.assertNotEqual(self.losses(0, seed=1), first)

    def test_a_model_that_diverged_has_no_error_alone_or_with_others(self):
        alone = self.task.init(self.cells[:1])
        whole = self.task.evaluate(alone)
        self.assertBetween(float(whole["test_error"]), 0, 100)
        spoilt = alone | {"params": jax.tree.map(lambda x: x * jnp.nan, alone["params"])}
        for name in ("validation", "test"):
            self.assertTrue(np.isnan(self.task.evaluate(spoilt)[f"{name}_error"]))
        both = study.stacked([spoilt, alone])
        np.testing.assert_array_equal(
            self.task.evaluate(both)["test_error"], [np.nan, whole["test_error"]]
        )


class ModelTest(parameterized.TestCase):
    def test_resnet_18_has_as_many_parameters_as_usual_for_cifar(self):
        config = models.ImageModelConfig("resnet", 64, 2, 10, (32, 32, 3))
        model = nnx.eval_shape(lambda: models.image_model(config, nnx.Rngs(0)))
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        # 11,173,962 with PyTorch, too, for this stem: 20 convolutions, their norms, the head.
        self.assertEqual(sum(leaf.size for leaf in leaves), 11_173_962)

    @parameterized.parameters(
        ("resnet", "all", {2: 1, 4: 12}),
        ("resnet", "hidden", {2: 0, 4: 11}),
        ("resnet", "dense", {2: 1, 4: 0}),
        ("vit", "all", {2: 9, 4: 0}),
        ("vit", "hidden", {2: 6, 4: 0}),
    )
    def test_the_matrices_of_a_rule(self, kind: str, rule: str, expected: dict[int, int]):
        config = models.ImageModelConfig(kind, 8, 1, 10, (8, 8, 1))
        model = nnx.eval_shape(lambda: models.image_model(config, nnx.Rngs(0)))
        params = nnx.state(model, nnx.Param)
        specs = vision.DOMAIN.matrices[rule](params)
        ranks = [
            leaf.ndim
            for leaf, spec in zip(
                jax.tree.leaves(params),
                jax.tree.leaves(specs, is_leaf=lambda x: x is None or isinstance(x, tuple)),
                strict=True,
            )
            if spec is not None
        ]
        self.assertEqual({rank: ranks.count(rank) for rank in (2, 4)}, expected)

    @parameterized.parameters("mars_m", "muon")
    def test_optimizers_update_convolutions(self, name: str):
        self.check_update(name)

    @parameterized.parameters(*sorted(set(optimizers.OPTIMIZERS) - {"mars_m", "muon"}))
    @pytest.mark.slow
    def test_all_others_update_convolutions(self, name: str):
        self.check_update(name)

    def check_update(self, name: str) -> None:
        versions.skip_if_optax_lacks(name)
        config = models.ImageModelConfig("resnet", 4, 1, 10, (8, 8, 1))
        model = nnx.eval_shape(lambda: models.image_model(config, nnx.Rngs(0)))
        params = nnx.state(model, nnx.Param)
        optimizer = optimizers.parse_optimizer(name, vision.DOMAIN)
        schedule = vision.Recipe(4, 8, "multistep", 0, False, 1).learning_rate(jnp.float32(1), 3)

        def updated(params):
            state = optimizer.transformation(schedule).init(params)
            return optimizer.step(schedule, lambda params: params, params, state, params)[0]

        after = jax.eval_shape(updated, params)
        self.assertEqual(
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(after)),
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(params)),
        )

    @parameterized.parameters((0, 1.0), (50, 0.1), (75, 0.01), (99, 0.01), (49, 1.0))
    def test_the_learning_rate_falls_after_a_half_and_three_quarters(
        self, epoch: int, share: float
    ):
        recipe = vision.Recipe(100, 8, "multistep", 0, False, 1)
        rate = recipe.learning_rate(jnp.float32(2.0), 3)(jnp.int32(3 * epoch))
        self.assertAlmostEqual(float(rate), 2.0 * share, places=6)

    @parameterized.parameters((1, 10, (5, 7)), (2, 10, (10, 15)), (3, 4, (6, 9)), (4, 3, (6, 9)))
    def test_the_learning_rate_falls_between_steps_also_in_few_epochs(
        self, epochs: int, steps_per_epoch: int, falls: tuple[int, int]
    ):
        recipe = vision.Recipe(epochs, 8, "multistep", 0, False, 1)
        rate = recipe.learning_rate(jnp.float32(1.0), steps_per_epoch)
        rates = rate(jnp.arange(epochs * steps_per_epoch))
        expected = [0.1 ** sum(step >= fall for fall in falls) for step in range(len(rates))]
        np.testing.assert_allclose(rates, expected, rtol=1e-6)

    def test_learning_rates_are_chosen_by_the_validation_images_and_the_test_is_reported(self):
        protocol = vision.build(vision.parser().parse_args(["--model=vit"])).protocol
        self.assertEqual(
            (protocol.chosen_by, protocol.compared, protocol.unit),
            ("validation_error", "test_error", "percent"),
        )

    def test_the_defaults_are_those_of_the_domain(self):
        mars = optimizers.parse_optimizer("mars:gamma=0.05", vision.DOMAIN)
        self.assertEqual((mars.settings["b1"], mars.settings["gamma"]), (0.95, 0.05))
        self.assertIsNone(mars.settings["global_clip"])
        self.assertEqual(mars.learning_rate, 3e-3)


class AugmentTest(absltest.TestCase):
    def test_images_are_parts_of_themselves_with_a_black_border_some_mirrored(self):
        batch = jnp.asarray(np.arange(1, 65 * 9 + 1).reshape(65, 3, 3, 1), jnp.int32)
        changed = np.asarray(vision.augment(jax.random.key(0), batch, padding=1, flip=True))
        seen = set()
        for image, new in zip(np.asarray(batch), changed, strict=True):
            padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
            cuts = {
                (row, column, mirrored): padded[row : row + 3, column : column + 3][
                    :, :: -1 if mirrored else 1
                ]
                for row in range(3)
                for column in range(3)
                for mirrored in (False, True)
            }
            found = [which for which, cut in cuts.items() if np.array_equal(cut, new)]
            self.assertLen(found, 1)
            seen |= set(found)
        self.assertGreater(len(seen), 14)
        same = vision.augment(jax.random.key(0), batch, padding=0, flip=False)
        np.testing.assert_array_equal(same, batch)


def pack(pixels: np.ndarray, labels: np.ndarray, tolerance: int) -> bytes:
    """Writes a pack of predicted images, pixel by pixel."""
    step = 2 * tolerance + 1
    stored = np.zeros((3, len(pixels), 32, 32), np.uint8)
    for index, image in enumerate(pixels.astype(int)):
        seen = np.zeros((3, 32, 32), int)
        for row, column in np.ndindex(32, 32):
            for plane, channel in enumerate((1, 0, 2)):
                x, past = image[row, column, channel], seen[plane]
                if row and column:
                    a, b, c = (
                        past[row, column - 1],
                        past[row - 1, column],
                        past[row - 1, column - 1],
                    )
                    guess = (
                        min(a, b) if c >= max(a, b) else max(a, b) if c <= min(a, b) else a + b - c
                    )
                elif row or column:
                    guess = past[row, column - 1] if column else past[row - 1, column]
                else:
                    guess = 0 if plane else 128
                green = seen[0, row, column] if plane else 0
                guess = np.clip(guess + green, 0, 255)
                missed = int(np.sign(x - guess)) * ((abs(x - guess) + tolerance) // step)
                stored[plane, index, row, column] = missed % 256
                seen[plane, row, column] = np.clip(guess + missed * step, 0, 255) - green
    header = b"CFR1" + len(pixels).to_bytes(4, "little") + bytes([tolerance, 0, 0, 0])
    return lzma.compress(header + labels.astype(np.uint8).tobytes() + stored.tobytes())


class ImagesTest(FolderTest):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, size=(3, 32, 32, 3)).astype(np.uint8)
        self.labels = np.asarray([1, 0, 2], np.int32)

    @parameterized.parameters(0, 3)
    def test_a_pack_of_predicted_images_is_read(self, tolerance: int):
        path = self.folder / "images.xz"
        path.write_bytes(pack(self.pixels, self.labels, tolerance))
        pixels, labels = images.read(path)
        np.testing.assert_array_equal(labels, self.labels)
        # Whole numbers below 256: their differences fit into 16 bits.
        errors = np.abs(pixels.astype(np.int16) - self.pixels)
        self.assertLessEqual(errors.max(), tolerance)
        self.assertEqual(errors.max() > 0, tolerance > 0)

    def test_npz_files_are_joined_and_the_last_images_are_set_aside(self):
        path = self.folder / "images.npz"
        np.savez(path, images=self.pixels, labels=self.labels)
        dataset = images.load([path, path], [path], held_out=0.5)
        np.testing.assert_array_equal(dataset.train[0], self.pixels)
        np.testing.assert_array_equal(dataset.validation[1], self.labels)
        self.assertEqual(dataset.classes, 3)
        same = images.load([path, path], [path], held_out=0.0)
        self.assertLen(same.train[1], 6)
        np.testing.assert_array_equal(same.validation[0], same.test[0])

    @parameterized.parameters(
        (("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"), ()),
        (("train.bin", "test.bin"), (9,)),
    )
    def test_cifars_folders_are_read(self, files: tuple[str, ...], coarse: tuple[int, ...]):
        planes = self.pixels.transpose(0, 3, 1, 2).reshape(3, -1)
        records = [
            bytes([*coarse, label]) + plane.tobytes()
            for label, plane in zip(self.labels, planes, strict=True)
        ]
        for name in files:
            (self.folder / name).write_bytes(b"".join(records))
        dataset = images.load([self.folder], held_out=0.0)
        self.assertLen(dataset.train[1], 3 * (len(files) - 1))
        np.testing.assert_array_equal(dataset.train[0][-3:], self.pixels)
        np.testing.assert_array_equal(dataset.test[1], self.labels)
        (self.folder / files[-1]).write_bytes(b"".join(records)[:-1])
        with self.assertRaisesRegex(ValueError, "Expected records of 307[34] bytes"):
            images.load([self.folder], held_out=0.0)

    def test_digits_are_grey_and_in_three_parts(self):
        dataset = images.load()
        counts = [len(part[1]) for part in (dataset.train, dataset.validation, dataset.test)]
        self.assertEqual((sum(counts), counts[2]), (1797, 360))
        self.assertEqual(dataset.train[0].shape[1:], (8, 8, 1))
        self.assertEqual(dataset.train[0].max(), 255)

    @parameterized.named_parameters(
        ("missing", ["--train_file=nowhere.npz", "--test_file=a.npz"], "'nowhere.npz'"),
        ("empty", ["--train_file="], "Expected CIFAR's binary files in '.'"),
        ("first_missing", ["--train_file=nowhere.npz"], "'nowhere.npz', which is not there"),
        ("no_test", [f"--train_file={__file__}"], "Expected test images"),
        ("no_train", ["--test_file=a.npz"], "--test_file beside the files of --train_file, got it"),
        ("folder", ["--train_file=.", "--test_file=a.npz"], "beside a folder, which has test"),
        ("batch", ["--batch_size=5000"], "5000 of 1293"),
        ("padding", ["--padding=-1"], "--padding: Expected a whole number from 0"),
        ("held_out", ["--held_out=1"], "a share in [0, 1) as --held_out"),
        ("matrices", ["--optimizers=mars:matrices=none"], "out of all, hidden, dense"),
    )
    def test_a_wrong_flag_ends_with_its_reason(self, flags: list[str], message: str):
        with self.assertRaises(SystemExit) as context:
            vision.main([f"--out={self.folder / 'out'}", "--limit=0", *flags])
        self.assertRegex(str(context.exception.code), r"^vision: (--\w+: )?Expected.*$")
        self.assertIn(message, str(context.exception.code))
        self.assertFalse((self.folder / "out").exists())

    @parameterized.parameters(b"", b"CFR2" + bytes(20), b"CFR1" + bytes(20))
    def test_what_is_no_pack_is_an_error(self, raw: bytes):
        path = self.folder / "images.xz"
        path.write_bytes(lzma.compress(raw))
        with self.assertRaisesRegex(ValueError, "Expected"):
            images.read(path)

    def test_a_damaged_xz_file_is_an_error_that_names_it(self):
        path = self.folder / "tokens.bin.xz"
        for content in (b"no archive", lzma.compress(bytes(1000))[:-20]):
            path.write_bytes(content)
            for read in (data.read_tokens, images.read):
                with self.assertRaisesRegex(ValueError, "compressed by xz, got '.*tokens.bin.xz'"):
                    read(path)

    def test_what_is_no_npz_file_is_an_error_that_names_it(self):
        archive, array = io.BytesIO(), io.BytesIO()
        np.savez(archive, images=self.pixels, labels=self.labels)
        np.save(array, self.pixels)
        whole = archive.getvalue()
        pickled = io.BytesIO()
        np.savez(pickled, images=self.pixels, labels=np.asarray([{}], object))
        path = self.folder / "images.npz"
        flipped = whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]
        for content in (
            b"",
            b"no archive",
            whole[:-1000],
            flipped,
            array.getvalue(),
            pickled.getvalue(),
        ):
            path.write_bytes(content)
            with self.assertRaisesRegex(ValueError, "Expected an .npz file.*images.npz'"):
                images.read(path)

    @parameterized.parameters(
        ([0, -1, 2], "got int64, the least [-1, 0, 2]"),
        ([0.0, 0.5, 0.9], "got float64, the least [0.0, 0.5, 0.9]"),
        (["a", "b", "c"], "the least ['a', 'b', 'c']"),
        ([[0], [1], [2]], "labels of shape (3, 1)"),
        ([0, 1], "labels of shape (2,)"),
    )
    def test_labels_are_integers_from_0_one_for_each_image(self, labels: list, message: str):
        path = self.folder / "images.npz"
        np.savez(path, images=self.pixels, labels=np.asarray(labels))
        with self.assertRaisesRegex(ValueError, "images.npz.*" + re.escape(message)):
            images.read(path)
        np.savez(path, images=self.pixels, labels=np.asarray([1, 0, 255], np.uint8))
        self.assertEqual(images.read(path)[1].tolist(), [1, 0, 255])


class SharedTest(absltest.TestCase):
    def test_trees_of_several_runs_are_stacked_and_one_is_left_as_it_is(self):
        one = {"a": jnp.ones(2)}
        self.assertIs(study.stacked([one]), one)
        self.assertEqual(study.stacked([one, one])["a"].shape, (2, 2))


if __name__ == "__main__":
    absltest.main()
