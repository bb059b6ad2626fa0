"""Entry point of ``python -m jax_kvcanary``."""

from jax_kvcanary.cli import main

raise SystemExit(main())
