"""SOAP on meshes and inside the user's shard_map: values, places and types are those of one device.

Only the shorter sides are preconditioned: on the longer ones the first gradient leaves a null
space, whose basis, and with it the direction, may differ from one program to the next.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src.variants import soap
from tests.support import meshes, trees

_STACK, _MATRIX = MuonDimensionNumbers(1, 2), MuonDimensionNumbers(0, 1)
# Leaf: shape, axes, where it lies, where its Gram matrices lie.
_LEAVES: dict[str, Any] = {
    "layers": ((4, 2, 4), _STACK, P("x"), P("x")),
    "stack": ((3, 4, 8), _STACK, P(None, "y", "x"), P()),
    "tall": ((8, 4), _MATRIX, P("x", "y"), P()),
    "wide": ((2, 16), _MATRIX, P(None, ("x", "y")), P()),
}
_SPECS = {name: spec for name, (_, _, spec, _) in _LEAVES.items()}
_STATE_SPECS = soap.ScaleBySoapState(
    P(), _SPECS, _SPECS, *4 * [{name: spec for name, (_, _, _, spec) in _LEAVES.items()}]
)
# Sums over devices are added in another order, and eigenvectors of near eigenvalues amplify it.
_NEAR = {"rtol": 1e-4, "atol": 1e-4}


def _grads(t: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(t)
    return {k: rng.normal(size=shape).astype(np.float32) for k, (shape, *_) in _LEAVES.items()}


def _tx(one_sided: bool = True) -> Any:
    return soap.scale_by_soap(
        precondition_frequency=2,
        one_sided=one_sided,
        weight_dimension_numbers={name: axes for name, (_, axes, _, _) in _LEAVES.items()},
    )


def _run(update: Any, state: Any, grads: Any) -> Any:
    for g in grads:
        direction, state = update(g, state)
    return direction, state


@functools.cache
def _expected() -> Any:
    return _run(jax.jit(_tx().update), _tx().init(_grads(0)), map(_grads, range(4)))


class MeshTest(parameterized.TestCase):
    @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
    def test_a_step_on_a_mesh_is_that_of_one_device(self, kind: AxisType):
        mesh = meshes.mesh(kind)
        placed = [
            {k: jax.device_put(x, NamedSharding(mesh, _SPECS[k])) for k, x in _grads(t).items()}
            for t in range(4)
        ]
        tx, traces = _tx(), []

        @jax.jit
        def update(g: Any, state: Any) -> Any:
            traces.append(1)
            return tx.update(g, state)

        with jax.set_mesh(mesh):
            state = jax.jit(tx.init)(placed[0])
            direction, last = _run(update, state, placed)
        self.assertLen(traces, 1)
        for tree in (direction, last.mu, last.nu):
            for name, x in tree.items():
                wanted = placed[0][name].sharding
                self.assertTrue(
                    x.sharding.is_equivalent_to(wanted, x.ndim), f"{name}: {x.sharding}"
                )
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
            self.assertTrue(before.sharding.is_equivalent_to(after.sharding, after.ndim))
        trees.assert_close((direction, last), _signless(_expected(), (direction, last)), **_NEAR)

    def test_directions_lie_as_gradients_also_where_both_sides_are_rotated(self):
        mesh, tx = meshes.mesh(AxisType.Auto), _tx(one_sided=False)
        placed = {
            k: jax.device_put(x, NamedSharding(mesh, _SPECS[k])) for k, x in _grads(0).items()
        }
        # As someone has them who asks for a preconditioner that is whole on every device.
        state = jax.jit(tx.init)(placed)
        everywhere = jax.device_put(state[3:], NamedSharding(mesh, P()))
        direction, _ = jax.jit(tx.update)(
            placed, state._replace(**dict(zip(state._fields[3:], everywhere, strict=True)))
        )
        for name, x in direction.items():
            wanted = placed[name].sharding
            self.assertTrue(x.sharding.is_equivalent_to(wanted, x.ndim), f"{name}: {x.sharding}")

    @parameterized.parameters(True, False)
    def test_inside_a_shard_map_the_state_is_that_outside(self, check_vma: bool):
        tx = _tx()

        def steps(state: Any, *grads: Any) -> Any:
            return _run(lambda g, s: tx.update(g, s, param_specs=_SPECS), state, grads)

        mapped = jax.shard_map(
            steps,
            mesh=meshes.mesh(AxisType.Auto),
            in_specs=(_STATE_SPECS, *4 * [_SPECS]),
            out_specs=(_SPECS, _STATE_SPECS),
            check_vma=check_vma,
        )
        actual = jax.jit(mapped)(tx.init(_grads(0)), *map(_grads, range(4)))
        trees.assert_close(actual, _signless(_expected(), actual), **_NEAR)

    def test_inside_a_shard_map_parameters_may_have_16_bits(self):
        """There `init` refuses parts: a step must not call it."""
        params = {"tall": jnp.asarray(_grads(0)["tall"], "bfloat16")}
        specs, tx = {"tall": P("x", "y")}, mars_optax.mars_soap(0.1, b1=0.9)
        state = tx.init(params)
        state_specs = jax.tree.map(lambda x: specs["tall"] if x.shape == (8, 4) else P(), state)
        step = jax.shard_map(
            lambda g, s: tx.update(g, s, g, param_specs=specs),
            mesh=meshes.mesh(AxisType.Auto),
            in_specs=(specs, state_specs),
            out_specs=(specs, state_specs),
        )
        actual = _run(jax.jit(step), state, 2 * [params])
        expected = _run(jax.jit(lambda g, s: tx.update(g, s, g)), state, 2 * [params])
        trees.assert_same_types(actual, expected)
        # One rounding to bfloat16 of sums in another order.
        trees.assert_close(actual[0], expected[0], rtol=2**-7, atol=2**-7)

    @pytest.mark.slow
    def test_an_eager_step_on_explicit_axes(self):
        # On eight devices XLA's collectives of eager steps abort now and then, if cores are few.
        mesh = meshes.mesh(AxisType.Explicit, (2, 1))
        placed = [
            {k: jax.device_put(x, NamedSharding(mesh, _SPECS[k])) for k, x in _grads(t).items()}
            for t in range(4)
        ]
        actual = _run(_tx().update, _tx().init(placed[0]), placed)
        trees.assert_close(actual, _signless(_expected(), actual), **_NEAR)

    @parameterized.parameters(True, False)
    def test_init_inside_a_shard_map_refuses_what_may_be_a_part(self, check_vma: bool):
        mapped = jax.shard_map(
            lambda g: _tx().init(g).count,
            mesh=meshes.mesh(AxisType.Auto),
            in_specs=(_SPECS,),
            out_specs=P(),
            check_vma=check_vma,
        )
        with self.assertRaisesRegex(ValueError, "leaf 'layers'.*`init` of `scale_by_soap`"):
            jax.eval_shape(mapped, _grads(0))

    def test_init_inside_a_shard_map_takes_whole_leaves(self):
        mapped = jax.shard_map(
            _tx().init, mesh=meshes.mesh(AxisType.Auto), in_specs=P(), out_specs=P()
        )
        state = jax.jit(mapped)(_grads(0))
        trees.assert_equal(state, _tx().init(_grads(0)))


def _signless(expected: Any, actual: Any) -> Any:
    """`expected` with the signs that the columns of the bases have in `actual`."""
    direction, state = expected

    def like(x: Any, y: Any) -> Any:
        return x * jnp.sign(jnp.sum(x * jax.device_get(y), axis=1, keepdims=True))

    bases = {
        field: jax.tree.map(like, getattr(state, field), getattr(actual[1], field))
        for field in ("left_basis", "right_basis")
    }
    return direction, state._replace(**bases)


if __name__ == "__main__":
    absltest.main()
