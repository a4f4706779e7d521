"""The version of the installed torch, for tests of what some versions lack."""

import torch

# Major and minor version.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
