"""The vendor's own collectives on cuda devices: NCCL."""
