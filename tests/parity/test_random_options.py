"""Options drawn at random, in float64, against the NumPy oracle.

The recorded trajectories leave most combinations of options out; here each seed is one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests.support import goldens, numpy_reference, trees

STEPS = 8
MATRICES = {"wide": (3, 5), "tall": (6, 2), "square": (4, 4)}
OTHERS = {"bias": (5,), "scalar": ()}
SEEDS = tuple(range(6))


def _pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def _common(rng):
    """Options that every optimizer has, as the oracle takes them."""
    return {
        "lr": rng.uniform(0.0, 0.1, size=STEPS) if rng.random() < 0.5 else 0.03,
        "b1": float(_pick(rng, 0.0, 0.5, 0.9, 0.95, 0.99)),
        "gamma": rng.uniform(-0.1, 0.3, STEPS) if rng.random() < 0.5 else rng.uniform(-0.1, 1.0),
        "weight_decay": float(_pick(rng, 0.0, 0.01, 0.3)),
        "max_norm": _pick(rng, None, 0.2, 1.0, 3.0),
        "first_step": _pick(rng, "zeros", "no_correction"),
    }


def _vector_options(rng):
    return {
        "learning_rate_1d": _pick(rng, None, 0.01),
        "b1_1d": float(_pick(rng, 0.0, 0.8, 0.9)),
        "b2_1d": float(_pick(rng, 0.5, 0.95, 0.999)),
        "eps_1d": _pick(rng, None, 1e-3),
        "weight_decay_1d": _pick(rng, None, 0.0, 0.2),
    }


def _ns_options(rng):
    if rng.random() < 0.5:
        return {"ns_steps": int(rng.integers(1, 7))}
    steps = int(rng.integers(1, 5))
    triples = [tuple(np.array([2.0, -1.5, 0.5]) + 0.1 * rng.normal(size=3)) for _ in range(steps)]
    return {"ns_steps": steps, "ns_coeffs": triples}


def _schedule_or_number(value):
    if np.ndim(value) == 0:
        return value
    return lambda count: jnp.asarray(value)[count]


def _draw(rng, shapes):
    """Parameters and gradients in PyTorch's orientation; norms lie on both sides of the clip."""
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    scales = np.exp(rng.normal(size=STEPS))
    grads = {
        name: rng.normal(size=(STEPS, *shape)) * scales.reshape(STEPS, *(1,) * len(shape))
        for name, shape in shapes.items()
    }
    return params, grads


class RandomOptionsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    def assert_equals_oracle(self, tx, oracle, shapes, rng):
        """`oracle(name, param, grads)` is the trajectory of one leaf."""
        params, grads = _draw(rng, shapes)
        expected = {name: oracle(name, params[name], grads[name]) for name in shapes}

        def turned(tree):
            return {
                name: jnp.asarray(goldens.oriented(x, len(shapes[name])))
                for name, x in tree.items()
            }

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        ours = turned(params)
        # Operation by operation, which takes less time than to compile every draw of options.
        with jax.disable_jit():
            (_, state), history = jax.lax.scan(step, (ours, tx.init(ours)), turned(grads))
        state = goldens.state_by_field(state)
        for name, trajectory in expected.items():
            rank = len(shapes[name])
            for t in range(STEPS):
                goldens.assert_close(
                    goldens.oriented(np.asarray(history[name]), rank)[t],
                    trajectory.params[t],
                    rtol=1e-10,
                    atol=1e-10,
                    what=f"{name} params after step {t + 1}",
                )
            for field in ("mu", "nu", "nu_max"):
                value = getattr(trajectory, field)
                if value is None:
                    self.assertNotIn(name, state.get(field, {}))
                    continue
                goldens.assert_close(
                    goldens.oriented(np.asarray(state[field][name]), rank),
                    value,
                    rtol=1e-10,
                    atol=1e-10,
                    what=f"{name} final {field}",
                )

    def _vectors(self, main, vector, *, amsgrad=False):
        """The oracle of the partner rule: AdamW with the values for vectors."""
        rate = vector["learning_rate_1d"]
        decay = vector["weight_decay_1d"]
        eps = vector["eps_1d"]
        return lambda param, grads: numpy_reference.adamw_leaf(
            param,
            grads,
            lr=main["lr"] if rate is None else rate,
            b1=vector["b1_1d"],
            b2=vector["b2_1d"],
            eps=main.get("eps", 1e-8) if eps is None else eps,
            weight_decay=main["weight_decay"] if decay is None else decay,
            amsgrad=amsgrad,
        )

    def _keywords(self, main):
        """The oracle's options as the optimizer's."""
        renamed = {key: value for key, value in main.items() if key not in ("lr", "gamma")}
        return {
            "learning_rate": _schedule_or_number(main["lr"]),
            "gamma": _schedule_or_number(main["gamma"]),
            **renamed,
        }

    @parameterized.parameters(*SEEDS)
    def test_mars_equals_the_oracle(self, seed):
        rng = np.random.default_rng(seed)
        main, vector = _common(rng), _vector_options(rng)
        main |= {"b2": float(_pick(rng, 0.9, 0.99)), "eps": float(_pick(rng, 1e-8, 1e-3))}
        main["amsgrad"] = bool(rng.integers(2))
        main["second_moment"] = _pick(rng, "corrected", "gradient")
        optimize_1d = bool(rng.integers(2))
        vectors = self._vectors(main, vector, amsgrad=main["amsgrad"])

        def oracle(name, param, grads):
            if name in OTHERS and not optimize_1d:
                return vectors(param, grads)
            return numpy_reference.mars_leaf(param, grads, rule="adamw", **main)

        tx = mars_optax.mars(optimize_1d=optimize_1d, **self._keywords(main), **vector)
        # By default a leaf of any rank from 2 on is one matrix.
        self.assert_equals_oracle(tx, oracle, MATRICES | OTHERS | {"conv": (2, 3, 4)}, rng)

    @parameterized.parameters(*SEEDS)
    def test_lion_equals_the_oracle(self, seed):
        rng = np.random.default_rng(100 + seed)
        main, vector, optimize_1d = _common(rng), _vector_options(rng), bool(rng.integers(2))
        vectors = self._vectors(main, vector)

        def oracle(name, param, grads):
            if name in OTHERS and not optimize_1d:
                return vectors(param, grads)
            return numpy_reference.mars_leaf(param, grads, rule="lion", **main)

        tx = mars_optax.mars_lion(optimize_1d=optimize_1d, **self._keywords(main), **vector)
        self.assert_equals_oracle(tx, oracle, MATRICES | OTHERS | {"conv": (2, 3, 4)}, rng)

    @parameterized.parameters(*SEEDS)
    def test_shampoo_equals_the_oracle(self, seed):
        rng = np.random.default_rng(200 + seed)
        main, vector, ns = _common(rng), _vector_options(rng), _ns_options(rng)
        main |= {"b2": float(_pick(rng, 0.9, 0.99)), "eps": float(_pick(rng, 1e-8, 1e-3))}
        amsgrad, optimize_1d = bool(rng.integers(2)), bool(rng.integers(2))
        vectors = self._vectors(main, vector, amsgrad=amsgrad)

        def oracle(name, param, grads):
            if name in MATRICES:
                return numpy_reference.mars_leaf(param, grads, rule="shampoo", **main, **ns)
            if optimize_1d:
                return numpy_reference.mars_leaf(
                    param, grads, rule="adamw", amsgrad=amsgrad, **main
                )
            return vectors(param, grads)

        tx = mars_optax.mars_shampoo(
            amsgrad=amsgrad,
            optimize_1d=optimize_1d,
            ns_dtype="float64",
            **ns,
            **self._keywords(main),
            **vector,
        )
        self.assert_equals_oracle(tx, oracle, MATRICES | OTHERS | {"conv": (2, 3, 4)}, rng)

    @parameterized.parameters(*SEEDS)
    def test_mars_m_equals_the_oracle(self, seed):
        rng = np.random.default_rng(300 + seed)
        main, vector, ns = _common(rng), _vector_options(rng), _ns_options(rng)
        vectors = self._vectors(main, vector)

        def oracle(name, param, grads):
            if name in MATRICES:
                return numpy_reference.mars_leaf(param, grads, rule="mars_m", **main, **ns)
            return vectors(param, grads)

        tx = mars_optax.mars_m(ns_dtype="float64", **ns, **self._keywords(main), **vector)
        self.assert_equals_oracle(tx, oracle, MATRICES | OTHERS | {"conv": (2, 3, 4)}, rng)


if __name__ == "__main__":
    absltest.main()
