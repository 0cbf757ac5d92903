"""The quantizers of other libraries, as ways to fit a scale to a group of elements.

Both libraries are optional and slow to import, so they are imported when a cache that needs one is made.
What they compute is kept in our own form (see `affine`): their packed forms mix tokens, so rows in them could
be neither cropped nor saved one by one.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from chat.layers.affine import TINY, Fit

_DISTUTILS = "SETUPTOOLS_USE_DISTUTILS"


def hqq_fit() -> Fit:
    """Half-quadratic quantization, which moves the zero point until few elements are far off. It stops when
    all groups of a call together stop gaining. Raises whatever importing hqq raises."""
    quantizer: Any = _imported("hqq.core.quantize").Quantizer

    def fit(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        size = groups.shape[-1]
        codes, found = quantizer.quantize(
            groups, nbits=bits, group_size=size, axis=1, bitpack=False, device=str(groups.device)
        )
        scale: Tensor = found["scale"].float()
        zero: Tensor = found["zero"].float()
        return codes.float(), -zero * scale, (2**bits - 1 - zero) * scale

    return fit


def quanto_fit() -> Fit:
    """Quanto's scale, from a group's extremes. Raises whatever importing optimum.quanto raises."""
    quanto: Any = _imported("optimum.quanto")
    types: dict[int, Any] = {2: quanto.qint2, 4: quanto.qint4}
    optimizer: Any = quanto.MaxOptimizer()

    def fit(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        scale: Tensor
        shift: Tensor
        # `optimize` itself: the call around it takes a single group for a whole tensor.
        scale, shift = optimizer.optimize(groups, types[bits], 0)
        scale = scale.clamp(min=TINY)
        codes: Tensor = torch.ops.quanto.quantize_affine(groups, bits, 0, None, scale, shift)
        return codes.float(), -shift, (2**bits - 1) * scale - shift

    return fit


def _imported(name: str) -> Any:
    """What these libraries warn of while they are imported (both use parts of Python that are on their way
    out) is for their authors. They import setuptools, which refuses where Python's own distutils was
    imported by anything else before, unless it is told to leave that alone."""
    before = os.environ.get(_DISTUTILS)
    if "distutils" in sys.modules and before is None:
        os.environ[_DISTUTILS] = "stdlib"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    finally:
        if before is None:
            os.environ.pop(_DISTUTILS, None)
