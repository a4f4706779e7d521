"""What the demo says when it cannot be shown."""


class DemoError(Exception):
    """Something that cannot be done, in one sentence that says what to do."""
