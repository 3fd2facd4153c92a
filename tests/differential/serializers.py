"""What is written and read back: optimizers, states, compiled steps."""

import copy
import io
import pickle
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.differential import subjects
from tests.differential.situation import situation
from tests.differential.subjects import Subject, train


def _resumed(subject: Subject, through: Any, tx: Any = None) -> Any:
    """A step, then parameters and state `through` something and back, then the other steps."""
    step = jax.jit(subjects.step_of(subject, tx))
    start = subjects.params()
    now, state = through(step(start, (tx or subject.tx).init(start)))
    for _ in range(subjects.STEPS - 1):
        now, state = step(now, state)
    return now


@situation()
def pickled_state(subject: Subject):
    """`pickle` of parameters and state."""
    return _resumed(subject, lambda carry: pickle.loads(pickle.dumps(carry)))


@situation(slow=True, needs=("cloudpickle",))
def cloudpickled_state(subject: Subject):
    """`cloudpickle` of parameters and state."""
    import cloudpickle

    return _resumed(subject, lambda carry: pickle.loads(cloudpickle.dumps(carry)))


@situation(needs=("cloudpickle",))
def cloudpickled_optimizer(subject: Subject):
    """`cloudpickle` of the optimizer, as Ray and submitit send it."""
    import cloudpickle

    tx = pickle.loads(cloudpickle.dumps(subject.tx))
    # One that goes on from a state of the other.
    _resumed(subject, lambda carry: carry, tx=tx._replace(init=subject.tx.init))
    return train(subject, tx=tx)


@situation()
def deep_copied_optimizer(subject: Subject):
    """`copy.deepcopy` of the optimizer."""
    return train(subject, tx=copy.deepcopy(subject.tx))


@situation(slow=True)
def deep_copied_state(subject: Subject):
    """`copy.deepcopy` of parameters and state."""
    return _resumed(subject, copy.deepcopy)


@situation(slow=True, needs=("flax.serialization",))
def flax_state_dict(subject: Subject):
    """`flax.serialization.to_state_dict` and `from_state_dict`."""
    from flax import serialization

    return _resumed(
        subject,
        lambda carry: serialization.from_state_dict(
            jax.tree.map(jnp.zeros_like, carry), serialization.to_state_dict(carry)
        ),
    )


@situation(needs=("flax.serialization",))
def flax_msgpack(subject: Subject):
    """`flax.serialization.to_bytes` and `from_bytes`."""
    from flax import serialization

    return _resumed(
        subject,
        lambda carry: serialization.from_bytes(
            jax.tree.map(jnp.zeros_like, carry), serialization.to_bytes(carry)
        ),
    )


@situation(needs=("orbax.checkpoint",), slow=True)
def orbax(subject: Subject):
    """Orbax's `StandardCheckpointer`, restored to abstract parameters and state."""
    import orbax.checkpoint as ocp

    def through(carry: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{folder}/carry", carry)
            checkpointer.wait_until_finished()
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, carry)
            return checkpointer.restore(f"{folder}/carry", abstract)

    return _resumed(subject, through)


@situation()
def npz_of_leaves(subject: Subject):
    """`np.savez` of the leaves, cast to float32 where NumPy's files know no such dtype."""

    def through(carry: Any) -> Any:
        leaves, structure = jax.tree.flatten(carry)
        file = io.BytesIO()
        # Leaves of 8 bits fit into float32.
        np.savez(file, *[np.asarray(x.astype("float32")) for x in leaves])
        file.seek(0)
        with np.load(file) as arrays:
            stored = [arrays[f"arr_{i}"] for i in range(len(leaves))]
        return structure.unflatten(
            [jnp.asarray(y, x.dtype) for x, y in zip(leaves, stored, strict=True)]
        )

    return _resumed(subject, through)


@situation()
def numpy_state(subject: Subject):
    """`jax.device_get`: the next step gets parameters and state of NumPy."""
    return _resumed(subject, jax.device_get)


@situation(
    needs=("equinox",),
    reasons={"mars_m_8_bits": "Equinox reads any array of 8-bit floats back as one of NumPy"},
)
def equinox_leaves(subject: Subject):
    """Equinox's `tree_serialise_leaves` and `tree_deserialise_leaves`."""
    import equinox as eqx

    def through(carry: Any) -> Any:
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, carry)
        file.seek(0)
        like = subjects.params(), subject.tx.init(subjects.params())
        return eqx.tree_deserialise_leaves(file, like)

    return _resumed(subject, through)


def _flat_step(subject: Subject) -> tuple[Any, Any]:
    """The step as a function of leaves, and the leaves that it begins with."""
    now = subjects.params()
    leaves, structure = jax.tree.flatten((now, subject.tx.init(now)))

    def step(*leaves: Any) -> Any:
        return jax.tree.leaves(subjects.step_of(subject)(*structure.unflatten(leaves)))

    return step, leaves


def _two_steps(subject: Subject, step: Any, leaves: Any) -> Any:
    for _ in range(subjects.STEPS):
        leaves = step(*leaves)
    structure = jax.tree.structure(subjects.params())
    return structure.unflatten(leaves[: structure.num_leaves])


@situation(needs=("jax.export", "flatbuffers"))
def exported(subject: Subject):
    """`jax.export` of a step, serialized and called."""
    step, leaves = _flat_step(subject)
    stored = jax.export.export(jax.jit(step))(*leaves).serialize()
    return _two_steps(subject, jax.jit(jax.export.deserialize(stored).call), leaves)


@situation(slow=True, needs=("jax.export", "flatbuffers"))
def exported_for_other_platforms(subject: Subject):
    """`jax.export` of a step for CPU, CUDA and TPU at once, called here."""
    step, leaves = _flat_step(subject)
    exported = jax.export.export(jax.jit(step), platforms=("cpu", "cuda", "tpu"))(*leaves)
    return _two_steps(subject, jax.export.deserialize(exported.serialize()).call, leaves)


@situation(
    needs=("jax.export", "flatbuffers"),
    reasons=dict.fromkeys(
        ("mars_m", "mars_shampoo", "mars_m_8_bits"),
        "Newton-Schulz has to know which side of a matrix is longer, as in `optax.contrib.muon`",
    )
    | {
        "mars_soap": "it has to know which side of a matrix is longer, and longer than a bound",
        "variance_reduced": "its `optax.scale_by_factored_rms` sorts sides, and fails alone, too",
    },
)
def exported_with_a_symbolic_size(subject: Subject):
    """`jax.export` of a step whose matrix has a symbolic number of rows."""
    step, leaves = _flat_step(subject)
    scope = jax.export.SymbolicScope()

    def symbolic(x: Any) -> Any:
        shape = ", ".join("n" if n == 8 else str(n) for n in x.shape)
        return jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), x.dtype)

    exported = jax.export.export(jax.jit(step))(*map(symbolic, leaves))
    return _two_steps(subject, exported.call, leaves)


@situation()
def compiled_ahead_of_time(subject: Subject):
    """`jax.jit(step).lower(...).compile()` on abstract arguments."""
    start = subjects.params()
    abstract = jax.eval_shape(lambda p: (p, subject.tx.init(p)), start)
    step = jax.jit(subjects.step_of(subject)).lower(*abstract).compile()
    now, state = start, subject.tx.init(start)
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now


@situation(slow=True, needs=("jax.experimental.serialize_executable",))
def serialized_executable(subject: Subject):
    """`jax.experimental.serialize_executable` of a compiled step."""
    from jax.experimental import serialize_executable

    start = subjects.params()
    now, state = start, subject.tx.init(start)
    compiled = jax.jit(subjects.step_of(subject)).lower(now, state).compile()
    step = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled), execution_devices=jax.devices()[:1]
    )
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now


@situation()
def no_pointers_in_the_program(subject: Subject):
    """The lowered text names no custom call of this process: other processes can run it."""
    start = subjects.params()
    step = jax.jit(subjects.step_of(subject))
    text = step.lower(start, subject.tx.init(start)).as_text()
    assert "stablehlo" in text
    # Those of LAPACK are found by name wherever JAX is.
    calls = re.findall(r"custom_call\s*@(\w+)", text)
    assert text.count("custom_call") == len(calls)
    assert [name for name in calls if not name.startswith("lapack_")] == []
    return train(subject)


@situation(slow=True)
def identical_programs(subject: Subject):
    """Two optimizers made alike lower to one text, so that a compilation cache finds it."""
    start = subjects.params()
    texts = set()
    for _ in range(2):
        tx = subject.make(subjects.LEARNING_RATE)
        step = jax.jit(subjects.step_of(subject, tx))
        texts.add(step.lower(start, tx.init(start)).as_text())
    assert len(texts) == 1
    return train(subject)
