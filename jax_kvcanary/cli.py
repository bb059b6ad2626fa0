"""The command line: ``python -m jax_kvcanary COMMAND``; each command is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": ("doctor", "print versions, modules, targets, devices, and what is missing"),
    "tour": ("tour", "stamp a small paged pool, corrupt it in several ways, and print what verify says"),
    "inspect": ("inspection", "say what the canary costs in a compiled step, and what to change"),
    "explain": ("explain", "read a dump: what was expected, what was found, who wrote it, the likely cause, what to look at first"),
    "demo": ("serving.demo", "serve a few chats with the canary on, then plant one fault after the other"),
    "soak": ("serving.soak", "serve random traffic for thousands of steps, with or without planted faults"),
}
"""Name: module with a ``main(argv)``, what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    listed = "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m jax_kvcanary",
        description="KV canary for JAX.",
        epilog=f"commands:\n{listed}\n\nCOMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    options = parser.parse_args(argv)
    try:
        return importlib.import_module(f"jax_kvcanary.{COMMANDS[options.command][0]}").main(options.arguments)
    except ImportError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
