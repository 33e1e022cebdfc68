"""The demo's model: a small decoder-only transformer over bytes, trained with AdamW.

The state is a plain dict ``{"params", "opt_state", "key"}``. Every array is sharded over ``fsdp``
inside a slice where a dimension divides, and replicated over ``slice``; XLA's partitioner inserts
the all-gathers and reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SLICE_AXIS = "slice"
FSDP_AXIS = "fsdp"
BATCH_SPEC = PartitionSpec((SLICE_AXIS, FSDP_AXIS))

State = dict[str, Any]
Params = Mapping[str, Any]
TrainStep = Callable[[State, jax.Array], tuple[State, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; the defaults give a state of 5.6 MiB with both Adam moments."""

    vocab_size: int = 256
    sequence_length: int = 64
    d_model: int = 128
    num_heads: int = 4
    num_layers: int = 2
    mlp_ratio: int = 4
    dropout_rate: float = 0.05
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2


def make_mesh(slice_count: int) -> Mesh:
    """Return the mesh ("slice", "fsdp") over all devices of the job, ordered by process index.

    Raises ValueError when the devices do not divide into ``slice_count`` slices.
    """
    devices = np.asarray(jax.devices())
    if devices.size % slice_count:
        raise ValueError(
            f"make mesh: {devices.size} devices do not divide into {slice_count} slices"
        )
    return Mesh(devices.reshape(slice_count, -1), (SLICE_AXIS, FSDP_AXIS))


def partition_spec(shape: tuple[int, ...], fsdp_size: int) -> PartitionSpec:
    """Return the spec of one array, whose largest divisible dimension is sharded over ``fsdp``.

    The first of equal dimensions is taken; an array without such a dimension is replicated.
    """
    divisible = [
        axis for axis, size in enumerate(shape) if size >= fsdp_size and size % fsdp_size == 0
    ]
    if not divisible:
        return PartitionSpec()
    chosen = max(divisible, key=lambda axis: (shape[axis], -axis))
    return PartitionSpec(*(FSDP_AXIS if axis == chosen else None for axis in range(chosen + 1)))


def _optimizer(config: ModelConfig) -> optax.GradientTransformation:
    return optax.adamw(config.learning_rate, b2=0.98, weight_decay=config.weight_decay)


def _matrix_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, int], float]]:
    """Return shape and initial standard deviation of every matrix, by path."""
    width, hidden = config.d_model, config.d_model * config.mlp_ratio
    shapes = {
        "embedding": ((config.vocab_size, width), 0.02),
        "position": ((config.sequence_length, width), 0.02),
    }
    for index in range(config.num_layers):
        shapes |= {
            f"layer_{index}/qkv": ((width, 3 * width), width**-0.5),
            f"layer_{index}/attention_out": ((width, width), width**-0.5),
            f"layer_{index}/mlp_in": ((width, hidden), width**-0.5),
            f"layer_{index}/mlp_out": ((hidden, width), hidden**-0.5),
        }
    return shapes


def _init_params(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
    shapes = _matrix_shapes(config)
    # One draw, divided, because a draw for each matrix takes seconds to compile.
    noise = jax.random.normal(key, (sum(rows * columns for (rows, columns), _ in shapes.values()),))
    params: dict[str, Any] = {"final_norm": jnp.ones(config.d_model)}
    for index in range(config.num_layers):
        ones = jnp.ones(config.d_model)
        params[f"layer_{index}"] = {"attention_norm": ones, "mlp_norm": ones}
    offset = 0
    for path, ((rows, columns), deviation) in shapes.items():
        matrix = noise[offset : offset + rows * columns].reshape(rows, columns) * deviation
        offset += rows * columns
        layer, _, name = path.rpartition("/")
        (params[layer] if layer else params)[name] = matrix
    return params


def _new_state(config: ModelConfig, seed: int) -> State:
    init_key, train_key = jax.random.split(jax.random.key(seed))
    params = _init_params(config, init_key)
    return {"params": params, "opt_state": _optimizer(config).init(params), "key": train_key}


def abstract_state(config: ModelConfig, mesh: Mesh) -> State:
    """Return the state as ``jax.ShapeDtypeStruct`` leaves that carry their shardings."""
    fsdp_size = mesh.shape[FSDP_AXIS]

    def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, partition_spec(leaf.shape, fsdp_size))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, jax.eval_shape(lambda: _new_state(config, 0)))


def _shardings(config: ModelConfig, mesh: Mesh) -> Any:
    def sharding_of(leaf: jax.ShapeDtypeStruct) -> Any:
        return leaf.sharding

    return jax.tree.map(sharding_of, abstract_state(config, mesh))


def init_state(config: ModelConfig, mesh: Mesh, seed: int) -> State:
    """Return a fresh state on the devices. Collective; the same ``seed`` gives the same bits."""
    build = jax.jit(lambda: _new_state(config, seed), out_shardings=_shardings(config, mesh))
    return build()


def _rms_norm(activations: jax.Array, scale: jax.Array) -> jax.Array:
    return activations * jax.lax.rsqrt(jnp.mean(activations**2, -1, keepdims=True) + 1e-6) * scale


def _attention(config: ModelConfig, layer: Params, activations: jax.Array) -> jax.Array:
    batch, length, width = activations.shape
    heads = config.num_heads
    qkv = (activations @ layer["qkv"]).reshape(batch, length, 3, heads, width // heads)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)
    return mixed @ layer["attention_out"]


def _logits(config: ModelConfig, params: Params, tokens: jax.Array, key: jax.Array) -> jax.Array:
    activations = params["embedding"][tokens] + params["position"]
    keep = jax.random.bernoulli(key, 1 - config.dropout_rate, activations.shape)
    activations = jnp.where(keep, activations / (1 - config.dropout_rate), 0.0)
    for index in range(config.num_layers):
        layer = params[f"layer_{index}"]
        normed = _rms_norm(activations, layer["attention_norm"])
        activations = activations + _attention(config, layer, normed)
        normed = _rms_norm(activations, layer["mlp_norm"])
        activations = activations + jax.nn.gelu(normed @ layer["mlp_in"]) @ layer["mlp_out"]
    return _rms_norm(activations, params["final_norm"]) @ params["embedding"].T


def _loss(config: ModelConfig, params: Params, batch: jax.Array, key: jax.Array) -> jax.Array:
    tokens = batch.astype(jnp.int32)
    logits = _logits(config, params, tokens[:, :-1], key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def compile_train_step(config: ModelConfig, mesh: Mesh, sequences: int) -> TrainStep:
    """Return the step ``(state, batch) -> (state, loss)``, compiled. Not collective.

    Calling it is collective; ``state`` is donated. ``batch`` is uint8 of shape (sequences,
    sequence_length + 1), sharded over both mesh axes. The loss is the mean cross entropy in nats
    per byte, replicated.
    """
    optimizer = _optimizer(config)
    whole = NamedSharding(mesh, PartitionSpec())

    def loss_of(params: Params, batch: jax.Array, key: jax.Array) -> jax.Array:
        # Gathered once, so that the rest is pure data parallelism. Otherwise the partitioner may
        # split single matmuls over fsdp, with a collective for each.
        return _loss(config, jax.lax.with_sharding_constraint(params, whole), batch, key)

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        key, dropout_key = jax.random.split(state["key"])
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, dropout_key)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, loss

    state = abstract_state(config, mesh)
    batch = jax.ShapeDtypeStruct(
        (sequences, config.sequence_length + 1),
        jnp.uint8,
        sharding=NamedSharding(mesh, BATCH_SPEC),
    )
    out_shardings = (_shardings(config, mesh), whole)
    return (
        jax.jit(step, out_shardings=out_shardings, donate_argnums=0).lower(state, batch).compile()
    )


def global_batch(mesh: Mesh, local: npt.NDArray[np.uint8]) -> jax.Array:
    """Return the global batch; ``local`` is this process's part. Every process must call it."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH_SPEC), local)
