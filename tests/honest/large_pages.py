"""An attention library for pages of 256 tokens and more, and two dtypes: what it does not take is not asked of it."""

import torch

from conformance.mutants.sound_kernels import SoundKernels

CAPABILITIES = {"dtypes": (torch.float16, torch.bfloat16), "head_dims": (40, 64, 128), "block_sizes": tuple(range(256, 4097, 256))}
prefill_attention = SoundKernels().prefill_attention
decode_attention = SoundKernels().decode_attention
