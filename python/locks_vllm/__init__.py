"""LOCKS as a plug-in of unmodified vLLM.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in each of its processes: front end,
engine core, workers and the short-lived process that inspects models. Importing this package costs nothing; vLLM
itself is imported by `register` only.
"""

__all__ = ["register"]

_CPU_BACKEND = "locks_vllm.cpu_backend.LocksCpuBackend"
_GPU_BACKEND = "locks_vllm.gpu_backend.LocksBackend"


def register() -> None:
    """Puts the LOCKS backend where vLLM looks for one. May be called any number of times.

    On NVIDIA GPUs LOCKS is vLLM's backend CUSTOM: `--attention-backend CUSTOM`. On the CPU, vLLM has one attention
    backend and no way to name another, so its entry is overridden; without `--additional-config '{"locks": ...}'` the
    override hands out vLLM's own implementation. On other platforms nothing is registered.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, _CPU_BACKEND)
    elif current_platform.is_cuda() and not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _GPU_BACKEND)
