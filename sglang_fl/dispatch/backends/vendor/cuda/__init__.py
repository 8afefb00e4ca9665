"""NVIDIA's operators: the CUDA kernels of sgl_kernel (PyPI distribution sglang-kernel), without SGLang above them."""
