"""An example engine: small and readable, but with everything that makes KV caches break, and the canary in its step."""

from __future__ import annotations

from jax_kvcanary.serving.config import EngineConfig, LlamaConfig
from jax_kvcanary.serving.engine import Engine, Result, StepResult, make_canary
from jax_kvcanary.serving.model import dense_logits, make_pool, pool_shapes
from jax_kvcanary.serving.sampling import SamplingParams
from jax_kvcanary.serving.traffic import Traffic, TrafficConfig, drive
from jax_kvcanary.serving.weights import load_gguf, load_smollm2, random_params

__all__ = [
    "Engine",
    "EngineConfig",
    "LlamaConfig",
    "Result",
    "SamplingParams",
    "StepResult",
    "Traffic",
    "TrafficConfig",
    "dense_logits",
    "drive",
    "load_gguf",
    "load_smollm2",
    "make_canary",
    "make_pool",
    "pool_shapes",
    "random_params",
]
