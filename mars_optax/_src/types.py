"""Names for the kinds of argument that several public functions take."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import optax

ScalarOrSchedule: TypeAlias = jax.typing.ArrayLike | optax.Schedule
DType: TypeAlias = Any  # whatever `jnp.dtype` accepts, best as a string
Correction: TypeAlias = Literal["approx", "exact", "none", "storm", "svrg", "sarah"]
FirstStep: TypeAlias = Literal["zeros", "no_correction"]
SecondMoment: TypeAlias = Literal["corrected", "gradient"]
Implementation: TypeAlias = Literal["xla", "pallas"]
Mask: TypeAlias = Any | Callable[[optax.Params], Any]
WeightDimensionNumbers: TypeAlias = (
    optax.contrib.MuonDimensionNumbers | Any | Callable[[optax.Params], Any]
)
NewtonSchulzCoefficients: TypeAlias = str | tuple[Any, ...] | list[Any] | jax.Array
NewtonSchulzFn: TypeAlias = Callable[[jax.Array], jax.Array]
Precision: TypeAlias = jax.lax.PrecisionLike
