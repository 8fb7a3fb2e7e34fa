"""``p2pdiloco completion``: Print what has a shell complete commands, options and their choices. It is static: made
from the command line's own definition, so that completing starts no Python. After an update, print it again."""

from __future__ import annotations

import argparse
from typing import Any

from p2pdiloco.cli.arguments import COMMANDS, add_common_arguments

PROGRAM = """_p2pdiloco() {{
    local now="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{choices}
            *) case "${{COMP_WORDS[1]}}" in
{options}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$now"))
}}
complete -o default -F _p2pdiloco p2pdiloco
"""


async def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    if arguments.shell == "zsh":
        print("autoload -Uz bashcompinit && bashcompinit")
    print(script())
    return 0


def script() -> str:
    """For bash, and for zsh's bashcompinit."""
    options, choices = [], []
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        add_common_arguments(parser, is_quiet=command.is_quiet)
        actions: list[Any] = parser._actions
        words = [option for action in actions for option in action.option_strings]
        words += [str(word) for action in actions if not action.option_strings for word in action.choices or ()]
        options.append(f'                {name}) words="{" ".join(words)}" ;;')
        for action in actions:
            if action.option_strings and action.choices:
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
                choices.append(f'            {patterns}) words="{" ".join(map(str, action.choices))}" ;;')
    return PROGRAM.format(commands=" ".join(COMMANDS), choices="\n".join(choices), options="\n".join(options)).rstrip()
