"""Data parallelism in the user's own `shard_map`: gradients are averaged before `update`.

Under `jit` with a sharded batch it is in `tests/contract/test_sharding.py` and, in exact mode, in
`tests/parity/test_exact.py`; optimizers that see parts of leaves in
`tests/contract/test_shard_map.py`.
"""

import jax
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.ecosystem import plain
from tests.support import trees


def mean_of_losses(params, batch):
    """The gradient of the mean over all devices: right where JAX tracks what varies."""
    return jax.grad(lambda p: jax.lax.pmean(plain.loss(p, batch), "data"))(params)


def mean_of_gradients(params, batch):
    """The mean of each device's own gradient: right where JAX does not track what varies."""
    return jax.lax.pmean(plain.grad(params, batch), "data")


class ShardMapTest(parameterized.TestCase):
    def _mesh(self):
        return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def test_devices_with_a_part_of_the_batch_are_one_device(self):
        self._check("mars_m", "exact", mean_of_losses, vma=True)

    @pytest.mark.slow
    def test_devices_are_one_device_without_exact_mode(self):
        self._check("mars", "approx", mean_of_losses, vma=True)

    @pytest.mark.slow
    def test_devices_are_one_device_where_jax_does_not_track_what_varies(self):
        self._check("mars_m", "exact", mean_of_gradients, vma=False)

    def _check(self, name, correction, grad, *, vma):
        tx = plain.optimizer(name, correction=correction)

        def steps(params, batches):
            def step(carry, batch):
                params, state = carry
                updates, state = tx.update(
                    grad(params, batch),
                    state,
                    params,
                    grad_fn=lambda p: grad(p, batch),
                    param_specs=P(),
                )
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(step, (params, tx.init(params)), batches)[0][0]

        mapped = jax.shard_map(
            steps,
            mesh=self._mesh(),
            in_specs=(P(), P(None, "data")),
            out_specs=P(),
            check_vma=vma,
        )
        expected, _ = plain.trained(name, correction=correction)
        trees.assert_close(
            plain.jit(mapped)(plain.params(), plain.BATCHES), expected, **plain.CLOSE
        )

    def test_where_jax_tracks_what_varies_a_mean_of_gradients_is_a_sum(self):
        """What the page warns of: whole parameters collect the devices' gradients by themselves."""
        mapped = jax.shard_map(
            mean_of_gradients, mesh=self._mesh(), in_specs=(P(), P("data")), out_specs=P()
        )
        actual = plain.jit(mapped)(plain.params(), plain.batch(0))
        expected = plain.jit(plain.grad)(plain.params(), plain.batch(0))
        np.testing.assert_allclose(
            actual["first"]["kernel"], 4 * expected["first"]["kernel"], rtol=1e-4, atol=1e-5
        )


if __name__ == "__main__":
    absltest.main()
