"""A step that the registry has for elementwise is: each entry of a result is that of its operands.

Then whatever executes steps, and whatever divides leaves, need not know what they compute.
"""

from collections.abc import Iterator
from typing import Any

import jax
from absl.testing import absltest, parameterized

from tests import registry

# One entry of the result from the entries there of the operands, whatever the shape.
_ELEMENTWISE = """
    abs add and broadcast_in_dim clamp complex conj convert_element_type copy copy_p div eq exp exp2
    ge gt imag integer_pow is_finite le log lt max min mul ne neg not or pow real rsqrt select_n
    sign sqrt square sub tanh xor
"""


def _steps(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of those that it calls."""
    for equation in jaxpr.eqns:
        parameters = list(equation.params.values())
        leaves = jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, "eqns"))
        inner = [x for x in leaves if hasattr(x, "eqns")]
        for other in inner:
            yield from _steps(other)
        if not inner:
            yield equation


def _mixes(equation: Any) -> bool:
    """Whether entries of leaves meet others, or move. Scalars may do what they want."""
    operands = [x.aval.shape for x in equation.invars]
    results = [x.aval.shape for x in equation.outvars]
    if equation.primitive.name in _ELEMENTWISE.split():
        return any(shape not in ((), *results) for shape in operands)
    return any([*operands, *results])


class ElementwiseTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select())
    def test_a_step_is_elementwise_unless_it_says_why_not(self, entry: registry.Entry):
        # The norm of the clip is taken apart from the step.
        tx = entry.make(**{"max_norm": None} if entry.accepts("max_norm") else {})
        params, grads = entry.params(), entry.grads()
        program = jax.make_jaxpr(tx.update)(grads, jax.eval_shape(tx.init, params), params)
        mixing = {equation.primitive.name for equation in _steps(program) if _mixes(equation)}
        if entry.not_elementwise:
            self.assertNotEmpty(mixing, f"a reason in vain: {entry.not_elementwise}")
        else:
            self.assertEmpty(mixing)


if __name__ == "__main__":
    absltest.main()
