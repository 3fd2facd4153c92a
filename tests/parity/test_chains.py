"""Each variant equals a chain of the public links and Optax's own parts.

The chain is the specification. Run operation by operation it agrees to the last bit. Under `jit`
the compiler may contract a product and a sum into one rounding, and Optax jits parts of its own:
`jax.disable_jit` makes every operation round by itself.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests.support import numpy_reference, trees

STEPS = 5
SHAPES = {"kernel": (4, 6), "square": (5, 5), "tall": (7, 2)}
VECTORS = {"bias": (6,), "scalar": ()}


def _tree(shapes, seed, steps=None):
    """Normal arrays; with `steps`, gradients whose norms lie on both sides of 1."""
    rng = np.random.default_rng(seed)
    if steps is None:
        return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    norms = np.exp(1.5 * np.sin(np.arange(steps) + seed))

    def gradients(shape):
        raw = rng.normal(size=(steps, *shape))
        size = np.sqrt(np.sum(raw.reshape(steps, -1) ** 2, axis=1))
        return jnp.asarray(raw * (norms / size).reshape(steps, *(1,) * len(shape)))

    return {name: gradients(shape) for name, shape in shapes.items()}


def _run(tx, shapes, *, jit, seed=0):
    """The updates of every step, stacked."""
    params, grads = _tree(shapes, seed), _tree(shapes, seed + 1, STEPS)
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    history = []
    with contextlib.nullcontext() if jit else jax.disable_jit():
        for t in range(STEPS):
            updates, state = update(jax.tree.map(lambda g, t=t: g[t], grads), state, params)
            history.append(updates)
    return jax.tree.map(lambda *x: np.stack(x), *history)


def _schedule(values):
    return lambda count: jnp.asarray(values)[count]


def _gamma_schedule():
    return _schedule(0.1 * 0.7 ** np.arange(STEPS))


def _links(gamma, b1, first_step, max_norm):
    clip = [] if max_norm is None else [mars_optax.clip_by_leaf_norm(max_norm)]
    return [mars_optax.correct_gradients(gamma, b1, first_step=first_step), *clip]


def _orthogonalized(rule, b1, eps):
    """The last link of the matrix variants: from the momentum to the direction."""
    scale = 1.0 - b1 if rule == "shampoo" else 1.0

    def of_leaf(m):
        unit = mars_optax.orthogonalize(m / scale, dtype="float64", eps=eps)
        return numpy_reference.shape_factor(rule, m.shape[::-1]) * unit

    return optax.stateless(lambda updates, params: jax.tree.map(of_leaf, updates))


OPTIONS = parameterized.product(
    gamma=("constant", "schedule"),
    first_step=("zeros", "no_correction"),
    max_norm=(1.0, 0.3, None),
)
# The variants without a second moment share all but their last link.
MOMENTUM_OPTIONS = parameterized.parameters(
    ("constant", "zeros", 1.0),
    ("schedule", "zeros", 0.3),
    ("schedule", "no_correction", 1.0),
    ("constant", "no_correction", None),
)


def _options(gamma, first_step, max_norm, b1=0.9):
    """The same options for a variant, as keywords, and for the links."""
    gamma = 0.04 if gamma == "constant" else _gamma_schedule()
    keywords = {"b1": b1, "gamma": gamma, "first_step": first_step, "max_norm": max_norm}
    return keywords, _links(gamma, b1, first_step, max_norm)


class Float64TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())


class ChainTest(Float64TestCase):
    def assert_same_updates(self, tx, chain, shapes, *, jit=False, rtol=0.0):
        ours, theirs = _run(tx, shapes, jit=jit), _run(chain, shapes, jit=jit)
        for name in shapes:
            # `rtol` in units of the largest entry: sums may cancel.
            atol = rtol * np.max(np.abs(theirs[name]))
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=atol, err_msg=name)

    @OPTIONS
    def test_mars_is_correction_clip_and_adam_to_the_last_bit(self, gamma, first_step, max_norm):
        keywords, links = _options(gamma, first_step, max_norm)
        self.assert_same_updates(
            mars_optax.scale_by_mars(b2=0.97, eps=1e-6, **keywords),
            optax.chain(*links, optax.scale_by_adam(0.9, 0.97, eps=1e-6)),
            SHAPES | VECTORS,
        )

    @parameterized.parameters("zeros", "no_correction")
    def test_mars_is_correction_clip_and_adam_under_jit(self, first_step):
        keywords, links = _options("schedule", first_step, 1.0)
        self.assert_same_updates(
            mars_optax.scale_by_mars(b2=0.97, **keywords),
            optax.chain(*links, optax.scale_by_adam(0.9, 0.97)),
            SHAPES | VECTORS,
            jit=True,
            rtol=1e-14,  # the compiler contracts products and sums where it likes
        )

    @MOMENTUM_OPTIONS
    def test_lion_is_correction_clip_average_and_sign(self, gamma, first_step, max_norm):
        keywords, links = _options(gamma, first_step, max_norm)
        self.assert_same_updates(
            mars_optax.scale_by_mars_lion(**keywords),
            optax.chain(*links, optax.ema(0.9, debias=False), optax.scale_by_sign()),
            SHAPES | VECTORS,
        )

    @MOMENTUM_OPTIONS
    def test_shampoo_is_correction_clip_average_and_newton_schulz(
        self, gamma, first_step, max_norm
    ):
        keywords, links = _options(gamma, first_step, max_norm)
        self.assert_same_updates(
            mars_optax.scale_by_mars_shampoo(eps=1e-6, ns_dtype="float64", **keywords),
            optax.chain(
                *links,
                optax.ema(0.9, debias=False),
                _orthogonalized("shampoo", 0.9, 1e-6),
            ),
            SHAPES,
        )

    @MOMENTUM_OPTIONS
    def test_mars_m_is_correction_clip_average_and_newton_schulz(self, gamma, first_step, max_norm):
        keywords, links = _options(gamma, first_step, max_norm)
        self.assert_same_updates(
            mars_optax.scale_by_mars_m(ns_dtype="float64", **keywords),
            optax.chain(
                *links,
                optax.ema(0.9, debias=False),
                _orthogonalized("mars_m", 0.9, 1e-7),
            ),
            SHAPES,
        )

    def test_the_gradients_of_these_tests_are_clipped_at_some_steps_only(self):
        for first_step in ("zeros", "no_correction"):
            (correct, _) = _links(0.04, 0.9, first_step, 1.0)
            corrected = _run(correct, SHAPES | VECTORS, jit=False)
            for name, c in corrected.items():
                norms = np.sqrt(np.sum(c.reshape(STEPS, -1) ** 2, axis=1))
                self.assertGreater(np.max(norms), 1.0, name)
                self.assertLess(np.min(norms), 1.0, name)


class AdamWTest(Float64TestCase):
    """With the correction and the clip off, nothing but Optax's AdamW is left."""

    @parameterized.product(
        off=({"gamma": 0.0}, {"correction": "none"}),
        learning_rate=("constant", "schedule"),
        masked=(False, True),
        optimize_1d=(False, True),
    )
    def test_mars_without_correction_and_clip_is_adamw(
        self, off, learning_rate, masked, optimize_1d
    ):
        shapes = SHAPES | VECTORS
        mask = {name: name != "kernel" for name in shapes} if masked else None
        learning_rate = 0.01 if learning_rate == "constant" else _schedule(np.arange(STEPS) / 100)
        common = {"b1": 0.9, "b2": 0.999, "eps": 1e-7, "weight_decay": 0.1, "mask": mask}
        ours = mars_optax.mars(
            learning_rate,
            **common,
            **off,
            max_norm=None,
            optimize_1d=optimize_1d,
            b1_1d=0.9,
            b2_1d=0.999,
            weight_decay_1d=None,
        )
        theirs = optax.adamw(learning_rate, **common)
        actual, expected = (_run(tx, shapes, jit=False) for tx in (ours, theirs))
        for name in shapes:
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)

    def test_amsgrad_takes_the_maximum_before_bias_correction_unlike_optax(self):
        """The reference code keeps max(v); Optax keeps max(v / (1 - b2^t)).

        As 1 - b2^t grows, the largest corrected v is an early one, and Optax divides by it for
        ever, while the largest raw v is corrected anew at each step.
        """
        shapes = {"kernel": (4, 6)}
        common = {"b1": 0.9, "b2": 0.99, "eps": 1e-8}
        ours = mars_optax.mars(0.01, **common, gamma=0.0, max_norm=None, amsgrad=True)
        theirs = optax.amsgrad(0.01, **common)
        actual, other = (_run(tx, shapes, jit=False)["kernel"] for tx in (ours, theirs))
        param, grads = _tree(shapes, 0)["kernel"], _tree(shapes, 1, STEPS)["kernel"]
        expected = numpy_reference.mars_leaf(
            param, grads, rule="adamw", lr=0.01, **common, gamma=0.0, max_norm=None, amsgrad=True
        )
        updates = np.diff(np.concatenate([param[None], expected.params]), axis=0)
        # The differences of parameters of size 1 carry their rounding.
        np.testing.assert_allclose(actual, updates, rtol=0, atol=1e-15)
        np.testing.assert_allclose(actual[0], other[0], rtol=1e-12)
        self.assertGreater(np.max(np.abs(actual - other)), 1e-3)


if __name__ == "__main__":
    absltest.main()
