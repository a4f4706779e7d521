"""The whole job on one screen: ``tracedstore top``."""
