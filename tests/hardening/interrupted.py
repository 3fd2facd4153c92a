"""A process that trains with checkpoints, is killed between two steps, or reads damaged files.

    python -m tests.hardening.interrupted train FOLDER KILLED_AT LIMIT
    python -m tests.hardening.interrupted compare FOLDER KILLED_AT LIMIT
    python -m tests.hardening.interrupted damage FOLDER 0 LIMIT

`train` saves every `SAVE_EVERY` steps and kills itself after step `KILLED_AT`. `compare` trains
without an interruption, then goes on from what `train` left, and wants the same bits at the end.
`damage` cuts each file of a checkpoint short, and wants an error or the right values.
"""

import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.support import processes

SAVE_EVERY = 2
_STEPS = 6


def main() -> None:
    what, folder, killed_at, limit = sys.argv[1:]
    processes.exit_with_parent(int(limit))

    import jax

    jax.config.update("jax_platforms", "cpu")
    if what == "damage":
        _damage(folder)
        return
    state, step = _training()
    if what == "train":
        _train(state, step, 0, f"{folder}/checkpoints", int(killed_at))
        raise AssertionError("it was not killed")
    import numpy as np

    expected = _train(state, step, 0, f"{folder}/whole", None)
    actual, begin = _restored(f"{folder}/checkpoints", state)
    assert 0 < begin < int(killed_at), begin
    print(f"resumed at {begin}")
    actual = _train(actual, step, begin, f"{folder}/checkpoints", None)
    for name, both in {n: (actual[n], expected[n]) for n in expected}.items():
        for x, y in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def _training() -> tuple[Any, Callable[[Any, Any], Any]]:
    """A state of training, and a step of it; the batch depends on the step only."""
    import jax
    import jax.numpy as jnp
    import optax

    import mars_optax

    optimizers = {
        "mars": mars_optax.mars(lambda count: 0.1 / (1 + count), prev_grad_dtype="float8_e4m3fn"),
        "mars_m": mars_optax.mars_m(0.02),
    }
    params = {"kernel": jnp.ones((16, 8)), "bias": jnp.zeros(8)}
    state = {
        name: {"params": params, "opt_state": tx.init(params)} for name, tx in optimizers.items()
    }

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ params["kernel"]) + params["bias"] - 0.3) ** 2)

    @jax.jit
    def step(state: Any, number: Any) -> Any:
        batch = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (4, 16))
        new = {}
        for name, tx in optimizers.items():
            old = state[name]
            grads = jax.grad(loss)(old["params"], batch)
            updates, opt_state = tx.update(grads, old["opt_state"], old["params"])
            params = optax.apply_updates(old["params"], updates)
            new[name] = {"params": params, "opt_state": opt_state}
        return new

    return state, step


def _train(state: Any, step: Any, begin: int, folder: str, killed_at: int | None) -> Any:
    import jax
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        for number in range(begin + 1, _STEPS + 1):
            state = jax.block_until_ready(step(state, number))
            if number % SAVE_EVERY == 0:
                manager.save(number, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            if number == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return state


def _restored(folder: str, like: Any) -> tuple[Any, int]:
    import jax
    import orbax.checkpoint as ocp

    template = jax.eval_shape(lambda: like)
    with ocp.CheckpointManager(folder) as manager:
        latest = manager.latest_step()
        assert latest is not None
        return manager.restore(latest, args=ocp.args.StandardRestore(template)), latest


def _damage(folder: str) -> None:
    """Cuts each file of a checkpoint in half, then to nothing."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    state, _ = _training()
    with ocp.CheckpointManager(f"{folder}/whole") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    files = [p for p in pathlib.Path(folder, "whole").rglob("*") if p.is_file()]
    refused = 0
    for number, file in enumerate(files):
        for size in (file.stat().st_size // 2, 0):
            copy = pathlib.Path(folder, f"{number}_{size}")
            shutil.copytree(f"{folder}/whole", copy)
            os.truncate(copy / file.relative_to(f"{folder}/whole"), size)
            try:
                restored, _ = _restored(str(copy), state)
            except Exception as error:
                refused += 1
                print(file.name, size, type(error).__name__, str(error)[:100].replace("\n", " "))
                continue
            for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(file))
    print(f"refused: {refused}", flush=True)
    # Orbax leaves tasks behind that would fail when the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
