"""Zero code: what switches itself on inside torch's own tools."""
