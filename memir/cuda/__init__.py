"""Rules of the CUDA target that need no tensors: which kernels PyTorch takes on a GPU, and what it holds beside the tensors."""
