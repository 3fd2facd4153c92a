"""The state of an optimizer with two rules is one flat tuple of trees of all parameters."""

import pickle
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests.support import trees

_NS = {"ns_dtype": "float32", "ns_steps": 2}
_EXACT = {"correction": "exact"}
_EIGHT_BITS = {"prev_grad_dtype": "float8_e4m3fn"}
_STATES = {
    "mars": mars_optax.MarsState,
    "mars_lion": mars_optax.MarsLionState,
    "mars_shampoo": mars_optax.MarsShampooState,
    "mars_m": mars_optax.MarsMState,
}
_CASES = [
    *((name, options) for name in _STATES for options in ({}, _EXACT, _EIGHT_BITS)),
    *((name, {"amsgrad": True}) for name in ("mars", "mars_shampoo")),
    ("mars_shampoo", {"optimize_1d": True}),
]
_ABSENT = optax.MaskedNode()


def _options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, **(_NS if name in ("mars_m", "mars_shampoo") else {})}


def _make(name: str, options: dict[str, Any], rate: Any = 0.1) -> Any:
    return getattr(mars_optax, name)(rate, **_options(name, options))


def _params() -> dict[str, jax.Array]:
    return {"bias": jnp.array([0.5, -2.0]), "kernel": jnp.array([[1.0, -0.5], [0.25, 2.0]])}


def _grads(params: Any) -> Any:
    return jax.tree.map(lambda p: 3 * p + 1, params)


def _step(tx: Any, params: Any, state: Any) -> Any:
    return tx.update(_grads(params), state, params, grad_fn=_grads)[1]


class FlatStateTest(parameterized.TestCase):
    @parameterized.parameters(*_CASES)
    def test_the_fields_are_the_buffers_of_both_rules(self, name: str, options: dict[str, Any]):
        tx, params = _make(name, options), _params()
        state = _step(tx, params, tx.init(params))
        self.assertIs(type(state), _STATES[name])
        # The rules alone, each with its parameters.
        own = {k: v for k, v in _options(name, options).items() if k != "optimize_1d"}
        if name != "mars":
            own.pop("amsgrad", None)
        matrices = getattr(mars_optax, f"scale_by_{name}")(**own)
        vectors = mars_optax.scale_by_mars(
            0.9, 0.95, correction="none", max_norm=None, amsgrad="amsgrad" in options
        )
        if "optimize_1d" in options:
            vectors = mars_optax.scale_by_mars(weight_dimension_numbers=lambda _: None)
        kernel, bias = ({key: params[key]} for key in ("kernel", "bias"))
        ours = _step(matrices, kernel, matrices.init(kernel))
        theirs = _step(vectors, bias, vectors.init(bias))
        for field in ("mu", "nu", "nu_max", "prev_grad", "prev_grad_scale"):
            parts = [getattr(ours, field, None), getattr(theirs, field)]
            found = optax.tree.get(state, field)
            if parts == [None, None]:
                self.assertIsNone(found, field)
                continue
            joined = {"kernel": _ABSENT, "bias": _ABSENT, **(parts[0] or {}), **(parts[1] or {})}
            trees.assert_same_types(found, joined)
            trees.assert_close(found, joined, rtol=1e-5, atol=1e-6)
        self.assertEqual(int(optax.tree.get(state, "count")), 1)
        if options == _EXACT:
            trees.assert_equal(optax.tree.get(state, "prev_params"), params)
        else:
            self.assertIsNone(optax.tree.get(state, "prev_params"))

    @parameterized.parameters(*_CASES)
    def test_updates_keep_its_type_and_read_what_was_set(self, name: str, options: dict[str, Any]):
        tx, params = _make(name, options), _params()
        state = tx.init(params)
        trees.assert_same_types(_step(tx, params, state), state)
        mu = jax.tree.map(jnp.ones_like, params)
        changed = optax.tree.set(state, mu=mu, count=jnp.asarray(7, "int32"))
        trees.assert_same_types(changed, state)
        after = _step(tx, params, changed)
        self.assertEqual(int(after.count), 8)
        before = _step(tx, params, state._replace(count=changed.count))
        for key, b1 in (("kernel", 0.95), ("bias", 0.95 if "optimize_1d" in options else 0.9)):
            trees.assert_close(after.mu[key] - before.mu[key], b1 * mu[key], rtol=1e-5, atol=1e-6)

    @parameterized.parameters("mars", "mars_lion")
    def test_optimize_1d_has_the_chain_of_one_rule(self, name: str):
        params = _params()
        state = _make(name, {"optimize_1d": True}).init(params)
        for field in ("mu", "prev_grad"):
            trees.assert_equal(optax.tree.get(state, field), jax.tree.map(jnp.zeros_like, params))

    @parameterized.parameters(*_STATES)
    def test_it_survives_serialization(self, name: str):
        tx, params = _make(name, {}, optax.constant_schedule(0.1)), _params()
        fresh = tx.init(params)
        state = _step(tx, params, fresh)
        for copy in (
            pickle.loads(pickle.dumps(state)),
            flax.serialization.from_state_dict(fresh, flax.serialization.to_state_dict(state)),
            flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)),
        ):
            self.assertIs(type(copy), _STATES[name])
            trees.assert_equal(copy, state)
            self.assertEqual(jax.tree.structure(copy), jax.tree.structure(state))

    @parameterized.parameters(*_STATES)
    def test_schedules_count_as_the_state_does(self, name: str):
        """Also where a mask says what decays, and where the count is set, or was a number's."""
        params = _params()
        rate = lambda count: 0.1 * (count + 1.0)  # noqa: E731
        mask = jax.tree.map(lambda p: p.ndim > 1, params)
        scheduled = _make(name, {"weight_decay": rate, "weight_decay_1d": rate, "mask": mask}, rate)
        state = optax.tree.set(scheduled.init(params), count=jnp.int32(4))
        self.assertEqual(int(_step(scheduled, params, state).count), 5)
        fixed = _make(name, {"weight_decay": 0.5, "weight_decay_1d": 0.5, "mask": mask}, 0.5)
        actual, _ = scheduled.update(params, state, params)
        expected, _ = fixed.update(params, state, params)
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-7)

    @parameterized.parameters("mars", "mars_m")
    def test_a_batch_of_optimizers_has_a_batch_of_states(self, name: str):
        tx, params = _make(name, {}), _params()
        several = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
        states = jax.vmap(tx.init)(several)
        states = jax.vmap(lambda p, s: _step(tx, p, s))(several, states)
        one = _step(tx, params, tx.init(params))
        trees.assert_close(jax.tree.map(lambda x: x[0], states), one, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*_STATES)
    def test_wrappers_hold_it(self, name: str):
        params = _params()
        injected = optax.inject_hyperparams(getattr(mars_optax, name))(0.1)
        for tx in (optax.MultiSteps(_make(name, {}), 1), injected):
            state = tx.init(params)
            _, state = tx.update(_grads(params), state, params)
            (found,) = trees.fields(state, "prev_grad")
            trees.assert_equal(found, {**_grads(params), "bias": _ABSENT})

    def test_parameters_without_matrices_or_vectors(self):
        for params in ({"kernel": jnp.ones((2, 2))}, {"bias": jnp.ones(2)}, jnp.ones(2), {}):
            for name, options in _CASES:
                tx = _make(name, options)
                state = tx.init(params)
                trees.assert_same_types(_step(tx, params, state), state)

    def test_a_parameter_that_changes_its_rule_is_refused(self):
        params = _params()
        numbers = {"kernel": None, "bias": None}
        for saved, wanted in (({}, numbers), (numbers, {})):
            makes = [
                mars_optax.mars(0.1, weight_dimension_numbers=x) if x else mars_optax.mars(0.1)
                for x in (saved, wanted)
            ]
            with self.assertRaisesRegex(ValueError, r"`state\.prev_grad`.*leaf 'kernel'"):
                _step(makes[1], params, makes[0].init(params))


if __name__ == "__main__":
    absltest.main()
