r"""Gossip during the gradient on CPU hosts, where XLA does not overlap the two.

On a GPU the messages of a round travel during the forward and backward pass, because XLA starts
them at the top of the step (`decent_jax.train.xla`). On CPUs XLA waits for each message where
it sends it, and runs the programs of one thread one after the other, so a step takes the time of
the gradient plus that of the messages. Here a step is three programs instead:

- ``begin`` computes the gradient, and of the update all that does not read the mixed parameters;
  a second thread starts it;
- ``mix`` sends and receives the messages meanwhile;
- ``finish`` adds the two results.

With :math:`\hat x` the mixed parameters, :math:`\eta` the learning rate and :math:`\lambda` the
decoupled weight decay (0 for some arrays), the optimizers of a config compute
:math:`x \leftarrow \hat x - \eta (u + \lambda \hat x)`, where the direction :math:`u` and the new
moments do not depend on :math:`\hat x`. So ``begin`` computes :math:`-u`: the update that the same
method makes at :math:`\hat x = 0` with :math:`\eta = 1`. Decay in the gradient (L2) makes all of an
update depend on :math:`\hat x`: then ``finish`` computes the whole update.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from decent_jax.cpu import pair_sums
from decent_jax.optim import EarlyMixing
from decent_jax.replicas import Placement


def needed(tx: Any, placement: Placement) -> bool:
    """Whether messages need a program of their own: sent by gloo, and known before the gradient.

    Not for replicas of several devices, whose gradients communicate too.
    """
    return pair_sums.over_gloo() and isinstance(tx, EarlyMixing) and placement.fsdp == 1


class Parts(NamedTuple):
    """What `decent_jax.train.step.make_step` makes a step of."""

    tx: EarlyMixing
    gradients: Callable  # (params, model_state, batch, t) of a device -> loss, model_state, grads
    update: Callable  # one replica's (params, opt_state, loss, grads, round, mixed)
    direct: Callable | None  # the same at learning rate 1; None: decay is in the gradient (L2)
    follow: Callable  # one replica's (params, model_state, ema, round) -> model_state, ema
    with_rate: Callable  # ((state, metrics), t) -> the same with the learning rate
    rate: Callable  # (t) -> learning rate
    decay: Callable  # (params) -> weight decay of each array


class Step:
    """A step in three programs; ``lower(...).compile()`` is used as that of `jax.jit`.

    Args:
      whole: the jitted step, for steps without communication.
      parts: the functions that ``whole`` is made of.
      placement: where the replicas live.
      check_vma: of `Placement.on_devices`.
      options: XLA's, for all three programs.
    """

    def __init__(
        self, whole: Any, parts: Parts, placement: Placement, check_vma: bool, options: dict
    ):
        self._whole, self._parts, self._placement = whole, parts, placement
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradient")
        self._compiled = {}  # rounds share ``begin``, shapes of a batch the other two
        rows = P("replica")

        def on_devices(body, *in_specs):
            return placement.on_devices(body, in_specs, rows, check_vma)

        @partial(jax.jit, static_argnames="round")
        def mix(params, count, *, round):
            return on_devices(partial(self._mix, round=round), rows, rows)(params, count)

        @partial(jax.jit, donate_argnums=0, compiler_options=options)
        def begin(inner, state, batch, t):
            return on_devices(self._begin, rows, rows, rows, P())(inner, state, batch, t)

        @partial(
            jax.jit, static_argnames="round", donate_argnums=(0, 1, 2), compiler_options=options
        )
        def finish(state, kept, mixed, t, *, round):
            run = on_devices(partial(self._finish, round=round), rows, rows, rows, P())
            return parts.with_rate(run(state, kept, mixed, t), t)

        self._programs = {"mix": mix, "begin": begin, "finish": finish}

    # --- The programs, as the code of one device ----------------------------------------------

    def _mix(self, params, count, *, round):
        return self._placement.per_replica(
            lambda params, count: self._parts.tx.mix(params, count, round)
        )(params, count)

    def _begin(self, inner, state, batch, t):
        """(model_state, opt_state, -u and metrics), or with L2 (.., .., loss and gradient)."""
        direct, opt_state = self._parts.direct, state.opt_state._replace(inner=inner)
        loss, model_state, grads = self._parts.gradients(state.params, state.model_state, batch, t)
        if direct is None:
            return model_state, opt_state, (loss, grads)

        def direction(opt_state, loss, grads):
            zero = jax.tree.map(jnp.zeros_like, grads)
            minus_u, opt_state, metrics = direct(zero, opt_state, loss, grads, 0, zero)
            return opt_state, (minus_u, metrics)

        with jax.named_scope("update"):
            return model_state, *self._placement.per_replica(direction)(opt_state, loss, grads)

    def _finish(self, state, kept, mixed, t, *, round):
        """The new state and metrics, from a state of which only params and ema are old."""
        parts = self._parts

        def finish(state, kept, mixed):
            if parts.direct is None:
                loss, grads = kept
                params, opt_state, metrics = parts.update(
                    state.params, state.opt_state, loss, grads, 0, mixed
                )
            else:
                (minus_u, metrics), opt_state = kept, state.opt_state
                eta = jnp.where(opt_state.failing == 0, parts.rate(t), 0)  # 0: rejected
                params = jax.tree.map(
                    partial(_combine, eta), state.params, mixed, minus_u, parts.decay(mixed)
                )
            model_state, ema = parts.follow(params, state.model_state, state.ema, round)
            state = state._replace(
                params=params, model_state=model_state, opt_state=opt_state, ema=ema
            )
            return state, metrics

        with jax.named_scope("update"):
            return self._placement.per_replica(finish)(state, kept, mixed)

    # --- Compiling and running ------------------------------------------------------------------

    def lower(self, state: Any, batch: Any, t: Any, *, round: int | None) -> Any:
        """As of `jax.jit`; compiled are only the programs that another call has not compiled."""
        if round is None:
            return self._whole.lower(state, batch, t, round=None)
        return SimpleNamespace(compile=lambda: self._compile(state, batch, t, round))

    def _compile(self, state, batch, t, round) -> "Program":
        sharding = self._placement.stacked
        inner, rest = _apart(state)
        programs, compiled = self._programs, self._compiled

        def result_of(fn, *args):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                jax.eval_shape(fn, *args),
            )

        def lower(name):
            if name == "mix":
                return programs[name].lower(state.params, state.opt_state.count, round=round)
            if name == "begin":
                return programs[name].lower(inner, rest, batch, t)
            model_state, opt_state, kept = result_of(programs["begin"], inner, rest, batch, t)
            begun = state._replace(model_state=model_state, opt_state=opt_state)
            mixed = result_of(lambda x: x, state.params)
            return programs[name].lower(begun, kept, mixed, t, round=round)

        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        keys = {"mix": round, "begin": shapes, "finish": round}
        for key in keys.items():
            if key not in compiled:
                compiled[key] = lower(key[0]).compile()
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state, batch)))
        return Program(self._thread, held, *(compiled[key] for key in keys.items()))


def _apart(state: Any) -> tuple[Any, Any]:
    """The local optimizer's state, which ``begin`` donates, and what it reads besides."""
    opt_state = state.opt_state._replace(inner=None)
    return state.opt_state.inner, state._replace(opt_state=opt_state, ema=None)


def _combine(eta, x, x_hat, minus_u, decay):
    """``x_hat - eta * (u + decay * x_hat)``, rounded as `decent_jax.train.step.update` does it."""
    change = -eta.astype(x.dtype) * (decay * x_hat - minus_u)
    x = jnp.where(jnp.isfinite(x), x, 0)
    return x + ((x_hat + jnp.where(jnp.isfinite(change), change, 0)) - x)


class Program(NamedTuple):
    """A compiled step of one round; called, and asked for its memory, like jax's own."""

    thread: ThreadPoolExecutor
    held: int  # bytes of the state and a batch on one device
    mix: Any
    begin: Any
    finish: Any

    def __call__(self, state: Any, batch: Any, t: Any) -> tuple[Any, Any]:
        # The main thread starts all programs that communicate: XLA executes what one thread starts
        # in that order, so each finds its counterpart in the other processes.
        inner, rest = _apart(state)
        begun = self.thread.submit(self.begin, inner, rest, batch, t)
        mixed = self.mix(state.params, state.opt_state.count)
        model_state, opt_state, kept = begun.result()
        state = state._replace(model_state=model_state, opt_state=opt_state)
        return self.finish(state, kept, mixed, t)

    def memory_analysis(self) -> SimpleNamespace:
        """Bytes on one device, under the names that jax's own analysis has for them."""
        mix, begin, finish = (part.memory_analysis() for part in self[2:])
        new = [x.output_size_in_bytes - x.alias_size_in_bytes for x in (mix, begin, finish)]
        first = mix.temp_size_in_bytes + begin.temp_size_in_bytes
        last = new[2] + finish.temp_size_in_bytes
        return SimpleNamespace(
            argument_size_in_bytes=self.held,
            temp_size_in_bytes=new[0] + new[1] + max(first, last),
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
        )
