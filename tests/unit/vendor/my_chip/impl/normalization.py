"""Normalization."""

import torch


def rms_norm_my_chip(obj, x, residual=None):
    """On whatever torch has."""
    total = x if residual is None else x + residual
    normed = torch.nn.functional.rms_norm(total, (x.shape[-1],), obj.weight, obj.variance_epsilon)
    return normed if residual is None else (normed, total)
