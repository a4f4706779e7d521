"""Write a script that makes your shell complete commands, options and file names.

Run one of these commands once; the shell then reads the script at every start.

Examples:
  echo 'eval "$(tracedstore completion bash)"' >> ~/.bashrc
  echo 'eval "$(tracedstore completion zsh)"' >> ~/.zshrc    (below compinit)
  echo 'tracedstore completion fish | source' >> ~/.config/fish/config.fish

Exit codes: 0 written, 64 invalid command line
"""

import argparse
import sys

import shtab

from tracedstore.tools.cli.main import make_parser

# tracedstore-run is followed by another command.
_RUN = {
    "bash": "complete -o filenames -A file -A command tracedstore-run",
    "zsh": "compdef _precommand tracedstore-run",
    "fish": "complete -c tracedstore-run -x -a '(__fish_complete_subcommand)'",
}
_FILES = {"FILE": shtab.FILE, "LOG": shtab.FILE, "DIR": shtab.DIRECTORY}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=[*_RUN], help="your shell")


def run(arguments: argparse.Namespace) -> int:
    """Write the script to standard output."""
    parser = make_parser()
    for command in _commands(parser):
        for action in command._actions:  # noqa: SLF001 - argparse has no public list
            if action.metavar in _FILES:
                action.complete = _FILES[action.metavar]  # type: ignore[attr-defined]
    shell: str = arguments.shell
    sys.stdout.write(f"{shtab.complete(parser, shell)}\n{_RUN[shell]}\n")
    return 0


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    (commands,) = (
        action
        for action in parser._actions  # noqa: SLF001 - argparse has no public list
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - its type
    )
    return list(commands.choices.values())
