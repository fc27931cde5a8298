"""Recursions of the methods of 2025 and 2026, in NumPy float64; see `oracles` for their form."""

import ml_dtypes
import numpy as np
from oracles import mix


def noloco(x, outer_lr=0.7, momentum=0.5, buffer=0):
    """NoLoCo (2025), both of its messages: the neighbours' mean movement and their mean phi.

    m+ = momentum m + b W (x - phi) + b (W phi - phi); phi+ = phi + m+; x+ = phi+. With a buffer
    phi moves by `delayed_nesterov`.
    """
    phi, m = x, np.zeros_like(x)
    delayed = delayed_nesterov(outer_lr, momentum, buffer)
    while True:
        g, W, lr, _ = yield x
        x = x - lr * g
        if W is not None:
            pull = mix(W, phi) - phi
            if buffer:
                x = phi = phi + delayed(-mix(W, x - phi) - pull)
                continue
            m = momentum * m + outer_lr * mix(W, x - phi) + outer_lr * pull
            x = phi = phi + m


def delayed_nesterov(eta, mu, buffer):
    """Delayed Nesterov (Liu et al. 2024), c = 0: from one gradient after the other to the step."""
    waiting, m = [], 0.0

    def step(g):
        nonlocal m
        waiting.append(g)
        if len(waiting) < buffer:
            return -eta * g / buffer
        m = mu * m + sum(waiting) / buffer
        waiting.clear()
        return -eta * (mu * m + g / buffer)

    return step


def noloco_of_peers(x, meetings, moved, outer_lr=0.7, momentum=0.5, buffer=0):
    """NoLoCo between peers, which meet one pair after the other with copies S of before.

    After its local steps (``moved[t]`` of both) peer i, met by j, has m+ = momentum m + b
    ((S_i + S_j) / 2 - phi), phi+ = phi + m+, x+ = x + phi+ - S_i, S_i+ = x+. With a buffer phi
    moves by a `delayed_nesterov` of its own.
    """
    x, S, phi, m = x.copy(), x.copy(), x.copy(), np.zeros_like(x)
    delayed = [delayed_nesterov(outer_lr, momentum, buffer) for _ in x]
    for both, change in zip(meetings, moved, strict=True):
        both = list(both)
        x[both] += change
        pull = S[both].mean(0) - phi[both]
        m[both] = momentum * m[both] + outer_lr * pull
        late = [delayed[k](-p) for k, p in zip(both, pull, strict=True)] if buffer else None
        phi[both] += m[both] if late is None else late
        x[both] += phi[both] - S[both]
        S[both] = x[both]
    return x


def gasloc(x, alpha=1.0, eta=0.7, gamma=0.5, delay=0, carry=False):
    """GASLoC (2026): y = theta + eta (x - theta); theta+ = y - alpha L y + gamma (y - y_before).

    With a delay x is that of so many steps before, ``carry`` adds the way from there to theta+.
    """
    theta = before = x
    past = [x]
    while True:
        g, W, lr, _ = yield x
        x = x - lr * g
        past.append(x)
        if W is not None:
            late = past[-1 - delay]
            y = theta + eta * (late - theta)
            theta = y - alpha * (y - mix(W, y)) + gamma * (y - before)
            before = y
            x = theta + (x - late if carry else 0)


def sparseloco(x, compress, decay=0.95, outer_lr=1.0, delay=0, carry=False, clipped=False):
    """SparseLoCo (2025): e = b e + theta - x; q = C(e); e = e - q; theta = theta - a mean q.

    ``delay`` and ``carry`` as in `gasloc`; ``clipped`` (Covenant-72B): each q_j is shortened to the
    median of all norms.
    """
    assert np.all(x == x[0]), "replicas exchange movements only"
    theta, e = x[0], np.zeros_like(x)
    past = [x]
    while True:
        g, W, lr, _ = yield x
        x = x - lr * g
        past.append(x)
        if W is not None:
            late = past[-1 - delay]
            e = decay * e + theta - late
            q = np.stack([compress(row) for row in e])
            e = e - q
            norms = np.linalg.norm(q, axis=1, keepdims=True)
            q = q * np.minimum(1, np.median(norms) / (norms + 1e-8)) if clipped else q
            theta = theta - outer_lr * q.mean(0)
            x = np.tile(theta, (len(x), 1)) + (x - late if carry else 0)


def largest_of_chunks(width, kept, bits):
    """The ``kept`` largest of every ``width`` numbers; in 2 bits: sign times one of two means."""

    def of_chunk(chunk):
        out = np.zeros_like(chunk)
        places = np.argsort(-np.abs(chunk), kind="stable")[:kept]
        size = np.abs(chunk[places])
        if bits == 2:
            large = size >= size.mean()
            for half in (large, ~large):
                if half.any():
                    mean = np.float32(size[half].mean()).astype(ml_dtypes.bfloat16)
                    size[half] = np.float64(mean)
        out[places] = np.where(chunk[places] < 0, -size, size)
        return out

    def compress(row):
        whole = np.pad(row, (0, -len(row) % width)).reshape(-1, width)
        return np.concatenate([of_chunk(chunk) for chunk in whole])[: len(row)]

    return compress


def sparta(x, places):
    """SPARTA: x+ = x - lr g, of which only the coordinates ``places(t)`` are mixed."""
    while True:
        g, W, lr, t = yield x
        x = x - lr * g
        if W is not None:
            now = places(t)
            x[:, now] = mix(W, x)[:, now]


def sparta_diloco(x, places, outer_every, outer_lr=0.7, momentum=0.9):
    """SPARTA in every round, and in every ``outer_every``-th DiLoCo's Nesterov step after it."""
    theta, m, rounds = x[0], 0.0, 0
    while True:
        g, W, lr, t = yield x
        x = x - lr * g
        if W is None:
            continue
        rounds += 1
        now = places(t)
        x[:, now] = x[:, now].mean(0)
        if rounds % outer_every == 0:
            delta = theta - x.mean(0)
            m = momentum * m + delta
            theta = theta - outer_lr * (delta + momentum * m)
            x = np.tile(theta, (len(x), 1))


def cosines(n):
    """The orthonormal cosine transform of type II: a wave in each row."""
    k, i = np.ogrid[:n, :n]
    waves = np.sqrt(2 / n) * np.cos(np.pi * k * (2 * i + 1) / (2 * n))
    return waves / np.where(k == 0, np.sqrt(2), 1)


def demo(x, shape, sides, kept, decay=0.999, weight_decay=0.0):
    """DeMo (2024), chunk by chunk: d = b d + lr g; q = the largest of F d; d = d - F' q;
    x = (1 - lr l) x - lr sign(F' mean q), each number the mean of those who sent it.
    """
    (rows, columns), (a, b) = shape, sides
    A, B = cosines(a), cosines(b)
    d = np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        d = decay * d + lr * g
        if W is None:
            continue
        left, x = d.reshape(-1, rows, columns), (1 - lr * weight_decay) * x
        moved = np.zeros_like(left[0])
        for y in range(0, rows, a):
            for z in range(0, columns, b):
                at = slice(None), slice(y, y + a), slice(z, z + b)
                q = A @ left[at] @ B.T
                for one in q.reshape(len(q), -1):
                    one[np.argsort(-np.abs(one))[kept:]] = 0
                left[at] -= A.T @ q @ B
                mean = q.sum(0) / np.maximum((q != 0).sum(0), 1)
                moved[at[1:]] = A.T @ mean @ B
        x = x - lr * np.sign(moved).reshape(-1)


def msgn(V):
    """U V' of the thin singular value decompositions of (n, a, b)."""
    u, _, vt = np.linalg.svd(V, full_matrices=False)
    return u @ vt


def demuon(x, shape, keep=0.9):
    """DeMuon (2025): M+ = keep M + (1 - keep) g; V+ = W (V + M+ - M); X+ = W (X - lr msgn(V+))."""
    M, V = np.zeros_like(x), np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        before, M = M, keep * M + (1 - keep) * g
        V = mix(W, V + M - before)
        x = mix(W, x - lr * msgn(V.reshape(-1, *shape)).reshape(x.shape))
