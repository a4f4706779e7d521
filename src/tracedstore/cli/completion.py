"""Write what makes a shell complete the commands, their options and file names.

A shell that reads it when it starts has it from then on.

Examples:
  echo 'eval "$(tracedstore completion bash)"' >> ~/.bashrc
  echo 'eval "$(tracedstore completion zsh)"' >> ~/.zshrc    (below compinit)
  echo 'tracedstore completion fish | source' >> ~/.config/fish/config.fish

Exit codes: 0 written, 64 the command line makes no sense
"""

import argparse
import sys

import shtab

from tracedstore.cli import main

# tracedstore-run takes another command.
_RUN = {
    "bash": "complete -o filenames -A file -A command tracedstore-run",
    "zsh": "compdef _precommand tracedstore-run",
    "fish": "complete -c tracedstore-run -x -a '(__fish_complete_subcommand)'",
}
_FILES = {"FILE": shtab.FILE, "LOG": shtab.FILE, "DIR": shtab.DIRECTORY}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    parser.add_argument("shell", choices=[*_RUN], help="which one")


def run(arguments: argparse.Namespace) -> int:
    """Write it."""
    whole = main.parser()
    for command in _commands(whole):
        for action in command._actions:  # noqa: SLF001 - nothing else lists them
            if action.metavar in _FILES:
                action.complete = _FILES[action.metavar]  # type: ignore[attr-defined]
    shell: str = arguments.shell
    sys.stdout.write(f"{shtab.complete(whole, shell)}\n{_RUN[shell]}\n")
    return 0


def _commands(whole: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    (commands,) = (
        action
        for action in whole._actions  # noqa: SLF001 - as above
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )
    return list(commands.choices.values())
