"""LOCKS as a plug-in of unmodified vLLM.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in each of its processes: front end,
engine core, workers and the short-lived process that inspects models. Importing this package costs nothing; vLLM
itself is imported by `register` only.
"""

__all__ = ["register"]

_CPU_BACKEND = "locks_vllm.cpu_backend.LocksCpuBackend"
_GPU_BACKEND = "locks_vllm.refusals.NoGpuBackend"


def _version() -> str:
    from importlib.metadata import version

    return version("locks-vllm")


def register() -> None:
    """Puts the LOCKS backend where vLLM looks for one. May be called any number of times.

    On the CPU, vLLM has one attention backend and no way to name another, so its entry is overridden; without
    `--additional-config '{"locks": ...}'` the override hands out vLLM's own implementation. Elsewhere vLLM's backends
    stay as they are, and `--attention-backend CUSTOM` tells that this version has no GPU backend.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, _CPU_BACKEND)
    elif not AttentionBackendEnum.CUSTOM.is_overridden():
        from vllm.logger import init_logger

        register_backend(AttentionBackendEnum.CUSTOM, _GPU_BACKEND)
        init_logger("vllm.locks").warning(
            'LOCKS %s has no GPU backend: "locks" in --additional-config does nothing on this platform', _version()
        )
