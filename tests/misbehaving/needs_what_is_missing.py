"""Cannot be imported."""

import nosuch_kernels  # noqa: F401
