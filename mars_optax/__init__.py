"""MARS: variance-reduced optimizers for JAX, as Optax gradient transformations."""

from mars_optax._src.adaptive import AdaptiveGamma, AdaptiveGammaState
from mars_optax._src.describe import Description, LeafDescription, describe
from mars_optax._src.diagnose import diagnose
from mars_optax._src.fused import fused_step
from mars_optax._src.links import clip_by_leaf_norm, correct_gradients
from mars_optax._src.orthogonalize import orthogonalize
from mars_optax._src.partition import dimension_numbers_by_path
from mars_optax._src.rounding import stochastic_apply_updates
from mars_optax._src.states import CorrectGradientsState
from mars_optax._src.variants.adamw import MarsState, ScaleByMarsState, mars, scale_by_mars
from mars_optax._src.variants.any import VarianceReducedState, variance_reduced
from mars_optax._src.variants.lion import (
    MarsLionState,
    ScaleByMarsLionState,
    mars_lion,
    scale_by_mars_lion,
)
from mars_optax._src.variants.mars_m import MarsMState, ScaleByMarsMState, mars_m, scale_by_mars_m
from mars_optax._src.variants.shampoo import (
    MarsShampooState,
    ScaleByMarsShampooState,
    mars_shampoo,
    scale_by_mars_shampoo,
)
from mars_optax._src.variants.soap import (
    MarsSoapState,
    ScaleByMarsSoapState,
    ScaleBySoapState,
    mars_soap,
    scale_by_mars_soap,
)
from mars_optax._src.variants.storm import StormAdamwState, storm_adamw
from mars_optax._src.wrappers import cautious, ignore_absent_gradients
from mars_optax._version import __version__ as __version__

__all__ = [
    "AdaptiveGamma",
    "AdaptiveGammaState",
    "CorrectGradientsState",
    "Description",
    "LeafDescription",
    "MarsLionState",
    "MarsMState",
    "MarsShampooState",
    "MarsSoapState",
    "MarsState",
    "ScaleByMarsLionState",
    "ScaleByMarsMState",
    "ScaleByMarsShampooState",
    "ScaleByMarsSoapState",
    "ScaleByMarsState",
    "ScaleBySoapState",
    "StormAdamwState",
    "VarianceReducedState",
    "cautious",
    "clip_by_leaf_norm",
    "correct_gradients",
    "describe",
    "diagnose",
    "dimension_numbers_by_path",
    "fused_step",
    "ignore_absent_gradients",
    "mars",
    "mars_lion",
    "mars_m",
    "mars_shampoo",
    "mars_soap",
    "orthogonalize",
    "scale_by_mars",
    "scale_by_mars_lion",
    "scale_by_mars_m",
    "scale_by_mars_shampoo",
    "scale_by_mars_soap",
    "stochastic_apply_updates",
    "storm_adamw",
    "variance_reduced",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
