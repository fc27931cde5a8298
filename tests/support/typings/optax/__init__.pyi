"""optax as this project uses it: its package has no types; trees of arrays are Any."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from optax import contrib as contrib
from optax import tree as tree

Number = float | jax.Array | np.ndarray
Schedule = Callable[[Any], Any]
ScalarOrSchedule = float | jax.Array | Schedule
Mask = Any | Callable[[Any], Any]

class GradientTransformation(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]

class GradientTransformationExtraArgs(GradientTransformation): ...

class ScaleByScheduleState(NamedTuple):
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]

class ScaleByRpropState(NamedTuple):
    step_sizes: Any
    prev_updates: Any

class InjectStatefulHyperparamsState(NamedTuple):
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    hyperparams: dict[str, Any]
    hyperparams_states: dict[str, Any]
    inner_state: Any

def chain(*args: GradientTransformation) -> GradientTransformationExtraArgs: ...
def identity() -> GradientTransformation: ...
def set_to_zero() -> GradientTransformation: ...
def stateless(f: Callable[[Any, Any], Any]) -> GradientTransformation: ...
def with_extra_args_support(tx: GradientTransformation) -> GradientTransformationExtraArgs: ...
def partition(
    transforms: Mapping[Any, GradientTransformation], param_labels: Mask
) -> GradientTransformationExtraArgs: ...
def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Number | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
) -> GradientTransformationExtraArgs: ...
def adam(
    learning_rate: ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformationExtraArgs: ...
def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    weight_decay: Number = 1e-4,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformationExtraArgs: ...
def trace(
    decay: Number, nesterov: bool = False, accumulator_dtype: Any = None
) -> GradientTransformation: ...
def add_decayed_weights(
    weight_decay: Number | Schedule = 0.0, mask: Mask | None = None
) -> GradientTransformation: ...
def scale_by_learning_rate(
    learning_rate: ScalarOrSchedule, *, flip_sign: bool = True
) -> GradientTransformation: ...
def clip_by_global_norm(max_norm: float) -> GradientTransformation: ...
def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: Any = None,
) -> Callable[..., GradientTransformationExtraArgs]: ...
def apply_updates(params: Any, updates: Any) -> Any: ...
def safe_increment(count: Any) -> Any: ...
def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule: ...
