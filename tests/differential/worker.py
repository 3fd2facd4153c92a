"""Another process, which trains every subject and writes down what came of it.

python -m tests.differential.worker LIMIT OUT [OPTIMIZERS]

`OPTIMIZERS` is a file of optimizers pickled by cloudpickle, which are taken in place of new ones.
"""

import pathlib
import pickle
import sys
from typing import Any

from tests.support import processes


def main() -> None:
    limit, out, *pickled = sys.argv[1:]
    processes.exit_with_parent(int(limit))

    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)

    from tests.differential import subjects

    given = pickle.loads(pathlib.Path(pickled[0]).read_bytes()) if pickled else {}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    place = {"b": NamedSharding(mesh, P()), "w": NamedSharding(mesh, P("x"))}

    def entries() -> int:
        folder = jax.config.jax_compilation_cache_dir
        return sum(1 for _ in pathlib.Path(folder).glob("*-cache")) if folder else 0

    def results_of(subject: subjects.Subject) -> dict[str, Any]:
        before = entries()
        try:
            tx = pickle.loads(given[subject.name]) if pickled else None
            plain = subjects.train(subject, tx=tx)
            on_mesh = subjects.train(subject, jax.device_put(subjects.params(), place), tx=tx)
        # The parent raises it as what it is, a failure of this subject.
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            "trained": jax.device_get((plain, on_mesh)),
            "compiled": entries() - before,
        }

    results = {s.name: results_of(s) for s in subjects.OPTAX + subjects.OURS}
    pathlib.Path(out).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
