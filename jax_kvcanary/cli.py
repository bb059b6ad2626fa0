"""The command line: ``python -m jax_kvcanary doctor | demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jax_kvcanary import demo, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary", description="KV canary for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print versions, modules, targets, devices, and what is missing")
    commands.add_parser("demo", help="stamp a small paged pool, corrupt it in several ways, and print what verify says")
    arguments = parser.parse_args(argv)
    return {"doctor": doctor.main, "demo": demo.main}[arguments.command]()
