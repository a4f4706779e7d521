"""torchrun's side: the rendezvous, traced."""

from tracedstore.rendezvous.backend import TracedRendezvousBackend
from tracedstore.rendezvous.handlers import TracedRendezvousHandler

__all__ = ["TracedRendezvousBackend", "TracedRendezvousHandler"]
