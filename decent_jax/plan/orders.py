"""In which order a stage computes its micro-batches, and how many layers it has: plain lists.

>>> order("1f1b", stages=2, micro_batches=3, stage=0)
[('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2), ('backward', 1), ('backward', 2)]
>>> divide(12, 4, last_costs=2.0)
[3, 3, 4, 2]
"""

from collections.abc import Sequence

from decent_jax.ground.errors import ConfigError

ORDERS = ("1f1b", "gpipe")


def order(name: str, stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """What a stage does in a step: ("forward" or "backward", micro-batch), one after the other.

    ``gpipe`` (Huang et al., 2019) goes forward with all micro-batches before it goes backward, so a
    stage keeps all their inputs; the last stage can go backward at once. ``1f1b`` (Narayanan et
    al., 2019) goes forward with one only after it went backward with another, and keeps at most
    ``stages - stage`` inputs. It takes the same time if links take none.

    Args:
      name: of `ORDERS`.
      stages: S.
      micro_batches: M.
      stage: 0 to S - 1.
    """
    all_first = name == "gpipe" and stage < stages - 1
    ahead = micro_batches if all_first else min(stages - 1 - stage, micro_batches)
    actions = [("forward", k) for k in range(ahead)]
    for k in range(micro_batches):
        if ahead + k < micro_batches:
            actions.append(("forward", ahead + k))
        actions.append(("backward", k))
    return actions


def divide(
    layers: int, stages: int, last_costs: float = 0.0, speeds: Sequence[float] | None = None
) -> list[int]:
    """Layers of each stage, at least one, so that the slowest stage is as fast as it can be.

    Args:
      layers: of the model, all alike.
      stages: S.
      last_costs: what the last stage computes besides its layers, in layers.
      speeds: (S,) relative speed of each stage's machine; None: all alike.

    Raises:
      ConfigError: fewer layers than stages.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline.stages {stages} is more than the model's {layers} layers; use at most "
            f"{layers} stages",
            field="pipeline.stages",
            value=stages,
        )
    speeds = [1.0] * stages if speeds is None else list(speeds)
    extra = [0.0] * (stages - 1) + [last_costs]
    # best[n]: (time of the slowest, layers) of the stages so far, with n layers in all.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for s in range(stages):
        best = {
            n: min(
                (max(best[n - own][0], (own + extra[s]) / speeds[s]), [*best[n - own][1], own])
                for own in range(1, n + 1)
                if n - own in best
            )
            for n in range(s + 1, layers - (stages - 1 - s) + 1)
        }
    return best[layers][1]


def layers_of(text: str, layers: int, stages: int, last_costs: float) -> list[int]:
    """The layers that ``pipeline.layers`` names: "" for `divide`, or a list such as "4,4,3".

    Raises:
      ConfigError: it does not fit the model.
    """
    found = divide(layers, stages, last_costs)  # also checks the number of stages
    if not text:
        return found
    words = text.split(",")
    counts = [int(word) for word in words if word.strip().isdecimal()]
    if len(counts) != len(words) or len(counts) != stages or min(counts) < 1:
        raise ConfigError(
            f"pipeline.layers must be empty or {stages} numbers from 1 on separated by commas, one "
            f"for each stage, got {text!r}",
            field="pipeline.layers",
            value=text,
        )
    if sum(counts) != layers:
        raise ConfigError(
            f"pipeline.layers {text!r} are {sum(counts)} layers, but the model has {layers}",
            field="pipeline.layers",
            value=text,
        )
    return counts
