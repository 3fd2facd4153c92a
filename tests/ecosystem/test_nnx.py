"""Flax NNX: stacked layers, adapters by `wrt`, and random numbers and statistics in exact mode.

That `nnx.Optimizer` takes every optimizer is tested in `tests/contract/test_flax.py`, and that its
exact mode equals plain arrays in `tests/parity/test_exact.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.ecosystem import plain
from tests.support import trees

X, Y = np.random.default_rng(0).standard_normal((2, 8, 3)).astype(np.float32)


class Deep(nnx.Module):
    """Three layers as one stack, run by a scan."""

    def __init__(self):
        keys = jax.random.split(jax.random.key(1), 3)
        self.layers = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))(keys)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return jnp.tanh(layer(x))

        return forward(x, self.layers)


def _unrolled_loss(layers, batch):
    x, y = batch
    for layer in layers:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x - y))


def _loss(model, batch):
    x, y = batch
    return jnp.mean(jnp.square(model(x) - y))


class Regularized(nnx.Module):
    """What has statistics and random numbers beside its parameters."""

    def __init__(self, rngs):
        # A bias would have a gradient of zero, whose rounding Adam makes a step of.
        self.inner = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))


class Adapted(nnx.Module):
    def __init__(self, rngs):
        base = nnx.Linear(3, 3, rngs=rngs)
        self.layer = nnx.LoRA(3, 2, 3, base_module=base, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class NnxTest(parameterized.TestCase):
    def test_a_scanned_stack_in_exact_mode_is_a_loop_over_its_layers(self):
        rules = mars_optax.dimension_numbers_by_path(
            [("kernel$", MuonDimensionNumbers(1, 2)), ("bias$", None)]
        )
        model = Deep()
        start = nnx.to_pure_dict(nnx.state(model.layers, nnx.Param))
        layers = [jax.tree.map(lambda x, i=i: jnp.array(x[i]), start) for i in range(3)]
        batches = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), (X, Y))
        expected, _ = plain.train(
            plain.optimizer("mars_m", correction="exact", max_norm=0.5),
            layers,
            batches,
            jax.grad(_unrolled_loss),
        )

        tx = plain.optimizer(
            "mars_m", correction="exact", max_norm=0.5, weight_dimension_numbers=rules
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, batch):
            graph, trained, rest = nnx.split(model, nnx.Param, ...)
            grad_fn = jax.grad(lambda p: _loss(nnx.merge(graph, p, rest), batch))
            optimizer.update(model, grad_fn(trained), grad_fn=grad_fn)

        for t in range(3):
            step(model, optimizer, jax.tree.map(lambda x, t=t: x[t], batches))
        actual = nnx.to_pure_dict(nnx.state(model.layers, nnx.Param))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *expected)
        trees.assert_close(actual, stacked, **plain.CLOSE)

    def test_adapters_are_trained_alone(self):
        self._check_adapters("Optimizer")

    @pytest.mark.slow
    def test_adapters_are_trained_alone_by_the_older_class(self):
        if not hasattr(nnx, "ModelAndOptimizer"):
            self.skipTest("Flax announced that it goes")
        self._check_adapters("ModelAndOptimizer")

    def _check_adapters(self, kind):
        model, tx = Adapted(nnx.Rngs(0)), plain.optimizer("mars", max_norm=1.0)
        optimizer = getattr(nnx, kind)(model, tx, wrt=nnx.LoRAParam)
        before = trees.copy(nnx.to_pure_dict(nnx.state(model)))["layer"]
        kernel, bias = before["base_module"]["kernel"], before["base_module"]["bias"]

        def adapter_loss(adapter, batch):
            x, y = batch
            update = x @ adapter["lora_a"] @ adapter["lora_b"]
            return jnp.mean(jnp.square(x @ kernel + bias + update - y))

        adapter = {name: jnp.asarray(before[name]) for name in ("lora_a", "lora_b")}
        batches = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), (X, Y))
        expected, expected_state = plain.train(tx, adapter, batches, jax.grad(adapter_loss))

        @nnx.jit
        def step(model, optimizer, batch):
            wrt = nnx.DiffState(0, nnx.LoRAParam)
            grads = nnx.grad(_loss, argnums=wrt)(model, batch)
            if kind == "Optimizer":
                optimizer.update(model, grads)
            else:
                optimizer.update(grads)

        for t in range(3):
            step(model, optimizer, jax.tree.map(lambda x, t=t: x[t], batches))
        after = nnx.to_pure_dict(nnx.state(model))["layer"]
        trees.assert_equal(after.pop("base_module"), before["base_module"])
        trees.assert_close(after, expected, rtol=1e-5, atol=1e-6)
        self.assertEqual(
            sorted(x.shape for x in jax.tree.leaves(optimizer.opt_state)),
            sorted(x.shape for x in jax.tree.leaves(expected_state)),
        )
        adapters = nnx.state(model, nnx.LoRAParam)
        paths = [leaf.path for leaf in mars_optax.describe(adapters, tx).leaves]
        self.assertEqual(paths, ["layer/lora_a", "layer/lora_b"])

    def test_exact_mode_draws_the_same_random_numbers_at_the_previous_parameters(self):
        """Both gradients are of copies that begin where the model is, as the page tells."""
        model, batch = Regularized(nnx.Rngs(0)), (X, Y)
        tx = plain.optimizer("mars", correction="exact", max_norm=1.0)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
        params, rest = jax.tree.map(jnp.array, (params, rest))  # the model's own will change

        @functools.partial(jax.grad, has_aux=True)
        def plain_grad(params, rest):
            copy = nnx.merge(graph, nnx.State(params), nnx.State(rest), copy=True)
            value = _loss(copy, batch)
            return value, nnx.to_pure_dict(nnx.state(copy, nnx.Not(nnx.Param)))

        @plain.jit
        def plain_step(params, state, rest):
            grads, new_rest = plain_grad(params, rest)
            updates, state = tx.update(
                grads, state, params, grad_fn=lambda p: plain_grad(p, rest)[0]
            )
            return optax.apply_updates(params, updates), state, new_rest

        @nnx.jit
        def step(model, optimizer):
            graph, params, rest = nnx.split(model, nnx.Param, ...)

            @functools.partial(jax.grad, has_aux=True)
            def grad_fn(params):
                copy = nnx.merge(graph, params, rest, copy=True)
                value = _loss(copy, batch)
                return value, nnx.state(copy, nnx.Not(nnx.Param))

            grads, moved = grad_fn(params)
            optimizer.update(model, grads, grad_fn=lambda p: grad_fn(p)[0])
            nnx.update(model, moved)

        state = tx.init(params)
        for _ in range(3):
            step(model, optimizer)
            before = rest
            params, state, rest = plain_step(params, state, rest)
        trees.assert_close(
            nnx.to_pure_dict(nnx.state(model, nnx.Param)), params, rtol=1e-5, atol=1e-5
        )
        for a, b in zip(
            jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))),
            jax.tree.leaves(rest),
            strict=True,
        ):
            if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                trees.assert_close(a, b, rtol=1e-5, atol=1e-6)
        # Other random numbers are another sample: the mistake would show.
        compiled = plain.jit(plain_grad)
        one, other = (compiled(params, r)[0]["outer"]["kernel"] for r in (before, rest))
        self.assertGreater(float(jnp.max(jnp.abs(one - other))), 1e-3)


if __name__ == "__main__":
    absltest.main()
