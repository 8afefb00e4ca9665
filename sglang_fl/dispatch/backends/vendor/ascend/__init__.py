"""Ascend's operators on torch_npu, written from its published documentation; they have not run on the chip."""
