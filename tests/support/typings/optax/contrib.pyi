"""Optimizers that optax calls contributed."""

from collections.abc import Callable
from typing import Any, NamedTuple

from optax import GradientTransformation, GradientTransformationExtraArgs, ScalarOrSchedule

class MuonDimensionNumbers(NamedTuple):
    reduction_axis: int | tuple[int, ...] = 0
    output_axis: int | tuple[int, ...] = 1

class ScheduleFreeState(NamedTuple):
    z: Any

class DoGState(NamedTuple): ...
class DoWGState(NamedTuple): ...
class DAdaptAdamWState(NamedTuple): ...
class ProdigyState(NamedTuple): ...

def muon(learning_rate: ScalarOrSchedule, **numbers: Any) -> GradientTransformationExtraArgs: ...
def scale_by_muon(
    *,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    nesterov: bool = True,
    weight_dimension_numbers: Any | Callable[[Any], Any] = None,
) -> GradientTransformation: ...
