"""The vendor's own collectives on cuda devices: NCCL, and kernels over symmetric memory."""
