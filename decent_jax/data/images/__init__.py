"""Images: sources, decoding, crops."""

from decent_jax.ground import extras

extras.need("images", "cv2", "PIL", "simplejpeg")
