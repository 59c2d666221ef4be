"""torch.autocast("cuda") on the pretended device: the same operations are cast as on CUDA.

torch keeps a dispatch key for autocasting on backends from outside, above autograd; the lists are those of torch's CUDA
documentation ("Autocast Op Reference").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from headway.syncs.sim import backend

_KEY: Final = "AutocastPrivateUse1"
LOWER: Final = (
    "matmul addmm addmv addr mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot linalg_vecdot prelu "
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution "
    "_convolution scaled_dot_product_attention gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell"
)
"""Cast to the dtype of the region."""
FLOAT32: Final = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp "
    "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
"""Cast to float32."""
WITH_DTYPE: Final = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Given dtype=float32 unless the caller says one."""
WIDEST: Final = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Cast to float32 where one of the inputs has it, otherwise to the dtype of the region."""


class State:
    """The libraries that hold the kernels; none before ``register``."""

    def __init__(self) -> None:
        self.libraries: list[torch.library.Library] = []


STATE: Final = State()


def register() -> None:
    """Once for the process, after the backend."""
    if STATE.libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    for names, wrap in ((LOWER, _lower), (FLOAT32, _float32), (WITH_DTYPE, _with_dtype), (WIDEST, _widest)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operation is not None:
                library.impl(name, wrap(operation), _KEY)
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    STATE.libraries.extend([library, others])


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY)))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if wide and value.device.type != "cpu" else value

    return tree_map(cast, values)


def _lower(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below():
            dtype = torch.get_autocast_dtype(backend.NAME)
            return operation(*_cast(args, dtype), **_cast(kwargs, dtype))

    return run


def _float32(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below():
            return operation(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return run


def _with_dtype(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below():
            low = isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)
            if low and kwargs.get("dtype") is None and not any(isinstance(value, torch.dtype) for value in args):
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    return run


def _widest(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below():
            is_wide = any(
                isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in tree_leaves((args, kwargs))
            )
            dtype = torch.float32 if is_wide else torch.get_autocast_dtype(backend.NAME)
            return operation(*_cast(args, dtype), **_cast(kwargs, dtype))

    return run
