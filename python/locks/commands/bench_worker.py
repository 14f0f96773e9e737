"""What `locks bench` does in a worker: to its dummy weights, and to the length up to which LOCKS reads whole."""

from __future__ import annotations

import math

from locks_vllm.worker import LocksWorkerExtension


class BenchWorker(LocksWorkerExtension):
    """Mixed into vLLM's worker."""

    def locks_set_dense_tokens(self, tokens: int) -> None:
        """Contexts of at most so many tokens are read whole from the next step on."""
        for layer in self._locks_layers().values():
            # Layers of a GPU; it is read when a step is planned.
            layer.state.dense_tokens = tokens  # type: ignore[union-attr]

    def locks_spread_logits(self, spread: float) -> int:
        """Scales queries so that their logits with keys of unit variance have this standard deviation.

        vLLM's dummy weights are so small that all logits are alike, and of equal pages a selector may have more, or
        less, to do than of any that a model has. Returns how many layers were scaled.
        """
        layers = self.get_model().model.layers  # type: ignore[attr-defined]
        for layer in layers:
            layer.input_layernorm.weight.data.fill_(1)
            queries = layer.self_attn.qkv_proj.weight.data[: layer.self_attn.q_size]
            # Inputs of unit variance, `hidden` of them: the queries have this deviation now.
            queries *= spread / (float(queries.float().std()) * math.sqrt(queries.shape[1]))
        return len(layers)
