"""Steps in Triton kernels and CUDA graphs; read `runner` first."""
