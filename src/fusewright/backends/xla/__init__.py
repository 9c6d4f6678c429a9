"""Backend `xla`: graphs run by XLA through jax. Without jax its import is an error that says what to install."""

from fusewright.backends.registry import required

required("backend 'xla'", {"jax": "jax"})
