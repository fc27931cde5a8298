"""Recursions of the methods of 2025 and 2026, in NumPy float64; see `oracles` for their form."""

import ml_dtypes
import numpy as np
from oracles import mix


def noloco(x, outer_lr=0.7, momentum=0.5):
    """NoLoCo (2025), both of its messages: the neighbours' mean movement and their mean phi.

    m+ = momentum m + b W (x - phi) + b (W phi - phi); phi+ = phi + m+; x+ = phi+.
    """
    phi, m = x, np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        x = x - lr * g
        if W is not None:
            pull = mix(W, phi) - phi
            m = momentum * m + outer_lr * mix(W, x - phi) + outer_lr * pull
            x = phi = phi + m


def noloco_of_peers(x, pairs, moved, outer_lr=0.7, momentum=0.5):
    """NoLoCo between peers, which average one pair after the other with earlier snapshots S.

    After its local steps (``moved[t]`` of both) peer i, averaging with j, has m+ = momentum m + b
    ((S_i + S_j) / 2 - phi), phi+ = phi + m+, x+ = x + phi+ - S_i, S_i+ = x+.
    """
    x, S, phi, m = x.copy(), x.copy(), x.copy(), np.zeros_like(x)
    for pair, change in zip(pairs, moved, strict=True):
        pair = list(pair)
        x[pair] += change
        pull = S[pair].mean(0) - phi[pair]
        m[pair] = momentum * m[pair] + outer_lr * pull
        phi[pair] += m[pair]
        x[pair] += phi[pair] - S[pair]
        S[pair] = x[pair]
    return x


def sparseloco(x, compress, decay=0.95):
    """SparseLoCo (2025): e = b e + theta - x; q = C(e); e = e - q; theta = theta - mean q."""
    assert np.all(x == x[0]), "replicas exchange movements only"
    theta, e = x[0], np.zeros_like(x)
    while True:
        g, W, lr, _ = yield x
        x = x - lr * g
        if W is not None:
            e = decay * e + theta - x
            q = np.stack([compress(row) for row in e])
            e = e - q
            theta = theta - q.mean(0)
            x = np.tile(theta, (len(x), 1))


def largest_of_chunks(width, kept):
    """The ``kept`` largest of every ``width`` numbers, each as its sign times one of two means."""

    def of_chunk(chunk):
        out = np.zeros_like(chunk)
        places = np.argsort(-np.abs(chunk), kind="stable")[:kept]
        size = np.abs(chunk[places])
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
