"""The decentralized algorithms in NumPy float64, written from their definitions.

Nothing here imports jax or the library. A method is a generator: it yields the parameters x, one
row a replica, and receives one step's (g, W, lr, t): the gradients at the x it yielded, the receive
matrix or None where the step does not communicate, the learning rate and the 0-based step.

>>> p = quadratic()
>>> history = run("dpsgd", lambda t: p.ring, p.grad, np.zeros((8, 1)), 2, 0.1)
>>> history.shape, round(float(history[1, 0, 0]), 8)
((2, 8, 1), 0.45454861)
"""

from typing import NamedTuple

import numpy as np


def run(method, matrices, grad, x0, steps, lr, **numbers):
    """The parameters after every step, float64 (steps, n, d).

    ``matrices(t)`` is the receive matrix of the 0-based step t (row i is what replica i takes), or
    None where the step does not communicate. ``grad(x, t)`` is (n, d), row i the gradient of
    replica i at x_i. ``lr`` is a float or a function of the step. ``numbers`` belong to the method,
    a name of `METHODS` or a generator like those.
    """
    replicas = (METHODS[method] if isinstance(method, str) else method)(
        np.array(x0, np.float64), **numbers
    )
    x = next(replicas)
    history = np.empty((steps, *x.shape))
    for t in range(steps):
        g = np.asarray(grad(x.copy(), t), np.float64)
        x = history[t] = replicas.send((g, matrices(t), at(lr, t), t))
    return history


def at(number, t):
    """A number, or its value at step t where it is a function."""
    return number(t) if callable(number) else number


def mix(W, x):
    """x_i <- sum_j W_ij x_j; x itself where nothing is sent."""
    return x if W is None else np.asarray(W, np.float64) @ x


def _combine(W, x, update, combine):
    """W x - update ("awc") or W (x - update) ("atc")."""
    if combine == "awc":
        return mix(W, x) - update
    return mix(W, x - update)


# The matrices of schedules.


def average(n):
    """J, the exact average of n replicas."""
    return np.full((n, n), 1 / n)


def ring(n):
    """The bidirectional ring of n >= 3: 1/3 each from itself and both neighbours."""
    eye = np.eye(n)
    return (eye + np.roll(eye, 1, 0) + np.roll(eye, -1, 0)) / 3


def cycle(rounds):
    """The matrices of a list of rounds, again and again."""
    return lambda t: rounds[t % len(rounds)]


def pairs(n, *chosen):
    """Both of every chosen pair take their average; the others keep what they have."""
    W = np.eye(n)
    for i, j in chosen:
        W[np.ix_([i, j], [i, j])] = 1 / 2
    return W


def one_peer_exp(n):
    """One-peer exponential graphs: x_i <- (x_i + x_(i - 2^r)) / 2, r = 0, 1, ... in turn."""
    eye = np.eye(n)
    return cycle([(eye + np.roll(eye, 2**r, 0)) / 2 for r in range(max(1, (n - 1).bit_length()))])


def hypercube(n):
    """i averages with i XOR 2^r, r = 0, 1, ... in turn; n >= 2 is a power of two."""
    shifts = [2**r for r in range((n - 1).bit_length())]
    return cycle([pairs(n, *((i, i ^ s) for i in range(n) if i < i ^ s)) for s in shifts])


# Gossip of parameters.


def dpsgd(x, combine="atc", gamma=1.0):
    """D-PSGD (Lian et al. 2017).

    With M_t = (1 - gamma) I + gamma W_t: x+ = M x - lr g ("awc") or x+ = M (x - lr g) ("atc").
    Local SGD is this with J every H steps and nothing between, Gossip-PGA with W between.
    """
    while True:
        g, W, lr, t = yield x
        if W is not None:
            W = (1 - at(gamma, t)) * np.eye(len(x)) + at(gamma, t) * np.asarray(W)
        x = _combine(W, x, lr * g, combine)


def dmsgd(x, momentum=0.9, combine="atc"):
    """Local heavy-ball momentum: m+ = b m + g; x+ = W (x - lr m+) or W x - lr m+."""
    m = np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        m = momentum * m + g
        x = _combine(W, x, lr * m, combine)


def gossiped_momentum(x, momentum=0.9, combine="atc"):
    """Momentum is mixed too: u = b m + g, m+ = W u, x+ = W (x - lr u) ("atc"); or m+ = b W m + g,
    x+ = W x - lr m+ ("awc").
    """
    m = np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        if combine == "awc":
            m = momentum * mix(W, m) + g
            x = mix(W, x) - lr * m
        else:
            direction = momentum * m + g
            m = mix(W, direction)
            x = mix(W, x - lr * direction)


def quasi_global_sgd(x, momentum=0.9):
    """Quasi-global momentum (Lin et al. 2021) without Nesterov.

    d = b m + g; x+ = W (x - lr d); m+ = b m + (1 - b) (x - x+) / lr. The released code
    (epfml/quasi-global-momentum) is this, its ``factor`` being 1 - b = 0.1 unless set.
    """
    m = np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        old = x
        x = mix(W, x - lr * (momentum * m + g))
        m = momentum * m + (1 - momentum) * (old - x) / lr


# Corrections of the bias that different data leave.


def exact_diffusion(x):
    """Exact diffusion (Yuan et al. 2019), Wbar = (I + W) / 2.

    psi+ = x - lr g; phi = psi+ + x - psi; x+ = Wbar phi; at first psi = x.
    """
    psi = x
    while True:
        g, W, lr, _ = yield x
        old, psi = psi, x - lr * g
        phi = psi + x - old
        x = (phi + mix(W, phi)) / 2


def d2(x):
    """D2 (Tang et al. 2018): x_1 = W (x_0 - lr g_0), then
    x_{t+1} = W (2 x_t - x_{t-1} - lr g_t + lr g_{t-1}).

    The published rate is constant. Where it varies, every gradient keeps the rate of its own step,
    lr_t g_t - lr_{t-1} g_{t-1}, as in exact diffusion.
    """
    g, W, lr, _ = yield x
    before, moved = x, lr * g
    x = mix(W, x - moved)
    while True:
        g, W, lr, _ = yield x
        after = mix(W, 2 * x - before - lr * g + moved)
        before, moved, x = x, lr * g, after


def gradient_tracking(x, combine="awc"):
    """Gradient tracking (after DIGing, Nedic et al. 2017), q following the mean of g.

    "awc": q_t = W_t q_{t-1} + g_t - g_{t-1}; x+ = W_t x - lr q_t. (DIGing mixes q_{t-1} by
    W_{t-1}, which is the same where W is fixed.)
    "atc": q_t = W_t (q_{t-1} + g_t - g_{t-1}); x+ = W_t (x - lr q_t).
    """
    q, before = np.zeros_like(x), np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        q = mix(W, q) + g - before if combine == "awc" else mix(W, q + g - before)
        x = _combine(W, x, lr * q, combine)
        before = g


def push_sum(x):
    """Stochastic gradient push (Assran et al. 2019), W column-stochastic; yields z = x / w.

    x+ = W (x - lr g(z)); w+ = W w, w = 1 at first; z = x / w.
    """
    w = np.ones((len(x), 1))
    z = x
    while True:
        g, W, lr, _ = yield z
        x, w = mix(W, x - lr * g), mix(W, w)
        z = x / w


# Seldom or compressed communication.


def diloco(
    x,
    sync_every,
    fragments=None,
    delay=0,
    outer_lr=1.0,
    outer_momentum=0.0,
    nesterov=False,
    record=None,
    carry=False,
):
    """DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025) over SGD; ignores the matrices.

    Fragment f of F (a list of coordinates; all of them unless given) is synced when the count c of
    finished steps has (c - (f + 1) sync_every // F) % sync_every == 0. With X the global parameters
    and x_i[c] those of replica i after inner step c, before that step's sync:
    p = X - mean_i x_i[c - delay]; v+ = outer_momentum v + p;
    X+ = X - outer_lr v+, or with Nesterov X - outer_lr (p + outer_momentum v+);
    x_i = X+, or with carry (LOSCAR) X+ + x_i[c] - x_i[c - delay]. Replicas must start equal.
    ``record``, a list, receives the X of all replicas after every step.
    """
    assert np.all(x == x[0]), "DiLoCo starts from equal replicas"
    fragments = [list(range(x.shape[1]))] if fragments is None else fragments
    assert 0 <= delay < sync_every // len(fragments)
    whole, v, past = x.copy(), np.zeros_like(x), [x]
    while True:
        g, _, lr, t = yield x
        x = x - lr * g
        past.append(x.copy())
        for f, part in enumerate(fragments):
            if (t + 1 - (f + 1) * sync_every // len(fragments)) % sync_every:
                continue
            late = past[t + 1 - delay][:, part]
            p = whole[:, part] - late.mean(0)
            v[:, part] = outer_momentum * v[:, part] + p
            whole[:, part] -= outer_lr * (
                p + outer_momentum * v[:, part] if nesterov else v[:, part]
            )
            kept = x[:, part] - late if carry else 0
            x[:, part] = whole[:, part] + kept
        if record is not None:
            record.append(whole.copy())


def choco(x, compress, gamma):
    """CHOCO-SGD (Koloskova et al. 2019); with g = 0 it is CHOCO-gossip.

    half = x - lr g; xhat += C(half - xhat), row by row; x+ = half + gamma (W xhat - xhat).
    xhat is 0 at first. A step without communication sends nothing: xhat stays and x+ = half.
    """
    xhat = np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        x = x - lr * g
        if W is not None:
            xhat = xhat + np.stack([compress(row) for row in x - xhat])
            x = x + gamma * (mix(W, xhat) - xhat)


def top(k):
    """The compressor that keeps the k coordinates largest in size, the first of equals."""

    def compress(row):
        kept = np.argsort(-np.abs(row), kind="stable")[:k]
        out = np.zeros_like(row)
        out[kept] = row[kept]
        return out

    return compress


# Adam.


def accum_adam(
    x,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    accum_steps=1,
    decoupled=True,
    combine="awc",
    record=None,
):
    """Decentralized (accumulated) Adam (Wang et al. 2025); accum_steps = 1 is Adam.

    At step t = 1, 2, ..., k = ceil(t / s), y = W x ("awc") or x ("atc"):
    L2: g <- g + wd y; AdamW: y <- (1 - lr wd) y; A <- A + g / s;
    mt = b1 m + (1 - b1) g; vt = b2 v + (1 - b2) g^2;
    y <- y - lr / (1 - b1^k) * mt / (sqrt(vt) / sqrt(1 - b2^k) + eps);
    x+ = y ("awc") or W y ("atc").
    At the end of a window, t % s == 0: m <- b1 m + (1 - b1) A; v <- b2 v + (1 - b2) A^2; A <- 0.
    Moments are never sent; wd may be one number a coordinate. The reference does not mix at its
    first step: let ``matrices(0)`` be None. ``record``, a list, receives each (m, v, A).
    """
    m, v, A = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    while True:
        g, W, lr, t = yield x
        k = -(-(t + 1) // accum_steps)
        y = mix(W, x) if combine == "awc" else x
        if decoupled:
            y = (1 - lr * weight_decay) * y
        else:
            g = g + weight_decay * y
        A = A + g / accum_steps
        mt = b1 * m + (1 - b1) * g
        vt = b2 * v + (1 - b2) * g**2
        y = y - lr / (1 - b1**k) * mt / (np.sqrt(vt) / np.sqrt(1 - b2**k) + eps)
        x = y if combine == "awc" else mix(W, y)
        if (t + 1) % accum_steps == 0:
            m = b1 * m + (1 - b1) * A
            v = b2 * v + (1 - b2) * A**2
            A = np.zeros_like(x)
        if record is not None:
            record.append((m, v, A))


METHODS = {
    one.__name__: one
    for one in (
        *(dpsgd, dmsgd, gossiped_momentum, quasi_global_sgd),
        *(exact_diffusion, d2, gradient_tracking, push_sum, diloco, choco, accum_adam),
    )
}


# A problem whose replicas disagree.


class Quadratic(NamedTuple):
    """f_i(x) = a_i |x - b_i|^2 / 2 of n replicas, a ring's matrix, the optimum of the average."""

    a: np.ndarray
    b: np.ndarray
    grad: object
    ring: np.ndarray
    optimum: float


def quadratic(n=8):
    """a_i = (i + 1) / n, b_i = i; for n = 8 the optimum of the average is 14/3."""
    a, b = np.arange(1, n + 1) / n, np.arange(n) * 1.0

    def grad(x, t):
        return a[:, None] * (x - b[:, None])

    return Quadratic(a, b, grad, ring(n), float(a @ b / a.sum()))


def assert_same(got, wanted, tolerance=1e-12):
    """Equal but for rounding: the sums are taken in another order."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)
