"""The variant of docs/add_a_variant.md keeps the contracts, by nothing but its own file."""

import doctest
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import enrol_example, interpreter, pages, trees

_ROOT = pathlib.Path(__file__).parent.parent.parent
_MODULE = pages.example_variant()
_ENTRY, _CLIPPED, _MEMORY_FREE, _DIRECTION = enrol_example.entries()


def _scanned(tx: Any, grads: Any, params: Any, **kwargs: Any) -> Any:
    """Parameters and state after a step on each gradient of a stack, compiled as one loop."""

    def body(carry: Any, gradient: Any) -> Any:
        params, state = carry
        return mars_optax.fused_step(tx, gradient, state, params, **kwargs), None

    return jax.jit(lambda: jax.lax.scan(body, (params, tx.init(params)), grads)[0])()


def _stack(entry: registry.Entry, steps: int = 4) -> Any:
    return jax.tree.map(lambda *g: jnp.stack(g), *[entry.grads(step) for step in range(steps)])


class ExampleVariantTest(parameterized.TestCase):
    def test_its_docstrings_examples_run(self):
        results = doctest.testmod(_MODULE, optionflags=doctest.NORMALIZE_WHITESPACE)
        self.assertEqual(results.failed, 0)
        self.assertGreater(results.attempted, 0)

    @parameterized.parameters(("ruff", "check", "-"), ("ruff", "format", "--check", "-"))
    def test_its_text_is_in_order(self, *command: str):
        command = (sys.executable, "-m", *command, "--stdin-filename", "mars_optax/_src/example.py")
        text = pages.example_text()
        result = subprocess.run(command, input=text, text=True, capture_output=True, cwd=_ROOT)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_it_is_the_chain_of_links(self):
        params, grads = _CLIPPED.params(), _stack(_CLIPPED)
        actual, _ = _scanned(_CLIPPED.make(weight_decay=0.1), grads, params)
        chain = optax.chain(
            mars_optax.correct_gradients(gamma=0.025, b1=0.9),
            mars_optax.clip_by_leaf_norm(1.0),
            optax.trace(0.9),
            optax.add_decayed_weights(0.1),
            optax.scale(-0.1),
        )
        expected, _ = _scanned(chain, grads, params)
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_the_memory_free_form_takes_the_same_steps(self):
        params, grads = _ENTRY.params(), _stack(_ENTRY)
        actual, state = _scanned(_MEMORY_FREE.make(), grads, params)
        expected, _ = _scanned(_ENTRY.make(), grads, params)
        self.assertEmpty(trees.fields(state, "prev_grad"))
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_kernels_run_it(self):
        # Large enough for a block, and a rest.
        params = {"kernel": jnp.linspace(-1.0, 1.0, 37 * 64).reshape(37, 64)}
        grads = jax.tree.map(lambda p: jnp.stack([jnp.sin(9 * p), jnp.cos(7 * p)]), params)
        expected = _scanned(_CLIPPED.make(weight_decay=0.1, implementation="xla"), grads, params)
        tx = _CLIPPED.make(weight_decay=0.1, implementation="pallas")
        with interpreter.elsewhere():
            jaxpr = jax.make_jaxpr(lambda: _scanned(tx, grads, params))()
            actual = _scanned(tx, grads, params)
        self.assertIn("pallas_call", str(jaxpr))
        trees.assert_same_types(actual, expected)
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_exact_mode_evaluates_at_the_previous_parameters(self):
        params, grads = _ENTRY.params(), _stack(_ENTRY, steps=1)
        # Where the gradient is the same everywhere there is nothing to correct after step one.
        grad_fn = lambda _: jax.tree.map(lambda g: g[0], grads)  # noqa: E731
        twice = jax.tree.map(lambda g: jnp.concatenate([g, g]), grads)
        actual, _ = _scanned(
            _ENTRY.make(correction="exact", first_step="no_correction"),
            twice,
            params,
            grad_fn=grad_fn,
        )
        expected, _ = _scanned(_ENTRY.make(correction="none"), twice, params)
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-6)

    @parameterized.product(
        entry=(_ENTRY, _MEMORY_FREE, _DIRECTION),
        dtypes=(("bfloat16", "float32"), ("float32", "bfloat16")),
    )
    def test_types_are_a_fixed_point(self, entry: registry.Entry, dtypes: tuple[str, str]):
        params, grads = entry.params(dtypes[0]), entry.grads(0, dtypes[1])
        transformations = [entry.make(mu_dtype="float32"), entry.make()]
        if entry.kind == "optimizer":
            transformations.append(optax.MultiSteps(entry.make(), 2).gradient_transformation())
        for tx in transformations:
            state = jax.eval_shape(tx.init, params)
            updates, new_state = jax.eval_shape(tx.update, grads, state, params)
            trees.assert_same_types(new_state, state)
        like = params if entry.kind == "optimizer" else grads
        trees.assert_same_types(updates, like)

    def test_describe_knows_its_state(self):
        tx, params = _ENTRY.make(prev_grad_dtype="bfloat16"), _ENTRY.params()
        report = mars_optax.describe(params, tx)
        # The count, an average in float32, and half as much for the previous gradient.
        self.assertEqual(report.state_bytes, 4 + report.param_bytes * 3 // 2)

    @pytest.mark.slow
    def test_it_passes_the_contracts_of_the_registry(self):
        files = (
            "compilation",
            "donation",
            "elementwise",
            "init",
            "inject",
            "mesh_matrix",
            "schedules",
            "shard_map",
            "sharding",
            "state_types",
            "trees",
            "vmap",
            "wrappers",
        )
        result = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-n", "0", "-p", "tests.support.enrol_example"),
                *(f"tests/contract/test_{name}.py" for name in files),
                *("-k", "sgd"),
            ],
            cwd=_ROOT,
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stdout[-10_000:])
        (passed,) = re.findall(r"(\d+) passed", result.stdout)
        self.assertGreater(int(passed), 100)


if __name__ == "__main__":
    absltest.main()
