"""Every error of the package: it comes, has three parts, and stands on the page of errors."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import mars_optax
from tests.contract import test_bad_input
from tests.hardening import error_table

_EXAMPLES = tuple(e for e in error_table.EXAMPLES if e.needs <= jax.__version_info__)
# Expected, got, and what to do: the verb with which an advice begins.
_PARTS = re.compile(
    r"(?P<subject>.+?) ?(?:expected )(?P<expected>.+?),? got (?P<got>.+?)\. "
    r"(?P<advice>(?:Call|Correct|Declare|Give|Leave|Name|Pass|Return|Set|Use) .+)\.",
    re.DOTALL,
)


# Arguments that no example and none of the crossed cases of `test_bad_input` is about.
_FURTHER: dict[str, Callable[[], Any]] = {
    "learning_rate_1d": lambda: mars_optax.mars(0.1, learning_rate_1d="0.1"),
    "weight_decay": lambda: mars_optax.mars(0.1, weight_decay="0.1"),
    "weight_decay_1d": lambda: mars_optax.mars_m(0.1, weight_decay_1d="0.1"),
    "optimize_1d": lambda: mars_optax.mars_lion(0.1, optimize_1d=None),
    "row_b2": lambda: mars_optax.mars_m(0.1, row_b2=1.0),
    "shampoo_beta": lambda: mars_optax.mars_soap(0.1, shampoo_beta=1.0),
    "max_precond_dim": lambda: mars_optax.mars_soap(0.1, max_precond_dim=jnp.asarray(8)),
    "one_sided": lambda: mars_optax.mars_soap(0.1, one_sided="left"),
    "precondition_dtype": lambda: mars_optax.mars_soap(0.1, precondition_dtype="float8_e4m3fn"),
    "alpha": lambda: mars_optax.mars_m(0.1, alpha="1"),
    "decay": lambda: mars_optax.AdaptiveGamma(decay=1.0),
    "nesterov": lambda: mars_optax.storm_adamw(0.1, nesterov="yes"),
    "rescale": lambda: mars_optax.cautious(mars_optax.scale_by_mars(), rescale="median"),
    "optimizer": lambda: mars_optax.fused_step(None, {}, (), {}),
    "updates": lambda: mars_optax.stochastic_apply_updates(
        {"w": jnp.ones(2)}, {"v": jnp.ones(2)}, jax.random.key(0)
    ),
    "default": lambda: mars_optax.dimension_numbers_by_path([("a", None)], default="rank3"),
    "rules": lambda: mars_optax.dimension_numbers_by_path(None),
    "weight_dimension_numbers": lambda: mars_optax.mars(
        0.1, weight_dimension_numbers=lambda params: {"kernel": "matrix"}
    ).init({"kernel": jnp.ones((3, 4))}),
    "grad_fn": lambda: _update("prev_params", jnp.ones(3), correction="exact"),
    "state.prev_grad": lambda: _update("prev_grad", jnp.ones(1)),
    "state.prev_grad_scale": lambda: _update(
        "prev_grad_scale", jnp.ones(3), prev_grad_dtype="float8_e5m2"
    ),
}


def _update(field: str, buffer: jax.Array, **settings: Any) -> Any:
    """An update where a field of the state has another shape than the gradients."""
    tx, grads = mars_optax.scale_by_mars(**settings), jnp.ones(3)
    state = tx.init(grads)._replace(**{field: buffer})
    return tx.update(grads, state, grads, grad_fn=lambda p: p[:2])


class MessageTest(parameterized.TestCase):
    @parameterized.named_parameters(*((f"_{e.when[:60]}", e) for e in _EXAMPLES))
    def test_it_says_what_was_expected_what_was_got_and_what_to_do(self, example):
        self.assertIsInstance(example.raised, TypeError | ValueError | NotImplementedError)
        match = _PARTS.fullmatch(example.message)
        self.assertIsNotNone(match, example.message)
        # An argument in backticks, or a leaf's path.
        self.assertRegex(match["subject"], r"`[\w.]+`|'[\w/]+'")
        self.assertStartsWith(f"got {match['got']}", example.got)

    @parameterized.parameters(*_FURTHER.items())
    def test_the_argument_is_named(self, argument: str, trigger: Callable[[], Any]):
        with self.assertRaises((TypeError, ValueError)) as caught:
            trigger()
        self.assertRegex(str(caught.exception), _PARTS)
        self.assertStartsWith(str(caught.exception), f"`{argument}`: expected ")

    def test_every_raise_has_an_example(self):
        reached = [e.site for e in _EXAMPLES]
        skipped = len(error_table.EXAMPLES) - len(_EXAMPLES)
        unreached = [
            r
            for r in error_table.raises()
            if not any(file == r.file and r.first <= line <= r.last for file, line in reached)
        ]
        self.assertLessEqual(len(unreached), skipped, unreached)

    def test_no_two_examples_reach_one_raise(self):
        sites = [e.site for e in _EXAMPLES]
        self.assertLen(set(sites), len(sites))

    def test_every_template_names_its_parts(self):
        templates = [r.template for r in error_table.raises()]
        self.assertGreater(len(templates), 40)
        for template in templates:
            if not template.startswith(("{_message(", "{message(")):
                self.assertRegex(template, r"(?s)expected .*got ")

    def test_every_checked_argument_is_passed_wrong_by_some_test(self):
        tried = {bad.argument for bad in test_bad_input.VALUES}
        tried |= {m[1] for e in _EXAMPLES if (m := re.match(r"`(\w+)`", e.message))}
        tried |= _FURTHER.keys()
        self.assertContainsSubset(error_table.checked_arguments(), tried)

    def test_the_page_is_made_from_the_table(self):
        if jax.__version_info__ < (0, 10):
            self.skipTest("the table is not whole")
        self.assertEqual(error_table.PAGE.read_text(), error_table.render())


if __name__ == "__main__":
    absltest.main()
