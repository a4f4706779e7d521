"""The environment of a suite that forks ranks; imported before torch is."""

import os

# No thread may run in a process that forks ranks.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
# torch resolves the address of every connection to a name, which may take seconds.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# torch's C++ warns of each connection without a host name, and blocks in a full pipe.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
