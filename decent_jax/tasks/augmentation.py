"""Transformations of a batch of images on the device: normalization, augmentation, views."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.models import resnet


def normalize(images: Any) -> Any:
    """Normalizes uint8 ``(B, H, W, 3)`` to float32 with ImageNet's mean and standard deviation.

    NumPy arrays give NumPy arrays.
    """
    mean, std = (np.array(x, np.float32).reshape(1, 1, 1, 3) for x in (resnet.MEAN, resnet.STD))
    return (images.astype(jnp.float32) / 255 - mean) / std


def augment(
    key: jax.Array, images: jax.Array, *, flip: bool, shift: int, border: str = "zeros"
) -> jax.Array:
    """Mirrors and shifts images at random.

    Args:
      key: PRNG key for the random choices.
      images: ``(B, H, W, C)`` floats, normalized.
      flip: whether to mirror each image with probability 1/2.
      shift: the largest shift along each axis, in pixels.
      border: the pixels that fill the gap: ``"zeros"``, or ``"reflect"`` for the mirror image of
        the pixels at the border.

    Returns:
      The images, with the same shape and dtype.
    """
    flip_key, shift_key = jax.random.split(key)
    count, *shape = images.shape
    if flip:
        mirrored = jax.random.bernoulli(flip_key, 0.5, (count, 1, 1, 1))
        images = jnp.where(mirrored, images[:, :, ::-1], images)
    if shift:
        corners = jax.random.randint(shift_key, (count, 2), 0, 2 * shift + 1)
        sides = ((0, 0), (shift, shift), (shift, shift), (0, 0))
        padded = jnp.pad(images, sides, mode="reflect" if border == "reflect" else "constant")
        images = jax.vmap(
            lambda image, corner: jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), shape)
        )(padded, corners)
    return images


def logits_of_views(logits_of: Callable, images: Any) -> Any:
    """Mean logits ``(B, K)`` of six views: an image and its mirror image, unshifted and shifted.

    The shifts are by one pixel in two directions; the unshifted views have half of the weight
    (Jordan, 2024).

    Args:
      logits_of: a function from ``(B, H, W, C)`` to ``(B, K)``.
      images: ``(B, H, W, C)`` floats, normalized.
    """
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")

    def of_pair(corner):
        moved = padded[:, corner : corner + height, corner : corner + width]
        return logits_of(moved) + logits_of(moved[:, :, ::-1])

    return (2 * of_pair(1) + of_pair(0) + of_pair(2)) / 8
