"""The order of micro-batches in a stage, and the layers per stage, as plain lists.

>>> order("1f1b", stages=2, micro_batches=3, stage=0)
[('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2), ('backward', 1), ('backward', 2)]
>>> divide(12, 4, last_costs=2.0)
[3, 3, 4, 2]
"""

from decent_jax.ground.errors import ConfigError

ORDERS = ("1f1b", "gpipe")


def order(name: str, stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """The actions of a stage in a step: ("forward" or "backward", micro-batch), in order.

    ``gpipe`` (Huang et al., 2019) computes all forward passes before the first backward pass, so a
    stage holds all inputs; the last stage starts its backward passes at once. ``1f1b`` (Narayanan
    et al., 2019) alternates one forward and one backward pass, and holds at most ``stages - stage``
    inputs. Both take the same time on links without latency.

    Args:
      name: one of `ORDERS`.
      stages: S, the number of stages.
      micro_batches: number of micro-batches per step.
      stage: index of the stage, 0 to S - 1.
    """
    all_first = name == "gpipe" and stage < stages - 1
    ahead = micro_batches if all_first else min(stages - 1 - stage, micro_batches)
    actions = [("forward", k) for k in range(ahead)]
    for k in range(micro_batches):
        if ahead + k < micro_batches:
            actions.append(("forward", ahead + k))
        actions.append(("backward", k))
    return actions


def divide(layers: int, stages: int, last_costs: float = 0.0) -> list[int]:
    """Layers per stage, at least one each, that minimize the time of the slowest stage.

    Args:
      layers: the number of layers, all of equal cost.
      stages: S, the number of stages.
      last_costs: cost of the output layer in the last stage, in layers.

    Raises:
      ConfigError: there are fewer layers than stages.
    """
    if stages > layers:
        raise ConfigError.about("pipeline.stages", stages, f"must be at most the {layers} layers")
    extra = [0.0] * (stages - 1) + [last_costs]
    # best[n]: (time of the slowest, layers per stage) of the stages so far, with n layers in total.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for s in range(stages):
        best = {
            n: min(
                (max(best[n - new][0], new + extra[s]), [*best[n - new][1], new])
                for new in range(1, n + 1)
                if n - new in best
            )
            for n in range(s + 1, layers - (stages - 1 - s) + 1)
        }
    return best[layers][1]


def layers_of(text: str, layers: int, stages: int, last_costs: float) -> list[int]:
    """Layers per stage, from the text of ``pipeline.layers``: "4,4,3", or "" to use `divide`.

    Raises:
      ConfigError: the text does not fit the model.
    """
    balanced = divide(layers, stages, last_costs)  # also checks the number of stages
    if not text:
        return balanced
    words = text.split(",")
    counts = [int(word) for word in words if word.strip().isdecimal()]
    if len(counts) != len(words) or len(counts) != stages or min(counts) < 1:
        why = f"must be empty or {stages} comma-separated numbers of at least 1, one per stage"
        raise ConfigError.about("pipeline.layers", text, why)
    if sum(counts) != layers:
        why = f"must add up to the model's {layers} layers, not to {sum(counts)}"
        raise ConfigError.about("pipeline.layers", text, why)
    return counts
