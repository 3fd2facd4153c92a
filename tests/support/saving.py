"""A process that is killed while it saves a checkpoint.

    python -m tests.support.saving FOLDER EVENT COUNT LIMIT

saves step 1, and kills itself just before its `COUNT`-th EVENT in the folder while it saves step 2.
An event is the name of one of Python's audit events, such as `os.mkdir`, or `commit`: the renaming
that makes the step visible.
"""

import os
import signal
import sys
from typing import Any

from tests.support import processes


def main() -> None:
    folder, event, count, limit = sys.argv[1:]
    processes.exit_with_parent(int(limit))

    import jax
    import orbax.checkpoint as ocp

    jax.config.update("jax_platforms", "cpu")
    seen = 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == "os.rename" and str(args[1]) == os.path.join(folder, "2"):
            name = "commit"
        if name == event and str(args[0]).startswith(folder):
            seen += 1
            if seen == int(count):
                os.kill(os.getpid(), signal.SIGKILL)

    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave(state_of(1)))
        manager.wait_until_finished()
        sys.addaudithook(hook)
        manager.save(2, args=ocp.args.StandardSave(state_of(2)))
        manager.wait_until_finished()


def state_of(step: int) -> Any:
    """A state of training all of whose numbers are the step's."""
    import jax
    import jax.numpy as jnp

    import mars_optax

    params = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    tx = mars_optax.mars(0.1, prev_grad_dtype="bfloat16")
    state = {"params": params, "opt_state": tx.init(params)}
    return jax.tree.map(lambda x: jnp.full_like(x, step), state)


if __name__ == "__main__":
    main()
