"""The vendor's own collectives on ascend devices: HCCL."""
