"""What a command says when it cannot do what it was asked to."""


class CommandError(Exception):
    """Something that cannot be done, in one sentence that says what to do."""
