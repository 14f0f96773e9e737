"""Task accuracy of page selectors in a running vLLM engine: what `locks eval` does.

Three stages, each of which can run alone and on another machine: `prepare` makes the requests, with
lm-evaluation-harness and the model's tokenizer; `generate` answers them in one engine, arm by arm, and needs neither
data nor lm-evaluation-harness; `score` lets lm-evaluation-harness score the answers, and compares arms pair by pair.
All they hand on lies in one folder (`locks.evaluation.job`).
"""
