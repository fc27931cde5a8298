"""Actors in this process, for tests without Ray; see `decent_jax.actors.handles`."""

from decent_jax.actors.handles import Lost, Silent, Unanswered


class Pending(Exception):
    """Raised by a method that has not returned yet; it is called again when somebody asks."""


class LocalCall:
    """A call, made at once."""

    def __init__(self, method, args):
        self._method, self._args = method, args
        self._value = self._error = None
        self._is_over = False
        self.is_over()

    def is_over(self):
        """Whether it has returned, or failed."""
        if not self._is_over:
            try:
                self._value = self._method(*self._args)
            except Pending:
                return False
            except Unanswered as error:
                self._error = error
            except Exception as error:
                self._error = Lost(error, killed=False)
            self._is_over = True
        return self._is_over

    def result(self, seconds=None):
        if not self.is_over():
            assert seconds is not None, "this would wait for ever"
            raise Silent("gives no answer")
        if self._error is not None:
            raise self._error
        return self._value


class LocalActor:
    """An actor whose methods are those of the object ``there``; ``options``: how it was started."""

    def __init__(self, there, options):
        self.there, self.options, self.killed = there, options, False

    def call(self, method, *args):
        return LocalCall(getattr(self.there, method), args)

    def kill(self):
        self.killed = True


class LocalActors:
    """Starts them; instead of a class it may use another one: ``{class: another}``.

    ``wait(seconds)`` is called where nothing ends.
    """

    def __init__(self, instead=(), nodes=(), wait=lambda seconds: None):
        self._instead, self._nodes, self._wait = dict(instead), list(nodes), wait
        self.started = []

    def start(self, kind, *args, **options):
        self.started.append(LocalActor(self._instead.get(kind, kind)(*args), options))
        return self.started[-1]

    def ended(self, calls, seconds, count=1):
        over = [key for key, call in calls.items() if call.is_over()]
        if not over:
            self._wait(seconds)
        return over

    def nodes(self):
        return self._nodes
