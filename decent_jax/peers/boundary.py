"""What happens to a peer's state between two steps; the live run and its replay share it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax.optim import METHODS, trees
from decent_jax.peers.formats import Arrays
from decent_jax.train import algorithm
from decent_jax.train.experiment import Experiment
from decent_jax.train.step import TrainState


class Boundary:
    """The operations on a `TrainState` of one replica, (1, ...), between its steps."""

    def __init__(self, experiment: Experiment):
        self.placement = experiment.placement
        self._mixes_state = experiment.task.mixes_state
        self._rate = jax.jit(lambda t: jnp.asarray(experiment.rate(t), jnp.float32))
        place_all = self.placement.place_all
        method = METHODS[experiment.config.algorithm]
        assert method.meeting is not None  # `decent_jax.peers.setup.check`
        meet = jax.vmap(method.meeting(algorithm.numbers_of(experiment.config, method)))

        def met(averaged, own, copy, half):
            (params, model_state), (params_half, model_state_half) = averaged, half
            params, own = meet(params, own, copy[0], params_half)
            return place_all(((params, trees.add(model_state, model_state_half)), own))

        self._meet = jax.jit(met, donate_argnums=(0, 1))
        self.copy = jax.jit(lambda tree: place_all(jax.tree.map(jnp.copy, tree)))

    def averaged(self, state: TrainState) -> Any:
        """See the function `averaged`."""
        return averaged(self._mixes_state, state)

    def meet(self, state: TrainState, copy: Arrays, half: Arrays) -> TrainState:
        """The state after a meeting; donates the old one.

        Args:
          copy: what this peer brought.
          half: of the difference of the partner's copy to it, as far as their messages say.
        """
        old, own = self.averaged(state), state.opt_state.own
        copy, half = (
            jax.tree.unflatten(jax.tree.structure(old), [x[None] for x in arrays])
            for arrays in (copy, half)
        )
        (params, model_state), own = self._meet(old, own, copy, half)
        state = state._replace(params=params, opt_state=state.opt_state._replace(own=own))
        return state._replace(model_state=model_state) if self._mixes_state else state

    def at_progress(self, state: TrainState, progress: int) -> TrainState:
        """The state whose next update has the learning rate of this common progress, in steps."""

        def is_count(node):
            return isinstance(node, optax.ScaleByScheduleState)

        def replaced(node):
            if not is_count(node):
                return node
            count = jax.device_put(np.full((1,), progress, np.int32), self.placement.sharding((1,)))
            return node._replace(count=count)

        return state._replace(opt_state=jax.tree.map(replaced, state.opt_state, is_leaf=is_count))

    def rate(self, progress: int) -> jax.Array:
        """() float32: the learning rate."""
        return self._rate(np.int32(progress))

    def put(self, arrays: Arrays, like: Any) -> Any:
        """Host arrays (1, ...) as a tree on the devices."""
        leaves = [jax.device_put(x, self.placement.sharding(x.shape)) for x in arrays]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def averaged(mixes_state: bool, state: TrainState) -> Any:
    """The part of the state that peers average, and send."""
    return state.params, state.model_state if mixes_state else {}


def number(stream: int, t: int) -> np.ndarray:
    """(2,) what a peer's step draws its random numbers (dropout) from: step t of its stream."""
    return np.array([t, stream], np.int32)


def on_host(tree: Any) -> Arrays:
    """Leaves without the replica dimension; they may be shared with the device, so do not write."""
    return [np.asarray(x)[0] for x in jax.tree.leaves(tree)]
