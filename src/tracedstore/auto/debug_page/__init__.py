"""A page for torch's debug server: the Store calls and barriers of all ranks.

from torch.distributed.debug import start_debug_server
from tracedstore.auto import debug_page

start_debug_server(**debug_page.add())
"""

from tracedstore.auto.debug_page.install import add

__all__ = ["add"]
