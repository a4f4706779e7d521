"""Traced rendezvous backends and handlers for torchrun."""

from tracedstore.rendezvous.backend import TracedRendezvousBackend
from tracedstore.rendezvous.handlers import TracedRendezvousHandler

__all__ = ["TracedRendezvousBackend", "TracedRendezvousHandler"]
