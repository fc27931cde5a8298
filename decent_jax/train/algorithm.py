"""A config's algorithm as an optax transformation, and its cost.

``optimizer.name`` is one of the project's own optimizers, or the dotted name of any other optimizer
with its arguments, such as ``"optax.contrib.muon(beta=0.9)"``.
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from decent_jax import optim
from decent_jax.gossip import AxisName, codecs
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.extras import module_named
from decent_jax.ground.format import format_bytes, shown
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import METHODS, MethodSpec, Parts
from decent_jax.topology import Schedule, make
from decent_jax.train.settings import Config, Optimizer

# First or last path components of arrays that Muon leaves to Adam: embeddings and output layers.
NOT_HIDDEN = {"embedding", "lm_head", "fc"}


def transformation(
    config: Config,
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    decay_mask: PyTree = None,
    axis_name: AxisName = "replica",
) -> optim.Method:
    """The method that the config names, for one replica.

    Raises:
      ConfigError: two parts of the config cannot be combined; the message names both.
    """
    try:
        arguments = parts(config, schedule, rate, decay_mask, axis_name)
        return optim.as_method(METHODS[config.algorithm].build(arguments))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parts(
    config: Config,
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    decay_mask: PyTree = None,
    axis_name: AxisName = "replica",
) -> Parts:
    """The arguments for building the config's method, with the numbers of its own section."""
    method = METHODS[config.algorithm]
    clip, decay = _gradient_steps(config, decay_mask)
    if method.own_momentum and config.optimizer.decoupled and config.optimizer.weight_decay:
        name = f"{method.config_section}.weight_decay"
        instead = f" and {name} in its place" if "weight_decay" in method.numbers else ""
        raise ValueError(
            f"algorithm {config.algorithm} adds weight decay to the gradient: set "
            f"optimizer.decoupled=False, or optimizer.weight_decay=0{instead}"
        )
    encodes = config.trainer != "peers"  # a peer encodes its snapshots itself
    numbers = numbers_of(config, method)
    if config.gamma_lr_exponent and callable(rate):
        numbers["gamma"] = lambda step: (  # pyright: ignore[reportUnknownLambdaType]
            config.gamma * (rate(step) / config.learning_rate) ** config.gamma_lr_exponent
        )
    return Parts(
        schedule,
        rate,
        _local_optimizer(config, rate, decay_mask),
        axis_name,
        config.combine,
        config.mix_every,
        codecs.named(config.codec, config.seed) if encodes else None,
        gradient=optax.chain(clip, decay),
        optimizer=dataclasses.asdict(config.optimizer),
        same_init=config.same_init,
        seed=config.seed,
        numbers=numbers,
    )


def numbers_of(config: Config, method: MethodSpec) -> dict[str, Any]:
    """A method's own hyperparameters by name, from its section of the config."""
    if not method.numbers:
        return {}
    name = method.config_section
    section = getattr(config, name) if name else config
    return {number: getattr(section, number) for number in method.numbers}


def optimizer_name(config: Config) -> str:
    """The name of the local optimizer: ``optimizer.name``, or else the algorithm's default.

    Raises ValueError if the algorithm does not work with this optimizer.
    """
    method, name = METHODS[config.algorithm], config.optimizer.name
    allowed = method.optimizers
    if is_dotted(name):
        if method.own_momentum or allowed == ("accum_adam",):
            raise ValueError(
                f"algorithm {config.algorithm} is an optimizer itself, got optimizer.name "
                f"{name!r}; any optimizer works with decentralized_sgd, and with all_reduce"
            )
        return name
    if name and name not in allowed:
        raise ValueError(
            f"algorithm {config.algorithm} works with optimizer.name {' or '.join(allowed)}, got "
            f"{name!r}; leave optimizer.name empty for {allowed[0]}"
        )
    return name or allowed[0]


def check_optimizer(config: Config, rate: optax.Schedule, params: PyTree) -> None:
    """Check that an optimizer with a dotted name updates parameters from a gradient and a loss.

    Args:
      config, rate: the run's config and learning rate.
      params: shapes of one replica's parameters.

    Raises:
      ConfigError: the optimizer fails (the message quotes its error), or its parameters must be
        averaged before evaluation.
    """
    name = optimizer_name(config)
    if not is_dotted(name):
        return
    refusal = functools.partial(ConfigError.about, "optimizer.name", name)
    tx = optax.with_extra_args_support(parts(config, make("complete", 1), rate).inner)

    def state_and_change(params: PyTree, loss: jax.Array):
        state = tx.init(params)
        return state, tx.update(params, state, params, value=loss)

    try:
        state, (change, _) = jax.eval_shape(state_and_change, params, jnp.float32(0))
    except Exception as error:  # the user's code may raise anything
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise refusal(
            f"must update the parameters from their gradient and the loss ({why})"
        ) from None
    if jax.tree.structure(change) != jax.tree.structure(params):
        raise refusal("must return an update with the structure of the parameters")
    averages = optax.contrib.ScheduleFreeState
    if any(
        isinstance(x, averages)
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, averages))
    ):
        raise refusal("must evaluate the parameters that it trains; schedule-free ones do not")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that one replica sends and keeps."""

    sent_a_step: float  # by the busiest replica to all its neighbours, averaged over a period
    sent_by_node: float  # by the busiest node to other nodes, averaged over a period
    state: int  # parameters, optimizer and method
    replicas_per_node: int


def cost(config: Config, schedule: Schedule, state: PyTree, replicas_per_node: int) -> Cost:
    """Compute the bytes that a replica and a node send per step, and that a replica keeps.

    Args:
      config, schedule: the run's config and communication schedule.
      state: a `TrainState` with leading replica dimension, or its shapes.
      replicas_per_node: number of replicas that a node holds.
    """
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    method, arguments = METHODS[config.algorithm], parts(config, schedule, 1.0)
    by_replica, by_node = (
        method.bytes_sent(own.params, arguments, size) for size in (1, replicas_per_node)
    )
    return Cost(by_replica, by_node, bytes_of(own), replicas_per_node)


def bytes_of(tree: PyTree) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def messages(cost: Cost, hosts: Sequence[str], per_host: int) -> dict[str, float]:
    """The entries of ``run.json`` about the messages of a step, averaged over a period.

    Args:
      cost: the run's cost.
      hosts: host name of each replica.
      per_host: replicas per host; 1 if hosts hold different numbers.

    Returns:
      ``bytes_sent_per_step`` by the busiest replica; ``bytes_between_hosts_per_step`` by the
      busiest host to other hosts, omitted if hosts hold different numbers of replicas.

    >>> cost = Cost(sent_a_step=8, sent_by_node=3, state=100, replicas_per_node=2)
    >>> for hosts, per_host in ("aaaa", 4), ("abcd", 1), ("aabb", 2), ("aaab", 1):
    ...     print(list(messages(cost, hosts, per_host).values()))
    [8, 0]
    [8, 8]
    [8, 3]
    [8]
    """
    sizes: dict[str, float] = {"bytes_sent_per_step": round(cost.sent_a_step)}
    between = {1: 0.0, len(hosts): cost.sent_a_step}.get(len(set(hosts)))
    if between is None and cost.replicas_per_node == per_host:
        between = cost.sent_by_node
    return sizes if between is None else sizes | {"bytes_between_hosts_per_step": round(between)}


def describe(config: Config, schedule: Schedule, cost: Cost) -> str:
    """Describe the algorithm and its cost in one line, for the log.

    >>> from decent_jax import topology
    >>> config = Config(algorithm="swarm")
    >>> describe(config, topology.make("one_peer_exp", 1), Cost(0, 0, 8_000_000, 1))
    'swarm: a replica keeps 8.00 MB of parameters and optimizer'
    """
    sent, by_node, state = map(format_bytes, (cost.sent_a_step, cost.sent_by_node, cost.state))
    name = config.optimizer.name
    over = f" with {name}" if is_dotted(name) else ""
    if schedule.num_replicas == 1:  # also for peers, whose messages are not part of a step
        return f"{config.algorithm}{over}: a replica keeps {state} of parameters and optimizer"
    if config.algorithm != "all_reduce":
        over += f" over {schedule.name}"
    node = ""
    if cost.replicas_per_node > 1:
        node = f" (a node of {cost.replicas_per_node} sends {by_node} to other nodes)"
    return (
        f"{config.algorithm}{over}: a replica sends {sent} per step{node} and "
        f"keeps {state} of parameters and optimizer"
    )


def _local_optimizer(config: Config, rate: optax.ScalarOrSchedule, decay_mask: PyTree):
    chosen, name = config.optimizer, optimizer_name(config)
    clip, decay = _gradient_steps(config, decay_mask)
    # Weight decay is added to the gradient or, if decoupled, to the update.
    before, after = (optax.identity(), decay) if chosen.decoupled else (decay, optax.identity())
    decoupled = chosen.weight_decay if chosen.decoupled else 0.0
    if is_dotted(name):
        return optax.chain(clip, before, named_optimizer(name, rate, decoupled, decay_mask))
    if name in ("sgd", "muon"):
        trace = optax.trace(chosen.momentum) if chosen.momentum else optax.identity()
        direction = trace if name == "sgd" else _muon(chosen)
        return optax.chain(clip, before, direction, after, optax.scale_by_learning_rate(rate))
    make = optim.accum_adamw if chosen.decoupled else optim.accum_adam
    window = config.optimizer.accum_steps if name == "accum_adam" else 1
    inner = make(rate, chosen.b1, chosen.b2, chosen.eps, chosen.weight_decay, decay_mask, window)
    return optax.chain(clip, inner) if chosen.clip_norm else inner


def hidden_matrices(params: PyTree) -> PyTree:
    """The axes along which Muon orthogonalizes each array; None for arrays that Adam updates.

    Muon updates the matrices of hidden layers, and convolution kernels (height, width, in, out) as
    matrices (height width in, out). As Jordan et al. 2024 recommend, Adam updates embeddings and
    output layers, which are identified by the names in `NOT_HIDDEN`.
    """
    axes = {2: ((0,), (1,)), 4: ((0, 1, 2), (3,))}

    def of(path: jax.tree_util.KeyPath, x: PyTree):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if x.ndim not in axes or NOT_HIDDEN & {names[0], names[-1]}:
            return None
        return optax.contrib.MuonDimensionNumbers(*axes[x.ndim])

    return jax.tree_util.tree_map_with_path(of, params)


def _muon(chosen: Optimizer) -> optax.GradientTransformation:
    """Muon for hidden matrices and Adam for all other arrays, both with steps of Adam's size.

    Both use Nesterov momentum: `optax.contrib.muon` passes it on to its Adam (`optax.nadam`),
    whereas Jordan et al. 2024 use plain Adam.
    """
    return optax.contrib.muon(
        -1.0,  # weight decay and the negative learning rate follow
        beta=chosen.momentum,
        eps=chosen.eps,
        adam_b1=chosen.b1,
        adam_b2=chosen.b2,
        consistent_rms=0.2,  # Liu et al. 2025: updates as large as Adam's
        muon_weight_dimension_numbers=hidden_matrices,
    )


def _gradient_steps(config: Config, decay_mask: PyTree):
    """(clipping, weight decay), each the identity if the config has none."""
    norm, decay = config.optimizer.clip_norm, config.optimizer.weight_decay
    return (
        optax.clip_by_global_norm(norm) if norm else optax.identity(),
        optax.add_decayed_weights(decay, decay_mask) if decay else optax.identity(),
    )


# --- Optimizers by their dotted names -------------------------------------------------------------


def is_dotted(name: str) -> bool:
    """Whether ``optimizer.name`` is a dotted name, not one of the project's own."""
    return "." in name.partition("(")[0]


def parse(text: str) -> tuple[str, Json]:
    """Split ``optimizer.name`` into a dotted name and keyword arguments, as Python values.

    >>> parse("optax.contrib.muon(beta=0.9, ns_steps=3)")
    ('optax.contrib.muon', {'beta': 0.9, 'ns_steps': 3})

    Raises:
      ValueError: ``text`` is not a dotted name with keyword arguments that are literals.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"optimizer.name {shown(text)} cannot be read: write a dotted name, and arguments by "
            "name as Python literals, such as 'optax.contrib.muon(beta=0.9)'"
        ) from None


def named_optimizer(
    text: str, rate: optax.ScalarOrSchedule, weight_decay: float, decay_mask: PyTree
) -> optax.GradientTransformation:
    """Build the optimizer that ``text`` names.

    Args:
      text: see `parse`; the named function must take ``learning_rate``.
      rate: the run's learning rate.
      weight_decay: decoupled weight decay, passed on if the function takes ``weight_decay``.
      decay_mask: mask of the parameters that decay, passed on if the function takes a mask.

    Raises:
      ValueError: there is no such function, or it does not accept these arguments.
    """
    path, arguments = parse(text)
    factory = _find(path)
    takes = inspect.signature(factory).parameters
    if "learning_rate" not in takes:
        raise ValueError(f"optimizer.name {path} takes no learning_rate: it is not an optimizer")
    if weight_decay and ("weight_decay" in arguments or "weight_decay" not in takes):
        raise ValueError(f"{path} ignores or sets weight_decay: set optimizer.weight_decay=0")
    if "weight_decay" in takes:  # optax's own default is often not 0
        arguments.setdefault("weight_decay", weight_decay)
        for mask in ("mask", "weight_decay_mask"):
            if mask in takes and decay_mask is not None:
                arguments.setdefault(mask, decay_mask)
    try:
        optimizer = factory(learning_rate=rate, **arguments)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"optimizer.name {shown(text)}: {error}") from None
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"optimizer.name {path} returns no optax.GradientTransformation")
    return optimizer


def _find(path: str) -> Callable[..., object]:
    module_path, _, name = path.rpartition(".")
    module = module_named(module_path, "optimizer.name")
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"optimizer.name: {module_path} has no function {name!r}")
    return factory
