"""Handles of Ray actors: start them, call them, and find out how they ended.

An `Unanswered` reports how an actor ended; Ray's own errors do not leave this module.
"""

import os
import signal
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decent_jax.actors import ray_cluster

K = TypeVar("K", bound=Hashable)


class Unanswered(Exception):
    """A call has no result; the message completes a sentence that begins with the actor's name."""


class Silent(Unanswered):
    """The actor has not answered in time or cannot be reached; it may still answer."""


class Lost(Unanswered):
    """The actor is gone, or the call has failed.

    Attributes:
      killed: whether the actor's process is gone.
      cause: the error that the method raised, or Ray's if the process is gone.
    """

    def __init__(self, cause: Exception, killed: bool):
        line = str(cause).partition("\n")[0]
        super().__init__("was killed" if killed else f"has failed ({type(cause).__name__}: {line})")
        self.killed, self.cause = killed, cause


class Node(NamedTuple):
    """A machine of the Ray cluster."""

    id: str
    names: tuple[str, ...]  # its Ray name and its host name; the first one for messages


class Call:
    """A pending call of an actor's method."""

    def __init__(self, reference: ray.ObjectRef):
        self.reference = reference

    def result(self, seconds: float | None = None) -> Any:
        """The result of the method.

        Raises:
          Silent: the method has not returned within ``seconds``.
          Lost: the method has failed, or the actor is gone.
        """
        try:
            return ray.get(self.reference, timeout=seconds)
        except (GetTimeoutError, ActorUnavailableError) as error:
            raise Silent(f"gives no answer ({type(error).__name__})") from None
        except RayError as error:
            cause: Exception = error.cause if isinstance(error, RayTaskError) else error
            raise Lost(cause, isinstance(error, RayActorError)) from None


class Actor:
    """A handle with which to call or kill an actor."""

    def __init__(self, handle: Any):
        self._handle = handle

    def call(self, method: str, *args: object) -> Call:
        """Start a call of a method; you need not ask for its result."""
        return Call(getattr(self._handle, method).remote(*args))

    def kill(self) -> None:
        """Kill the actor's process."""
        ray.kill(self._handle)


class Actors:
    """Starts actors, and waits for them; stateless."""

    def start(
        self,
        kind: type,
        *args: object,
        log: Path | None = None,
        sigterm: str = "",
        on: Node | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        memory: float = 0.0,
        threads: int = 1,
    ) -> Actor:
        """Start an actor ``kind(*args)``.

        Args:
          log: file for the actor's console output, see `decent_jax.actors.ray_cluster.enter`.
          sigterm: name of the actor's method to call on SIGTERM; empty: the actor ends.
          on: the actor's node; None: Ray spreads actors over all nodes.
          cpus: cores that Ray reserves for the actor.
          gpus: GPUs that Ray reserves for the actor, which sees no others.
          memory: bytes that Ray reserves for the actor.
          threads: number of threads in which Ray calls the actor's methods.
        """
        remote: Any = ray.remote(_in_process(kind, log, sigterm) if log else kind)
        where = NodeAffinitySchedulingStrategy(on.id, soft=False) if on else "SPREAD"
        options: dict[str, Any] = {"max_concurrency": threads} if threads > 1 else {}
        options |= {"memory": int(memory)} if memory else {}
        actor = remote.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where, **options)
        return Actor(actor.remote(*args))

    def ended(self, calls: Mapping[K, Call], seconds: float, count: int = 1) -> list[K]:
        """Wait until ``count`` calls have succeeded or failed; returns the keys of all that have.

        Args:
          seconds: the maximum time to wait.
        """
        if not calls:
            return []
        references = {call.reference: key for key, call in calls.items()}
        ray.wait(list(references), num_returns=count, timeout=seconds)
        # `ray.wait` returns at most ``count``, but more may have ended.
        done, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        return [references[reference] for reference in done]

    def nodes(self) -> list[Node]:
        """The machines of the cluster that are alive, ordered by name."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = [(node.get("NodeName"), node["NodeManagerHostname"]) for node in nodes]
        pairs = zip(nodes, names, strict=True)
        there = [Node(node["NodeID"], tuple(filter(None, known))) for node, known in pairs]
        return sorted(there, key=lambda node: node.names[0])


def own_host() -> str:
    """The IP address at which other machines of the Ray cluster reach this one."""
    return ray.util.get_node_ip_address()


def _in_process(kind: type, log: Path, sigterm: str) -> type:
    """The class ``kind`` for an actor whose process starts with `ray_cluster.enter`."""
    launched_from = os.getcwd()

    class Entered(kind):
        def __init__(self, *args: object):
            ray_cluster.enter(log, launched_from)
            super().__init__(*args)
            if sigterm:
                signal.signal(signal.SIGTERM, lambda *_: getattr(self, sigterm)())

    Entered.__name__ = Entered.__qualname__ = kind.__name__
    return Entered
