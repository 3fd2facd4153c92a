"""Where the names of other packages that docstrings refer to are documented."""

_OPTAX = "https://optax.readthedocs.io/en/latest/api"
_JAX = "https://docs.jax.dev/en/latest/_autosummary"

URLS = {
    **{f"optax.{name}": f"{_OPTAX}/optimizers.html#optax.{name}" for name in ("adamw", "amsgrad")},
    **{
        f"optax.{name}": f"{_OPTAX}/transformations.html#optax.{name}"
        for name in ("clip_by_global_norm", "scale_by_adam", "scale_by_lion")
    },
    **{f"optax.{name}": f"{_OPTAX}/combining_optimizers.html" for name in ("chain", "partition")},
    **{
        f"optax.{name}": f"{_OPTAX}/optimizer_wrappers.html#optax.{name}"
        for name in ("MultiSteps", "flatten", "masked")
    },
    "optax.MaskedNode": f"{_OPTAX}/optimizer_wrappers.html",
    "optax.apply_updates": f"{_OPTAX}/apply_updates.html#optax.apply_updates",
    "optax.contrib.muon": f"{_OPTAX}/contrib.html",
    "optax.contrib.MuonDimensionNumbers": f"{_OPTAX}/contrib.html",
    # Where it is defined: so a dataclass's fields, whose types Sphinx reads off, call it.
    "optax.contrib._muon.MuonDimensionNumbers": f"{_OPTAX}/contrib.html",
    "optax.inject_hyperparams": f"{_OPTAX}/optimizer_schedules.html",
    **{
        name: f"{_JAX}/{name}.html#{name}"
        for name in ("jax.eval_shape", "jax.jit", "jax.numpy.matmul", "jax.random.key")
    },
    "re.search": "https://docs.python.org/3/library/re.html#re.search",
}
