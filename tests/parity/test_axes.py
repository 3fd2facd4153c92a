"""Orientation and batch axes: the same matrices, laid out differently, get the same updates."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.support import goldens, numpy_reference, trees

STEPS = 4
GAMMA, B1 = 0.05, 0.9

TRANSFORMS = {
    "mars": functools.partial(mars_optax.scale_by_mars, b2=0.97),
    "lion": mars_optax.scale_by_mars_lion,
    "shampoo": functools.partial(mars_optax.scale_by_mars_shampoo, ns_dtype="float64"),
    "mars_m": functools.partial(mars_optax.scale_by_mars_m, ns_dtype="float64"),
}
MATRIX_RULES = ("shampoo", "mars_m")


def _gradients(*shape):
    """(steps, *shape), with matrices of the first axis on both sides of the clip."""
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(STEPS, *shape)) / math.sqrt(math.prod(shape[-2:]))
    return grads * np.exp(rng.normal(size=(STEPS, shape[0], *(1,) * (len(shape) - 1))))


def _directions(rule, layouts):
    """Directions of every step for several leaves at once, given as (gradients, axes)."""
    grads = {name: jnp.asarray(g) for name, (g, _) in layouts.items()}
    numbers = {name: axes for name, (_, axes) in layouts.items()}
    tx = TRANSFORMS[rule](b1=B1, gamma=GAMMA, weight_dimension_numbers=numbers)

    def step(state, grads):
        updates, state = tx.update(grads, state)
        return state, updates

    state = tx.init(jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads))
    _, directions = jax.jit(functools.partial(jax.lax.scan, step))(state, grads)
    return jax.tree.map(np.asarray, directions)


class AxesTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    def assert_close(self, actual, expected, what):
        # Another layout sums in another order; Newton-Schulz amplifies that by up to 485.
        goldens.assert_close(actual, expected, rtol=0, atol=1e-12, what=what)


class OrientationTest(AxesTestCase):
    @parameterized.parameters("mars", "shampoo", "mars_m")
    def test_declaring_the_transposed_axes_transposes_the_update(self, rule):
        layouts = {}
        for shape in ((8, 3), (3, 8), (5, 5)):
            grads = _gradients(*shape)
            layouts[f"straight {shape}"] = grads, MuonDimensionNumbers(0, 1)
            layouts[f"turned {shape}"] = np.swapaxes(grads, 1, 2), MuonDimensionNumbers(1, 0)
        got = _directions(rule, layouts)
        for shape in ((8, 3), (3, 8), (5, 5)):
            turned = np.swapaxes(got[f"turned {shape}"], 1, 2)
            self.assert_close(turned, got[f"straight {shape}"], f"{rule} {shape}")

    @parameterized.parameters(*MATRIX_RULES)
    def test_kernel_moves_as_the_transposed_pytorch_weight(self, rule):
        weights = {f"(out, in) = {shape}": _gradients(*shape) for shape in ((8, 3), (3, 8))}
        got = _directions(
            rule,
            {
                name: (np.swapaxes(grads, 1, 2), MuonDimensionNumbers(0, 1))
                for name, grads in weights.items()
            },
        )
        for name, grads in weights.items():
            weight = numpy_reference.mars_leaf(
                np.zeros(grads.shape[1:]), grads, rule=rule, lr=1.0, b1=B1, gamma=GAMMA
            ).params
            moved = -np.cumsum(np.swapaxes(got[name], 1, 2), axis=0)
            self.assert_close(moved, weight, f"{rule} {name}")

    @parameterized.parameters(*MATRIX_RULES)
    def test_only_the_factor_of_shampoo_sees_the_orientation(self, rule):
        grads = _gradients(8, 3)
        got = _directions(
            rule,
            {
                "reduces": (grads, MuonDimensionNumbers(0, 1)),
                "expands": (grads, MuonDimensionNumbers(1, 0)),
            },
        )
        ratio = math.sqrt(8 / 3) if rule == "shampoo" else 1.0
        self.assert_close(got["expands"], ratio * got["reduces"], rule)


class BatchAxesTest(AxesTestCase):
    @parameterized.parameters(*TRANSFORMS)
    def test_slices_of_a_stack_move_as_the_single_layers(self, rule):
        grads = _gradients(3, 8, 6)
        layouts = {str(layer): (grads[:, layer], MuonDimensionNumbers(0, 1)) for layer in range(3)}
        layouts["stack"] = grads, MuonDimensionNumbers(1, 2)
        # The same as one matrix: what it would be if the batch axis were not seen.
        layouts["whole"] = grads, MuonDimensionNumbers((0, 1), 2)
        got = _directions(rule, layouts)
        for layer in range(3):
            self.assert_close(got["stack"][:, layer], got[str(layer)], f"{rule}, layer {layer}")
        self.assertGreater(np.max(np.abs(got["stack"] - got["whole"])), 1e-3)

    @parameterized.parameters("mars", "shampoo", "mars_m")
    def test_batch_axis_may_stand_anywhere(self, rule):
        grads = _gradients(3, 8, 6)
        got = _directions(
            rule,
            {
                "first": (grads, MuonDimensionNumbers(1, 2)),
                "second": (np.moveaxis(grads, 1, 2), MuonDimensionNumbers(0, 2)),
                "last": (np.moveaxis(grads, 1, 3), MuonDimensionNumbers(0, 1)),
                "turned": (np.transpose(grads, (0, 3, 1, 2)), MuonDimensionNumbers(-1, -3)),
            },
        )
        self.assert_close(np.moveaxis(got["second"], 2, 1), got["first"], rule)
        self.assert_close(np.moveaxis(got["last"], 3, 1), got["first"], rule)
        self.assert_close(np.transpose(got["turned"], (0, 2, 3, 1)), got["first"], rule)

    @parameterized.parameters("mars", "mars_m")
    def test_two_batch_axes_are_two_axes_of_single_matrices(self, rule):
        grads = _gradients(2, 8, 3, 6)
        pairs = [(i, j) for i in range(2) for j in range(3)]
        layouts = {str(p): (grads[:, p[0], :, p[1]], MuonDimensionNumbers(0, 1)) for p in pairs}
        layouts["both"] = grads, MuonDimensionNumbers(-3, -1)
        got = _directions(rule, layouts)
        for i, j in pairs:
            self.assert_close(got["both"][:, i, :, j], got[str((i, j))], f"{rule} {i}, {j}")

    @parameterized.parameters("mars", "shampoo", "mars_m")
    def test_kernels_of_higher_rank_move_as_their_flattened_matrices(self, rule):
        conv, attention = _gradients(3, 3, 4, 5), _gradients(8, 2, 3)
        got = _directions(
            rule,
            {
                "conv": (conv, MuonDimensionNumbers((0, 1, 2), 3)),
                "flat conv": (conv.reshape(STEPS, 36, 5), MuonDimensionNumbers(0, 1)),
                # (embedding, heads, head dimension)
                "attention": (attention, MuonDimensionNumbers(0, (1, 2))),
                "flat attention": (attention.reshape(STEPS, 8, 6), MuonDimensionNumbers(0, 1)),
            },
        )
        for name in ("conv", "attention"):
            flat = got[f"flat {name}"]
            self.assert_close(got[name].reshape(flat.shape), flat, f"{rule} {name}")


if __name__ == "__main__":
    absltest.main()
