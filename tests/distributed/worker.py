"""One of several processes: trains on the mesh of all, and writes down the shards that it holds.

python -m tests.distributed.worker ADDRESS PROCESSES INDEX LOCAL_DEVICES LIMIT OUT
"""

import sys

from tests.support import processes


def main() -> None:
    address, count, index, local_devices, limit, out = sys.argv[1:]
    processes.exit_with_parent(int(limit))

    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(local_devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(index))
    assert jax.process_count() == int(count)
    assert jax.local_device_count() == int(local_devices)

    from tests.distributed import training

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    results = {}
    for layout in training.LAYOUTS:
        for name in training.OPTIMIZERS:
            trained = training.run(name, mesh, layout)
            for path, leaf in training.leaves(trained):
                for i, shard in enumerate(leaf.addressable_shards):
                    key = f"{name} {layout} {path} {i}"
                    bounds = [
                        s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True)
                    ]
                    results[f"{key} index"] = np.reshape(np.asarray(bounds, int), (-1, 2))
                    # NumPy's files know no 8-bit floats.
                    results[f"{key} data"] = np.asarray(shard.data).astype(np.float64)
            print(f"process {index}: {name}, {layout}", flush=True)
    np.savez(out, **results)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
