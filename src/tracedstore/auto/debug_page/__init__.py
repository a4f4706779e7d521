"""A page of torch's debug server: what every rank is blocked in, and who is missing.

from torch.distributed.debug import start_debug_server
from tracedstore.auto import debug_page

start_debug_server(**debug_page.add())
"""

from tracedstore.auto.debug_page.install import add

__all__ = ["add"]
