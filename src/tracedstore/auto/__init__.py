"""Zero-code tracing: patches torch so that the stores it creates are traced."""
