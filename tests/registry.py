"""The table of everything that is an optimizer or a transformation: enrol once, get every test.

The contract tests are crossed over `ENTRIES`. An entry names a public factory, the arguments it is
built with and the kind of parameter tree it is run on. A new variant or option gets one more line.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import mars_optax

Kind = Literal["optimizer", "direction", "link"]
# What a step moves between the devices that share a leaf: nothing; one number for each norm of a
# matrix or leaf; one for each row; or whole matrices.
Collectives = Literal["none", "numbers", "rows", "matrices"]

# The contracts that a row may skip, and what they ask.
CONTRACTS: Mapping[str, str] = {
    "meshes": "on a mesh a step is that of one device, and lies as the parameters do",
    "places": "so it does wherever they lie on automatic axes, and a step can be serialized",
    "rounding": "another order of sums, and injected numbers, change no more than rounding does",
    "host_memory": "an update in the host's memory can be traced",
    "strict": "nothing is promoted implicitly",
    "shard_map": "inside a shard_map, with the specs of the parameters, a step is the global one",
    "tiny_gradients": "parameters in half precision move under gradients of 1e-5",
    "vector_rule": "leaves that are no matrices have a rule and a rate of their own",
}

_SHAPES: Mapping[str, dict[str, Any]] = {
    # A matrix of each orientation, a vector and a scalar.
    "mixed": {
        "embed": (5, 4),
        "layer": {"bias": (6,), "kernel": (4, 6)},
        "scale": (),
    },
    "matrices": {"tall": (6, 4), "wide": {"kernel": (3, 5)}},
    # A stack of three kernels and the stack of their biases, whose rank says nothing.
    "stacked": {"bias": (3, 5), "kernel": (3, 4, 5), "scale": (4,)},
    "stack": {"kernel": (3, 4, 5)},
}

_STACK = MuonDimensionNumbers(1, 2)
_STACKED_SPECS = {"bias": None, "kernel": _STACK, "scale": None}


def _build(shapes: Any, dtype: str, rng: np.random.Generator) -> Any:
    if isinstance(shapes, dict):
        return {name: _build(inner, dtype, rng) for name, inner in shapes.items()}
    values = rng.standard_normal(shapes)
    if np.issubdtype(np.dtype(jnp.dtype(dtype)), np.complexfloating):
        values = values + 1j * rng.standard_normal(shapes)
    return jnp.asarray(values, dtype)


def _stacked_specs(params: Any) -> Any:
    """The specs of the "stacked" tree as a callable of the parameters."""
    del params
    return _STACKED_SPECS


@dataclasses.dataclass(frozen=True)
class Amplification:
    """Why rounding grows in a step, and the least tolerance of comparisons that follows."""

    why: str
    tolerance: float


@dataclasses.dataclass(frozen=True, repr=False)
class Entry:
    """One setting of one public factory."""

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    kind: Kind
    kwargs: Mapping[str, Any]
    tree: str
    core: bool
    """Whether this is the entry that stands for its factory in the tests that cost more."""
    not_elementwise: str = ""
    """Why its step is not elementwise, the norm of the clip apart; empty where it is."""
    amplifies: Amplification | None = None
    """What its step makes of rounding, if more than arithmetic does."""
    moves: Collectives | None = None
    """What else than the norm of the clip it moves between devices."""
    gathered: int = 1
    """How many buffers of each matrix it gathers, where it moves whole ones."""
    skips: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of `CONTRACTS` that it cannot keep, and why."""

    def __repr__(self) -> str:
        return self.name

    def make(self, **overrides: Any) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation, with some arguments replaced."""
        return self.factory(**{**self.kwargs, **overrides})

    def precise(self, **overrides: Any) -> optax.GradientTransformationExtraArgs:
        """Like `make`, with Newton-Schulz in float32, for comparisons of two runs."""
        return self.make(**{**self.precision(), **overrides})

    def precision(self) -> dict[str, Any]:
        """The arguments by which it computes in float32."""
        return {"ns_dtype": "float32"} if self.accepts("ns_dtype") else {}

    def shared(self) -> optax.GradientTransformationExtraArgs:
        """What `precise` builds, one object for all tests, so that it compiles once."""
        return _shared(self.name)

    def accepts(self, argument: str) -> bool:
        """Whether the factory has an argument of this name."""
        return argument in inspect.signature(self.factory).parameters

    def tolerance(self, plain: float) -> float:
        """The tolerance of a comparison that is `plain` for elementwise steps."""
        return plain if self.amplifies is None else max(10 * plain, self.amplifies.tolerance)

    def rounding(self) -> float:
        """The distance of two neighbours, relative, in the lowest precision that it stores in."""
        dtypes = [value for key, value in self.kwargs.items() if key.endswith("_dtype")]
        return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)

    def clips(self) -> bool:
        """Whether it takes a norm of each matrix and leaf."""
        argument = inspect.signature(self.factory).parameters.get("max_norm")
        return argument is not None and self.kwargs.get("max_norm", argument.default) is not None

    def collectives(self) -> Collectives:
        """What a step moves between the devices that share a leaf, at most."""
        return self.moves or ("numbers" if self.clips() else "none")

    def only_matrices(self) -> bool:
        """Whether every leaf has to be a matrix."""
        return self.tree in ("matrices", "stack")

    def params(self, dtype: str = "float32") -> Any:
        """The parameter tree this entry is run on."""
        return _build(_SHAPES[self.tree], dtype, np.random.default_rng(0))

    def grads(self, step: int = 0, dtype: str = "float32", scale: float = 1.0) -> Any:
        """A gradient of the parameters' structure, different at every step."""
        rng = np.random.default_rng(1000 + step)
        tree = _build(_SHAPES[self.tree], "float32", rng)
        return optax.tree.cast(optax.tree.scale(scale, tree), dtype)

    def corrects(self) -> bool:
        """Whether the state keeps a previous gradient."""
        if "inner" in self.kwargs:
            return True
        kept = self.kwargs.get("keep_prev_grad", True)
        return kept and self.accepts("correction") and "correction" not in self.kwargs

    def evaluates(self) -> bool:
        """Whether it evaluates gradients at the previous parameters."""
        return hasattr(self.factory, "evaluates")


def _lr_schedule(count: Any) -> Any:
    return 0.1 / (1.0 + count)


def _gamma_schedule(count: Any) -> Any:
    return 0.02 + 0.01 * count


def _grad_fn(params: Any) -> Any:
    return jax.tree.map(lambda p: 0.3 * p + 0.1, params)


def _with_grad_fn(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory whose transformations evaluate `_grad_fn` where they need gradients."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        tx = factory(*args, **kwargs)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            return tx.update(updates, state, params, **{"grad_fn": _grad_fn, **extra})

        return optax.GradientTransformationExtraArgs(tx.init, update)

    build.evaluates = True
    return build


# What sets a rule apart from an elementwise one, for all settings of a factory.
_NEWTON_SCHULZ = {
    "not_elementwise": "Newton-Schulz multiplies matrices",
    "amplifies": Amplification("each step multiplies small singular values by 3.4445", 1e-4),
    "moves": "matrices",
}
_SOAP: Mapping[str, Any] = {
    "not_elementwise": "it rotates matrices",
    "amplifies": Amplification("near eigenvalues have eigenvectors that are far apart", 1e-3),
    "moves": "matrices",
    "gathered": 3,  # the gradient and both moments
    "skips": {
        "host_memory": "JAX's decompositions take nothing that its type puts there",
        "shard_map": "`init` has to see whole matrices there: see test_soap_on_meshes.py",
    },
}
_FACTS: Mapping[str, Mapping[str, Any]] = {
    "mars_soap": _SOAP,
    "scale_by_mars_soap": _SOAP,
    "mars_shampoo": _NEWTON_SCHULZ,
    "mars_m": _NEWTON_SCHULZ,
    "scale_by_mars_shampoo": _NEWTON_SCHULZ,
    "scale_by_mars_m": _NEWTON_SCHULZ,
    "cautious": {
        "not_elementwise": "it counts the entries whose signs agree",
        "moves": "numbers",
        "skips": {"shard_map": "the count is of whole leaves"},
    },
    "ignore_absent_gradients": {
        "not_elementwise": "it asks whether a whole leaf is 0",
        "moves": "numbers",
        "skips": {"shard_map": "the question is about whole leaves"},
    },
}
# The same of a setting.
_ADAPTIVE = {"not_elementwise": "gamma is of averages over a matrix", "moves": "rows"}
_EIGHT_BITS = {
    "not_elementwise": "each row has a scale",
    "moves": "rows",
    "skips": {"shard_map": "scales are of whole rows"},
}
_ONE_NORM = {
    "not_elementwise": "one norm of all leaves",
    "moves": "numbers",
    "skips": {"shard_map": "the norm is of whole leaves"},
}
_BOTH_SIDES = {
    "skips": {
        **_SOAP["skips"],
        "rounding": "what the first gradient leaves out of the longer side has any basis",
    }
}
_ADAM = {
    "skips": {
        "places": "on automatic axes Optax's zeros have no place of their own",
        "strict": "Optax's own arithmetic promotes a count",
    }
}
_FACTORED = {
    "not_elementwise": "it averages rows and columns",
    "moves": "rows",
    "skips": {
        "meshes": "its state is laid out by Optax, not as the parameters",
        "places": "its state is laid out by Optax, not as the parameters",
        "shard_map": "averages are of whole rows and columns",
        "strict": "Optax's own arithmetic promotes",
    },
}


def _entries() -> Iterator[Entry]:
    def enrol(
        factory: Callable[..., Any],
        kind: Kind,
        tree: str,
        setting: str = "",
        facts: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> Entry:
        name = factory.__name__ + (f"_{setting}" if setting else "")
        if kind == "optimizer":
            kwargs = {"learning_rate": 0.1, **kwargs}
        facts = {**_FACTS.get(factory.__name__, {}), **facts}
        return Entry(name, factory, kind, kwargs, tree, core=not setting, **facts)

    mars, lion = mars_optax.mars, mars_optax.mars_lion
    shampoo, muon = mars_optax.mars_shampoo, mars_optax.mars_m
    schedules = {
        "learning_rate": _lr_schedule,
        "learning_rate_1d": _lr_schedule,
        "gamma": _gamma_schedule,
    }
    bfloat16_state = {"mu_dtype": "bfloat16", "prev_grad_dtype": "bfloat16"}

    yield enrol(mars, "optimizer", "mixed")
    yield enrol(mars, "optimizer", "mixed", "optimize_1d", optimize_1d=True, weight_decay=0.1)
    yield enrol(mars, "optimizer", "mixed", "amsgrad", amsgrad=True)
    yield enrol(mars, "optimizer", "mixed", "first_step", first_step="no_correction")
    yield enrol(mars, "optimizer", "mixed", "second_moment", second_moment="gradient")
    yield enrol(
        mars, "optimizer", "mixed", "adamw", correction="none", max_norm=None, optimize_1d=True
    )
    yield enrol(mars, "optimizer", "mixed", "bf16", nu_dtype="bfloat16", **bfloat16_state)
    yield enrol(mars, "optimizer", "mixed", "schedules", **schedules)
    yield enrol(mars, "optimizer", "stacked", "specs", weight_dimension_numbers=_STACKED_SPECS)

    exact_mars, storm_adamw = _with_grad_fn(mars), _with_grad_fn(mars_optax.storm_adamw)
    yield enrol(exact_mars, "optimizer", "mixed", "exact", correction="exact")
    yield enrol(mars, "optimizer", "mixed", "float8", _EIGHT_BITS, prev_grad_dtype="float8_e4m3fn")
    yield enrol(exact_mars, "optimizer", "mixed", "svrg", correction="svrg", alpha=0.5)
    adaptive = mars_optax.AdaptiveGamma()
    yield enrol(mars, "optimizer", "mixed", "adaptive", _ADAPTIVE, gamma=adaptive)
    yield enrol(storm_adamw, "optimizer", "mixed")

    yield enrol(lion, "optimizer", "mixed")
    yield enrol(lion, "optimizer", "mixed", "optimize_1d", optimize_1d=True)
    yield enrol(lion, "optimizer", "mixed", "bf16", **bfloat16_state)
    yield enrol(
        lion, "optimizer", "mixed", "without_prev_grad", keep_prev_grad=False, max_norm=None
    )

    yield enrol(shampoo, "optimizer", "mixed")
    yield enrol(shampoo, "optimizer", "mixed", "optimize_1d", optimize_1d=True, amsgrad=True)
    yield enrol(shampoo, "optimizer", "mixed", "schedules", **schedules)
    yield enrol(shampoo, "optimizer", "stacked", "specs", weight_dimension_numbers=_STACKED_SPECS)

    yield enrol(muon, "optimizer", "mixed")
    yield enrol(muon, "optimizer", "mixed", "bf16", **bfloat16_state)
    yield enrol(
        muon,
        "optimizer",
        "mixed",
        "options",
        ns_coeffs="polar_express",
        max_norm=None,
        weight_decay_1d=0.3,
        learning_rate_1d=0.05,
        eps_1d=1e-6,
    )
    yield enrol(muon, "optimizer", "stacked", "specs", weight_dimension_numbers=_stacked_specs)
    exact_muon = _with_grad_fn(muon)
    yield enrol(exact_muon, "optimizer", "mixed", "sarah", correction="sarah")
    yield enrol(exact_muon, "optimizer", "mixed", "adaptive", correction="exact", gamma=adaptive)

    yield enrol(muon, "optimizer", "mixed", "row_b2", row_b2=0.95)

    # One-sided, on matrices whose shorter side the first gradient fills: no eigenvalue is 0 twice.
    soap = functools.partial(enrol, mars_optax.mars_soap, "optimizer", precondition_frequency=2)
    yield soap("mixed", one_sided=True)
    yield soap("mixed", "both_sides", _BOTH_SIDES)
    yield soap("mixed", "bf16", _BOTH_SIDES, nu_dtype="bfloat16", **bfloat16_state)
    yield soap("stacked", "specs", one_sided=True, weight_dimension_numbers=_STACKED_SPECS)

    framework = functools.partial(enrol, mars_optax.variance_reduced, "optimizer")
    yield framework("mixed", facts=_ADAM, inner=optax.scale_by_adam(0.95, 0.99))
    yield framework(
        "mixed", "factored", _FACTORED, inner=optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    )

    scale_by_mars = mars_optax.scale_by_mars
    yield enrol(scale_by_mars, "direction", "mixed")
    yield enrol(scale_by_mars, "direction", "mixed", "amsgrad", amsgrad=True, max_norm=None)
    yield enrol(scale_by_mars, "direction", "mixed", "bf16", nu_dtype="bfloat16", **bfloat16_state)
    yield enrol(mars_optax.scale_by_mars_lion, "direction", "mixed")
    yield enrol(mars_optax.scale_by_mars_shampoo, "direction", "matrices")
    yield enrol(
        mars_optax.scale_by_mars_shampoo,
        "direction",
        "stack",
        "specs",
        weight_dimension_numbers=_STACK,
    )
    yield enrol(mars_optax.scale_by_mars_m, "direction", "matrices")
    yield enrol(
        mars_optax.scale_by_mars_m,
        "direction",
        "stack",
        "specs",
        weight_dimension_numbers=_STACK,
        first_step="no_correction",
    )
    yield enrol(mars_optax.scale_by_mars_m, "direction", "matrices", "row_b2", row_b2=0.95)
    soap = functools.partial(
        enrol, mars_optax.scale_by_mars_soap, "direction", precondition_frequency=2
    )
    yield soap("matrices", one_sided=True)
    yield soap("stack", "specs", one_sided=True, weight_dimension_numbers=_STACK)

    inner = scale_by_mars()
    yield enrol(mars_optax.cautious, "direction", "mixed", inner=inner)
    inner = mars_optax.correct_gradients()
    yield enrol(mars_optax.ignore_absent_gradients, "link", "mixed", inner=inner)

    correct = _with_grad_fn(mars_optax.correct_gradients)
    yield enrol(correct, "link", "mixed", "exact", correction="exact")
    yield enrol(correct, "link", "mixed", "storm", correction="storm")
    yield enrol(mars_optax.correct_gradients, "link", "mixed")
    yield enrol(
        mars_optax.correct_gradients, "link", "mixed", "clip", _ONE_NORM, correction_clip=0.5
    )
    yield enrol(mars_optax.clip_by_leaf_norm, "link", "mixed")
    yield enrol(
        mars_optax.clip_by_leaf_norm,
        "link",
        "stack",
        "specs",
        weight_dimension_numbers=_STACK,
    )


ENTRIES: tuple[Entry, ...] = tuple(_entries())


@functools.cache
def _shared(name: str) -> optax.GradientTransformationExtraArgs:
    return get(name).precise()


def select(
    *kinds: Kind,
    core: bool = False,
    contracts: Sequence[str] = (),
    where: Callable[[Entry], bool] = lambda _: True,
) -> tuple[tuple[str, Entry], ...]:
    """Entries as named parameters for `absl.testing.parameterized`.

    Args:
      *kinds: All kinds, if none is given.
      core: Whether one entry for each factory is enough.
      contracts: Some of `CONTRACTS`, which leave out the entries that skip one of them.
      where: Which others are left out.
    """
    if unknown := set(contracts) - set(CONTRACTS):
        raise AssertionError(f"no contracts of these names: {unknown}")
    chosen = tuple(
        (f"_{entry.name}", entry)
        for entry in ENTRIES
        if (not kinds or entry.kind in kinds)
        and (entry.core or not core)
        and not set(contracts) & set(entry.skips)
        and where(entry)
    )
    if not chosen:
        raise AssertionError("no entry of the registry fits")
    return chosen


def names(*kinds: Kind, **filters: Any) -> tuple[str, ...]:
    """The names of the entries that `select` gives."""
    return tuple(entry.name for _, entry in select(*kinds, **filters))


def get(name: str) -> Entry:
    """The entry of this name."""
    return next(entry for entry in ENTRIES if entry.name == name)
