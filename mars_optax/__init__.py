"""MARS: variance-reduced optimizers for JAX, as Optax gradient transformations."""

from mars_optax._src.describe import Description as Description
from mars_optax._src.describe import LeafDescription as LeafDescription
from mars_optax._src.describe import describe as describe
from mars_optax._src.diagnose import diagnose as diagnose
from mars_optax._src.links import CorrectGradientsState as CorrectGradientsState
from mars_optax._src.links import clip_by_leaf_norm as clip_by_leaf_norm
from mars_optax._src.links import correct_gradients as correct_gradients
from mars_optax._src.orthogonalize import orthogonalize as orthogonalize
from mars_optax._src.partition import dimension_numbers_by_path as dimension_numbers_by_path
from mars_optax._src.rounding import stochastic_apply_updates as stochastic_apply_updates
from mars_optax._src.variants.adamw import ScaleByMarsState as ScaleByMarsState
from mars_optax._src.variants.adamw import mars as mars
from mars_optax._src.variants.adamw import scale_by_mars as scale_by_mars
from mars_optax._src.variants.lion import ScaleByMarsLionState as ScaleByMarsLionState
from mars_optax._src.variants.lion import mars_lion as mars_lion
from mars_optax._src.variants.lion import scale_by_mars_lion as scale_by_mars_lion
from mars_optax._src.variants.mars_m import ScaleByMarsMState as ScaleByMarsMState
from mars_optax._src.variants.mars_m import mars_m as mars_m
from mars_optax._src.variants.mars_m import scale_by_mars_m as scale_by_mars_m
from mars_optax._src.variants.shampoo import ScaleByMarsShampooState as ScaleByMarsShampooState
from mars_optax._src.variants.shampoo import mars_shampoo as mars_shampoo
from mars_optax._src.variants.shampoo import scale_by_mars_shampoo as scale_by_mars_shampoo
from mars_optax._src.variants.storm import storm_adamw as storm_adamw
from mars_optax._src.wrappers import cautious as cautious
from mars_optax._src.wrappers import ignore_absent_gradients as ignore_absent_gradients
from mars_optax._version import __version__ as __version__
