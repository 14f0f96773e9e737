"""Teacher forcing in unmodified vLLM: a request names its answer, and its log probabilities are what is asked.

A logits processor of vLLM (`LLM(..., logits_processors=[ForcedTokens])`). The tokens come through decode steps like
any others, so that each is predicted from what those steps read. vLLM takes log probabilities before processors.
"""

from __future__ import annotations

import math

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

ARGUMENT = "locks_forced_tokens"  # in SamplingParams.extra_args


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves each request the one token that it names for the place."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(ARGUMENT)
        count = sampling_params.max_tokens or 0
        if forced is not None and (not isinstance(forced, list) or len(forced) < count):
            raise ValueError(f"{ARGUMENT}: expected a list of at least max_tokens = {count} tokens")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(ARGUMENT)
        if forced is None:
            return None

        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output)]
            kept = logits[token].clone()
            return logits.fill_(-math.inf).index_fill_(0, torch.tensor([token], device=logits.device), float(kept))

        return force
