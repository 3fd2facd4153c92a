"""Properties of every optimizer, on trees, values and settings drawn at random.

Steps run operation by operation: a tree has a program of its own, an operation on a shape has not.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from absl.testing import absltest

import mars_optax
from mars_optax._src import execute
from tests.hardening import strategies
from tests.support import interpreter, trees

FEW, MANY = 12, 200
STEPS = 2
# The largest number whose square float32 holds.
LARGEST_ROOT = float(np.sqrt(np.finfo(np.float32).max))


def _run(
    tx: Any,
    tree: strategies.Tree,
    of: Callable[[Any], Any] = lambda tree: tree,
    *,
    times: float = 1.0,
    step: Any = None,
) -> tuple[Any, Any]:
    """The results and the states of some steps.

    Args:
      tx: The optimizer.
      tree: The parameters and gradients.
      of: What is made of each of their trees before.
      times: A factor of all gradients.
      step: What makes new parameters and a new state of gradients, state and parameters. Without
        it, the results are updates, and the parameters stay.
    """
    params = of(tree.params())
    state, results, states = tx.init(params), [], []
    for i in range(STEPS):
        # In exact mode and STORM what the gradients at the previous parameters would be.
        others = of(tree.grads(100 + i, times))
        arguments = (of(tree.grads(i, times)), state, params)
        extra = {"grad_fn": lambda _, others=others: others}
        if step is None:
            result, state = tx.update(*arguments, **extra)
        else:
            result, state = params, state = step(*arguments, **extra)
        results.append(result)
        states.append(state)
    return results, states


def _by_two_calls(tx: Any) -> Any:
    def step(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


class ContractTest(absltest.TestCase):
    """Structure, shapes, dtypes and weak types stay; nothing that is not finite appears."""

    def check(self, tree: strategies.Tree, setting: strategies.Setting):
        tx, params = setting.make(), tree.params()
        first = tx.init(params)
        trees.assert_same_types(jax.eval_shape(tx.init, params), first)
        results, states = _run(tx, tree)
        for updates, state in zip(results, states, strict=True):
            trees.assert_same_types(updates, params)
            trees.assert_same_types(state, first)
            self.assertEmpty(trees.weak_leaves((updates, state)))
            trees.assert_same_types(optax.apply_updates(params, updates), params)
            self.assertTrue(trees.all_finite(updates))
            self.check_finite(state, tree.scale)

    def check_finite(self, state: Any, scale: float):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            values = np.asarray(leaf)
            self.assertFalse(np.any(np.isnan(values)), path)
            names = [getattr(key, "name", None) for key in path]
            # An average of squares that overflow is infinite, as Optax's Adam has it.
            if scale < LARGEST_ROOT or not {"nu", "nu_max"} & set(names):
                self.assertTrue(np.all(np.isfinite(values)), path)

    @strategies.examples(FEW, tree=strategies.trees(), setting=strategies.settings())
    def test_types_stay_and_numbers_stay_finite(self, tree, setting):
        self.check(tree, setting)

    @pytest.mark.slow
    @strategies.examples(MANY, tree=strategies.trees(), setting=strategies.settings())
    def test_types_stay_and_numbers_stay_finite_in_many_examples(self, tree, setting):
        self.check(tree, setting)


PLACES: Any = {
    "tree": strategies.trees(),
    # The norm of STORM's clip is that of all leaves, whose sum has an order.
    "setting": strategies.settings(strategies.OPTIMIZERS[:-1]),
    "order": st.permutations(range(40)),
}


class PlaceTest(absltest.TestCase):
    """What becomes of a leaf does not depend on its place in the tree, nor on the tree."""

    def check(self, tree: strategies.Tree, setting: strategies.Setting, order: Sequence[float]):
        permutation = np.argsort(order[: len(tree.leaves())])
        tx = setting.make()
        (*_, expected), (*_, state) = _run(tx, tree)
        (*_, actual), (*_, flat_state) = _run(
            tx, tree, lambda tree: [jax.tree.leaves(tree)[i] for i in permutation]
        )
        trees.assert_equal(actual, [jax.tree.leaves(expected)[i] for i in permutation])
        self.assertEqual(trees.shapes([state]), trees.shapes([flat_state]))

    @strategies.examples(FEW, **PLACES)
    def test_leaves_that_are_permuted_permute_the_results(self, tree, setting, order):
        self.check(tree, setting, order)

    @pytest.mark.slow
    @strategies.examples(MANY, **PLACES)
    def test_leaves_that_are_permuted_permute_the_results_in_many_examples(
        self, tree, setting, order
    ):
        self.check(tree, setting, order)


SCALED: Any = {
    # So large that MARS-M's epsilon, 1e-7, is lost in the norm. float16 has no such numbers.
    "tree": strategies.trees(("float32", "bfloat16", "complex64"), (1e4,)),
    "setting": strategies.settings(clipped=False),
    "power": st.sampled_from((1, 7, 30)),
}


class ScaleTest(absltest.TestCase):
    """Without a clip and an epsilon, the updates do not depend on the scale of all gradients."""

    def check(self, tree: strategies.Tree, setting: strategies.Setting, power: int):
        options: dict[str, Any] = {"eps_1d": 0.0} if setting.name != "storm_adamw" else {}
        if setting.name not in ("mars_lion", "mars_m"):
            options["eps"] = 0.0
        tx = setting.make(**options)
        (*_, expected), _ = _run(tx, tree)
        (*_, actual), _ = _run(tx, tree, times=2.0**power)
        # A power of two commutes with every rounding.
        trees.assert_equal(actual, expected)

    @strategies.examples(FEW, **SCALED)
    def test_updates_do_not_depend_on_the_scale_of_gradients(self, tree, setting, power):
        self.check(tree, setting, power)

    @pytest.mark.slow
    @strategies.examples(MANY, **SCALED)
    def test_updates_do_not_depend_on_the_scale_of_gradients_in_many_examples(
        self, tree, setting, power
    ):
        self.check(tree, setting, power)


FUSED: Any = {
    "tree": strategies.trees(("float32",), (1e-8, 1.0)),
    "setting": strategies.settings(strategies.OPTIMIZERS[:-1]),
}


class FusedStepTest(absltest.TestCase):
    """One call makes the parameters and the state of two."""

    def check(self, tree: strategies.Tree, setting: strategies.Setting, implementation: Any):
        tx = setting.make(implementation="xla")
        expected = _run(tx, tree, step=_by_two_calls(tx))
        tx = setting.make(implementation=implementation)
        step = lambda *args, **extra: mars_optax.fused_step(tx, *args, **extra)  # noqa: E731
        # As where kernels pay: the groups, decays and rates of the fused path.
        with (
            interpreter.elsewhere(),
            mock.patch.object(execute, "kernels_are_faster", return_value=True),
        ):
            actual = _run(tx, tree, step=step)
        trees.assert_same_types(actual, expected)
        trees.assert_close(actual, expected, rtol=2e-6, atol=2e-6)

    @strategies.examples(FEW, **FUSED)
    def test_the_fused_step_makes_what_two_calls_make(self, tree, setting):
        self.check(tree, setting, None)

    @strategies.examples(3, **FUSED)
    def test_kernels_make_what_two_calls_make(self, tree, setting):
        self.check(tree, setting, "pallas")

    @pytest.mark.slow
    @strategies.examples(MANY, **FUSED)
    def test_the_fused_step_makes_what_two_calls_make_in_many_examples(self, tree, setting):
        self.check(tree, setting, None)


CHAINS: Any = {
    "tree": strategies.trees(("float32",)),
    "b1": st.sampled_from((0.95, 0.0, 0.5)),
    "gamma": st.sampled_from((0.025, 0.0, -0.05, 0.5)),
    "max_norm": st.sampled_from((1.0, None, 1e-3)),
}


class ChainTest(absltest.TestCase):
    """The direction of MARS-AdamW is that of its links, to the last bit."""

    def check(self, tree: strategies.Tree, b1: float, gamma: float, max_norm: float | None):
        numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
        tx = mars_optax.scale_by_mars(
            b1, gamma=gamma, max_norm=max_norm, weight_dimension_numbers=numbers
        )
        clip = mars_optax.clip_by_leaf_norm(max_norm or 1.0, weight_dimension_numbers=numbers)
        chain = optax.chain(
            mars_optax.correct_gradients(gamma, b1),
            clip if max_norm is not None else optax.identity(),
            optax.scale_by_adam(b1, 0.99),
        )
        # Compiled parts, as Optax has some, contract products and sums.
        with jax.disable_jit():
            trees.assert_equal(_run(tx, tree)[0], _run(chain, tree)[0])

    @strategies.examples(FEW, **CHAINS)
    def test_mars_is_correction_clip_and_adam(self, tree, b1, gamma, max_norm):
        self.check(tree, b1, gamma, max_norm)

    @pytest.mark.slow
    @strategies.examples(MANY, **CHAINS)
    def test_mars_is_correction_clip_and_adam_in_many_examples(self, tree, b1, gamma, max_norm):
        self.check(tree, b1, gamma, max_norm)


if __name__ == "__main__":
    absltest.main()
